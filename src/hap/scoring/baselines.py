"""Baselines: from the weights alone, from gradients, and from the diagonal of the curvature."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hap.errors import Argument, ForPython, HapError
from hap.groups.types import Group, Producer
from hap.scoring.base import DETACHED, Batch, Criterion, Scores, ScoringContext, as_hap_error, fold, samples, unit_map
from hap.scoring.hutchinson import diagonal_estimates, hessian_terms
from hap.scoring.memory_chunks import Pieces
from hap.scoring.sample_axis import BATCH_FIRST, check_alone, check_steady, check_targets, is_per_sample, last_alone


@dataclass(frozen=True)
class Magnitude(Criterion):
    """||w_p||_2^2 / |p|, the paper's magnitude baseline.

    >>> import hap
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)).eval()
    >>> model[0].weight.data = torch.tensor([[3.0, -4.0], [1.0, 0.0]])
    >>> hap.score(model, hap.trace(model, torch.randn(1, 2)), None, None, hap.Magnitude())["0"].tolist()
    [12.5, 0.5]
    """

    name: ClassVar[str] = "magnitude"
    elementwise: ClassVar[bool] = True

    def scores(self, problem: ScoringContext) -> Scores:
        return Scores(problem.mean_squares())


@dataclass(frozen=True)
class L1(Criterion):
    """||w_p||_1, the sum of absolute weights (Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017)."""

    name: ClassVar[str] = "l1"
    elementwise: ClassVar[bool] = True

    def scores(self, problem: ScoringContext) -> Scores:
        return Scores(problem.assemble(partial(problem.sum_of, torch.abs)))


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform random scores in [0, 1): the chance level."""

    seed: int = 0

    name: ClassVar[str] = "random"

    def scores(self, problem: ScoringContext) -> Scores:
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.rand, generator=generator, dtype=torch.float64)
        return Scores({n: draw(len(g)) for n, g in problem.groups.items()})


@dataclass(frozen=True)
class GeometricMedian(Criterion):
    """mean over units q of ||w_p - w_q||_2, by the root of |p|: the redundant go first (He et al., Filter Pruning via
    Geometric Median, CVPR 2019)."""

    name: ClassVar[str] = "geometric-median"

    def scores(self, problem: ScoringContext) -> Scores:
        def formula(group: Group, producer: Producer) -> torch.Tensor:
            rows = problem.weights[producer.weight].double().movedim(producer.dim, 0).flatten(1)
            return fold(group, producer, torch.cdist(rows, rows).mean(1) / rows.shape[1] ** 0.5)

        return Scores(problem.assemble(formula))


@dataclass(frozen=True)
class BNScale(Criterion):
    """|gamma| of the BatchNorm behind a unit, summed over several (Liu et al., Network Slimming, ICCV 2017)."""

    name: ClassVar[str] = "bn-scale"

    def scores(self, problem: ScoringContext) -> Scores:
        parameters = dict(problem.model.named_parameters())
        values = {}
        for name, group in problem.groups.items():
            unit = unit_map(problem.groups, group)
            scales = [Producer(w, 0, unit[problem.groups.axes[w, 0]]) for w in problem.groups.batchnorm_weights]
            own = [scale for scale in scales if (scale.unit >= 0).any()]
            if not own:
                advice = f"trace with ignore=({name!r},) or use another criterion"
                typed = ("use another ", Argument("criterion"))
                raise HapError(f"group {name!r} has no batch normalisation of its own; ", ForPython(advice, typed))
            gammas = [fold(group, scale, parameters[scale.weight].detach().abs()) for scale in own]
            values[name] = torch.stack(gammas).sum(0)
        return Scores(values)


@dataclass(frozen=True)
class Taylor(Criterion):
    """(g_p . w_p)^2, the squared first-order change of the loss when w_p becomes 0 (Molchanov et al., Importance
    Estimation for Neural Network Pruning, CVPR 2019).

    >>> import hap
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
    >>> batches = [(torch.randn(8, 2), torch.randint(0, 2, (8,)))]
    >>> groups = hap.trace(model, torch.randn(1, 2))
    >>> scores = hap.score(model, groups, batches, torch.nn.functional.cross_entropy, hap.Taylor())
    >>> len(scores["0"]), bool((scores["0"] >= 0).all())
    (3, True)
    """

    name: ClassVar[str] = "taylor"
    elementwise: ClassVar[bool] = True

    def scores(self, problem: ScoringContext) -> Scores:
        def slopes(batch: Batch, share: float) -> Iterator[dict[str, Tensor]]:
            gradients = _gradient(lambda weights, batch: problem.evaluate(weights, batch)[1], problem.weights, batch)
            yield {n: share * g.double() for n, g in gradients.items()}

        products = {n: problem.weights[n] * g for n, g in problem.sum_over_batches(slopes).items()}
        return Scores(problem.assemble(lambda g, p: problem.per_unit(g, p, products[p.weight]).square()))


@dataclass(frozen=True)
class DiagonalFisher(Criterion):
    """1/2 sum over the unit's weights of E[g^2] w^2, g a sample's gradient: OBD with the empirical Fisher's diagonal in
    place of the Hessian's (Theis et al., 2018). `chunk` samples go through at once.

    >>> DiagonalFisher(chunk=64).to_dict()
    {'name': 'fisher', 'chunk': 64}
    """

    chunk: int = 32

    name: ClassVar[str] = "fisher"
    elementwise: ClassVar[bool] = True

    def scores(self, problem: ScoringContext) -> Scores:
        def squares(batch: Batch, share: float) -> Iterator[dict[str, Tensor]]:
            check_targets(batch)
            output, _ = problem.evaluate({}, batch)
            if batch is problem.batches[0]:
                check_alone(batch, _by_place(output), _by_place(last_alone(problem, batch)))
            work = partial(_squared_gradients, problem, batch)
            for _, sums in Pieces(self.chunk).of(count := samples(batch), work):
                yield {n: share / count * values for n, values in sums.items()}

        check_steady(problem.batches)
        diagonal = problem.sum_over_batches(squares)
        if not any(bool(d.any()) for d in diagonal.values()):
            raise HapError(DETACHED)
        return _of_diagonal(problem, diagonal)


def _squared_gradients(problem: ScoringContext, batch: Batch, part: slice) -> dict[str, Tensor]:
    """The sum over some samples of a batch of their squared gradients, each by itself."""
    assert problem.loss is not None
    loss = problem.loss
    leaves, form = pytree.tree_flatten(batch)
    own = {i: t[part] for i, t in enumerate(leaves) if is_per_sample(t, samples(batch))}

    def one(weights: dict[str, Tensor], sample: dict[int, Tensor]) -> Tensor:
        alone = [sample[i][None] if i in own else leaf for i, leaf in enumerate(leaves)]
        x, y = pytree.tree_unflatten(alone, form)
        return loss(problem.call(weights, x), y)

    with as_hap_error("the model or the loss fails sample by sample", f". {BATCH_FIRST}"):
        return {n: g.double().square().sum(0) for n, g in _for_each(one, problem.weights, own).items()}


def _for_each(loss: Callable[..., Tensor], weights: dict[str, Tensor], values: dict[int, Tensor]) -> dict[str, Tensor]:
    """The gradients of all samples, stacked: at once, or one by one if the model does what vmap cannot, such as to ask
    whether a mask hides anything, or to write into a tensor of its own. What fails one by one is an error."""
    try:
        found: dict[str, Tensor] = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, values)
        return found
    except (HapError, torch.OutOfMemoryError):
        raise
    except Exception:  # vmap has many words for it; only one by one shows whether the model is at fault
        pass
    count = len(next(iter(values.values())))
    each = [_gradient(loss, weights, {i: t[k] for i, t in values.items()}) for k in range(count)]
    return {name: torch.stack([g[name] for g in each]) for name in weights}


def _gradient(loss: Callable[..., Tensor], weights: dict[str, Tensor], given: Any) -> dict[str, Tensor]:
    """The gradient of loss(weights, given) by autograd alone, which leaves inputs as they are: numpy can read them."""
    own = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad():
        value = loss(own, given)
        if not value.requires_grad:
            raise HapError(DETACHED)
        found = torch.autograd.grad(value, list(own.values()), materialize_grads=True)
    return dict(zip(own, found, strict=True))


def _by_place(output: Any) -> dict[str, Tensor]:
    leaves = enumerate(pytree.tree_leaves(output))
    return {f"output {i}": x for i, x in leaves if isinstance(x, Tensor) and x.is_floating_point()}


@dataclass(frozen=True)
class OBD(Criterion):
    """1/2 sum over the unit's weights of H_ii w_i^2 (LeCun et al., Optimal Brain Damage, 1989), H_ii the mean of v * Hv
    over `probes` random sign vectors v, `chunk` of them at a time or as many as memory allows.

    >>> OBD(probes=50).to_dict()
    {'name': 'obd', 'probes': 50, 'chunk': None, 'seed': 0}
    """

    probes: int = 300
    chunk: int | None = None
    seed: int = 0

    name: ClassVar[str] = "obd"
    elementwise: ClassVar[bool] = True

    def scores(self, problem: ScoringContext) -> Scores:
        hessian, probes = partial(hessian_terms, problem), range(self.probes)
        blocks = diagonal_estimates(hessian, problem.weights, probes, self.seed, self.chunk)
        means = ({n: v.sum(0, dtype=torch.float64) / self.probes for n, v in block.items()} for _, block in blocks)
        return _of_diagonal(problem, problem.summed(means))


def _of_diagonal(problem: ScoringContext, diagonal: dict[str, Tensor]) -> Scores:
    """1/2 sum over the unit's weights of d_i w_i^2, d of the weights' shapes."""
    terms = {n: problem.weights[n].double().square() * d for n, d in diagonal.items()}
    return Scores(problem.assemble(lambda g, p: problem.per_unit(g, p, terms[p.weight]) / 2))

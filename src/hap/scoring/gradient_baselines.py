"""Baselines from gradients and from the diagonal of the curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.execution.calling import call_arguments, copied
from hap.scoring.base import DETACHED, Batch, Criterion, Scores, ScoringContext, as_hap_error, samples
from hap.scoring.hessian_operator import Hessian
from hap.scoring.hutchinson import diagonal_estimates
from hap.scoring.memory_chunks import Pieces
from hap.scoring.sample_axis import (
    BATCH_FIRST,
    check_alone,
    check_steady,
    check_targets,
    is_per_sample,
    last_alone,
)
from hap.utils import distributed


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
        total = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in problem.weights.items()}
        for batch, share in zip(problem.batches, problem.shares(), strict=True):
            weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
            with torch.enable_grad():
                _, loss = problem.evaluate(weights, batch)
                gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
            for name, gradient in zip(weights, gradients, strict=True):
                total[name] += share * gradient.double()
        distributed.sum_(total.values())
        products = {n: g * problem.weights[n] for n, g in total.items()}
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
        check_steady(problem.batches)
        squares = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in problem.weights.items()}
        for batch, share in zip(problem.batches, problem.shares(), strict=True):
            count = samples(batch)
            check_targets(batch)
            with torch.no_grad():
                output, _ = problem.evaluate({}, batch)
            if batch is problem.batches[0]:
                check_alone(batch, _by_place(output), _by_place(last_alone(problem, batch)))

            def work(part: slice, batch: Batch = batch, count: int = count) -> dict[str, Tensor]:
                gradients = self._per_sample(problem, batch, count, part)
                return {n: g.double().square().sum(0) for n, g in gradients.items()}

            for _, sums in Pieces(self.chunk).of(count, work):
                for name, values in sums.items():
                    squares[name] += share / count * values
        distributed.sum_(squares.values())
        if not any(bool(s.any()) for s in squares.values()):
            raise HapError(DETACHED)
        return _of_diagonal(problem, squares)

    @staticmethod
    def _per_sample(problem: ScoringContext, batch: Batch, count: int, part: slice) -> dict[str, Tensor]:
        """The gradients of some samples of a batch, each by itself."""
        assert problem.loss is not None
        loss = problem.loss
        leaves, form = pytree.tree_flatten(batch)
        own = {i: t[part] for i, t in enumerate(leaves) if is_per_sample(t, count)}

        def one(weights: dict[str, Tensor], sample: dict[int, Tensor]) -> Tensor:
            alone = [sample[i][None] if i in own else leaf for i, leaf in enumerate(leaves)]
            x, y = pytree.tree_unflatten(alone, form)
            args, kwargs = copied(call_arguments(x))
            return loss(problem.call(weights, args, kwargs), y)

        with as_hap_error("the model or the loss fails sample by sample", f". {BATCH_FIRST}"):
            return _for_each(one, problem.weights, own)


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


def _gradient(loss: Callable[..., Tensor], weights: dict[str, Tensor], sample: dict[int, Tensor]) -> dict[str, Tensor]:
    """The gradient of one sample by autograd alone, which leaves inputs as they are, so that numpy can read them."""
    own = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad():
        value = loss(own, sample)
        if not value.requires_grad:
            raise HapError(DETACHED)
        found = torch.autograd.grad(value, list(own.values()), materialize_grads=True)
    return dict(zip(own, found, strict=True))


def _by_place(output: Any) -> dict[str, Any]:
    return {f"output {i}": leaf for i, leaf in enumerate(pytree.tree_leaves(output))}


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
        diagonal = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in problem.weights.items()}
        probes, hessian = range(self.probes), Hessian(problem)
        for _, block in diagonal_estimates(hessian, problem.weights, probes, self.seed, self.chunk):
            for name, values in block.items():
                diagonal[name] += values.sum(0, dtype=torch.float64) / self.probes
        distributed.sum_(diagonal.values())
        return _of_diagonal(problem, diagonal)


def _of_diagonal(problem: ScoringContext, diagonal: dict[str, Tensor]) -> Scores:
    """1/2 sum over the unit's weights of d_i w_i^2, d of the weights' shapes."""
    terms = {n: d * problem.weights[n].double().square() for n, d in diagonal.items()}
    return Scores(problem.assemble(lambda g, p: problem.per_unit(g, p, terms[p.weight]) / 2))

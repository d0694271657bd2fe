"""One score for all slices of a unit: what a head's query, key, value and output say together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.errors import Argument, HapError
from hap.groups.groups import Groups
from hap.groups.types import Group, Producer
from hap.scoring.base import Batch, Criterion, Scores, ScoringContext, check_finite_scores, fold, unit_map
from hap.scoring.hessian_trace import HessianTrace, equation_6, hutchinson
from hap.scoring.outputs import softmax_curvature
from hap.scoring.sample_axis import run_recorded

METHODS = ("hutchinson", "gauss-newton")
INSTEAD = 'use JointTrace(method="hutchinson")'


def readers(groups: Groups, group: Group) -> tuple[Producer, ...]:
    """The slices that read what units hand on."""
    unit = unit_map(groups, group)
    return tuple(Producer(weight, dim, unit[groups.axes[weight, dim]]) for weight, dim in group.consumers)


def all_slices(groups: Groups, group: Group) -> tuple[Producer, ...]:
    """All that a unit owns: of a head the query, key and value slices, which compute it, and the output slice."""
    return group.producers + readers(groups, group)


def with_all_slices(problem: ScoringContext) -> ScoringContext:
    """A context in which each unit owns the slices that read it as well as those that compute it, as one p."""
    groups = problem.groups
    grown = {n: replace(g, producers=all_slices(groups, g)) for n, g in groups.items()}
    return replace(problem, groups=replace(groups, groups=grown), joint=True)


@dataclass(frozen=True)
class Whole(Criterion):
    """Another criterion over all that a unit owns: of a head the query, key, value and output slices. The magnitude is
    the mean square over all of them, however the model stores them; the others add the scores of the slices.

    >>> Whole(hap.Magnitude()).to_dict()
    {'name': 'whole', 'of': {'name': 'magnitude'}}
    """

    of: Criterion

    name: ClassVar[str] = "whole"

    def __post_init__(self) -> None:
        if not self.of.elementwise:
            raise HapError(
                f"Whole cannot be of {type(self.of).__name__}; expected a criterion that looks at each weight by "
                "itself, such as Magnitude or Taylor. For the Hessian's trace over all of a unit use JointTrace."
            )

    def scores(self, problem: ScoringContext) -> Scores:
        return self.of.scores(with_all_slices(problem))


@dataclass(frozen=True)
class JointTrace(Criterion):
    """trace(H_pp) / (2 |p|) * ||w_p||^2, p all that a unit owns: of a head the query, key, value and output slices.

    "hutchinson"    `HessianTrace` by `probes` random sign vectors over all slices of a unit, with its `deflate`. The
                    graph of one batch and one probe are held at a time, so the size of the batches bounds the memory.
    "gauss-newton"  J^T B J instead of the Hessian, B the curvature of the cross-entropy in the outputs: `draws` random
                    sign combinations of the columns of a root of B for each sample, where Fisher's way would draw
                    labels; unbiased like that, but without its rare large values on confident samples. Gradients are
                    squared sample by sample, and their memory is that of one layer at a time.

    >>> JointTrace(probes=50).to_dict()
    {'name': 'joint', 'method': 'hutchinson', 'probes': 50, 'draws': 1, 'seed': 0, 'deflate': 0}
    """

    method: str = "hutchinson"
    probes: int = 100
    draws: int = 1
    seed: int = 0
    deflate: int = 0

    name: ClassVar[str] = "joint"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise HapError(f"method is {self.method!r}; expected one of {', '.join(map(repr, METHODS))}")
        if self.probes < 2 or self.draws < 1 or self.deflate < 0:
            raise HapError(
                Argument("probes", self.probes),
                f", draws={self.draws}, deflate={self.deflate}; expected at least 2 probes, 1 draw and 0 directions",
            )

    def scores(self, problem: ScoringContext) -> Scores:
        joint = with_all_slices(problem)
        if self.method == "hutchinson":
            if coarse := [n for n, w in joint.weights.items() if w.dtype in (torch.float16, torch.bfloat16)]:
                kind = str(joint.weights[coarse[0]].dtype).removeprefix("torch.")
                raise HapError(
                    f"{coarse[0]} is in {kind}, too coarse for second derivatives; call model.float() first, or use "
                    'JointTrace("gauss-newton")'
                )
            how = HessianTrace("hutchinson", self.probes, chunk=1, seed=self.seed, deflate=self.deflate)
            return hutchinson(joint, how)
        inner = {p.weight: 1 - p.dim for group in problem.groups.values() for p in group.producers}
        inner |= {weight: dim for group in problem.groups.values() for weight, dim in group.consumers}
        squares = _drawn_squares(joint, inner, self.draws, self.seed)
        each = range(self.draws)
        values = equation_6(joint, lambda g, p: fold(g, p, torch.stack([squares[p.weight, p.dim, d] for d in each])))
        check_finite_scores(values, "a squared gradient")
        return Scores({n: v.mean(0) for n, v in values.items()}, about={"method": self.method, "draws": self.draws})


def _drawn_squares(
    problem: ScoringContext, inner: dict[str, int], draws: int, seed: int
) -> dict[tuple[str, int, int], Tensor]:
    """Unbiased estimates of trace(J_p^T B J_p), B of the mean cross-entropy, for every index p of an axis, by weight,
    axis and draw. `inner` is the axis that a weight's layer reads with, across from that of the units it computes."""
    generator = torch.Generator(problem.device).manual_seed(seed)

    def squares(batch: Batch, share: float) -> Iterator[dict[tuple[str, int, int], Tensor]]:
        output, loss, calls = run_recorded(problem, batch, problem.weights, INSTEAD)
        logits = _logits(output, loss, batch)
        q = logits.detach().double().softmax(-1)
        curvature, outputs = softmax_curvature(q, torch.ones_like(q[:, 0])), [calls[n][1] for n in problem.weights]
        for draw in range(draws):
            vector = curvature.draw(1, generator)[0][0].to(logits.dtype)
            back = torch.autograd.grad(logits, outputs, vector, retain_graph=True, materialize_grads=True)
            for (name, weight), gradient in zip(problem.weights.items(), back, strict=True):
                x = calls[name][0].detach()
                _check_matrix(name, tuple(weight.shape), inner[name], x, gradient, len(logits))
                each = x.flatten(1, -2).mT @ gradient.flatten(1, -2)  # a sample's gradient: (inputs, outputs)
                wide = each.to(torch.promote_types(each.dtype, torch.float32))
                total = wide.square_().sum(0, dtype=torch.float64)
                axes = {inner[name]: total.sum(1), 1 - inner[name]: total.sum(0)}
                yield {(name, axis, draw): share / len(logits) * values for axis, values in axes.items()}

    return problem.sum_over_batches(squares)


def _logits(output: Any, loss: Tensor, batch: Batch) -> Tensor:
    """The model's outputs, one vector per sample, if the loss is their cross-entropy."""
    logits, target = getattr(output, "logits", output), batch[1]
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not isinstance(target, Tensor):
        raise HapError(f"the output is not one vector per sample; {INSTEAD}")
    slope = torch.autograd.grad(loss, logits, retain_graph=True, materialize_grads=True)[0].double()
    plain = [_slope_of_cross_entropy(logits, target, dtype).double() for dtype in {loss.dtype, torch.float32}]
    off = min(float((slope - p).norm() / p.norm().clamp_min(1e-30)) for p in plain)
    if off > max(1e-4, torch.finfo(loss.dtype).eps / 2):
        raise HapError(
            f"the loss is not the cross-entropy of the outputs: its gradient in them is off by {off:.2g}, relative; "
            'this method knows the cross-entropy alone. Use JointTrace(method="hutchinson").'
        )
    return logits


@torch.enable_grad()
def _slope_of_cross_entropy(logits: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient in the outputs of their cross-entropy, computed in a dtype. It tells apart losses whose values are
    close, as those with and without label smoothing are where all classes are about as probable."""
    outputs = logits.detach().requires_grad_()
    loss = F.cross_entropy(outputs.to(dtype), target.to(dtype) if target.is_floating_point() else target)
    return torch.autograd.grad(loss, outputs)[0]


def _check_matrix(weight: str, shape: tuple[int, ...], axis: int, x: Tensor, gradient: Tensor, count: int) -> None:
    expected = (x.shape[-1], gradient.shape[-1]) if axis == 0 else (gradient.shape[-1], x.shape[-1])
    if x.ndim < 3 or len(x) != count or len(gradient) != count or shape != expected:
        raise HapError(
            f"{weight} of shape {shape} turns {tuple(x.shape)} into {tuple(gradient.shape)}, which is no matrix "
            f"applied to the last axis of every sample; {INSTEAD}"
        )

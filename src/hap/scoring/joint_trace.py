"""Criteria for attention heads: all that a head owns as one group of parameters, or a gate on its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hap.errors import Argument, HapError
from hap.scoring.base import Criterion, Scores, ScoringContext, fold
from hap.scoring.hessian_trace import quadratics
from hap.scoring.input_checks import check_finite_scores
from hap.scoring.over_all_slices import mean_squares, per_unit_of_all, with_all_slices
from hap.scoring.sampled_gauss_newton import drawn_traces
from hap.utils import distributed

METHODS = ("hutchinson", "gauss-newton")


@dataclass(frozen=True)
class JointTrace(Criterion):
    """Equation 6, trace(H_pp) / (2 |p|) * ||w_p||^2, with all that a unit owns as one group of parameters p: of a head
    the query, key, value and output slices, as in the paper's experiment on heads.

    "hutchinson"    the Hessian, by `probes` random sign vectors. One graph of one batch and one probe are held at a
                    time, so the size of the batches bounds the memory. Gives standard errors. `deflate` is that of
                    `HessianTrace`: less noise, for the memory of two copies of the weights for each direction.
    "gauss-newton"  J^T B J instead of the Hessian, B the curvature of the cross-entropy in the outputs: `draws` random
                    sign combinations of the columns of a root of B for each sample, where Fisher's way would draw
                    labels; unbiased like that, but without its rare large values on confident samples. Gradients are
                    squared sample by sample, and their memory is that of one layer at a time.
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
        inner = _input_axes(problem)
        problem = with_all_slices(problem)
        if self.method == "hutchinson":
            _refuse_half(problem)
            probed = _deflated if self.deflate else _probed
            count, traces = self.probes, probed(problem, self)
        else:
            count, traces = self.draws, drawn_traces(problem, inner, self.draws, self.seed)
        check_finite_scores(traces, "a Hessian product" if self.method == "hutchinson" else "a squared gradient")
        values = traces * torch.cat(list(mean_squares(problem).values())) / 2
        sizes = [len(g) for g in problem.groups.values()]
        mean = dict(zip(problem.groups, values.mean(0).split(sizes), strict=True))
        about = {"method": self.method, "probes" if self.method == "hutchinson" else "draws": count}
        if self.method != "hutchinson":
            return Scores(mean, about=about)
        error = values.std(0) / count**0.5
        about |= {"deflate": self.deflate} if self.deflate else {}
        return Scores(mean, dict(zip(problem.groups, error.split(sizes), strict=True)), about)


def _refuse_half(problem: ScoringContext) -> None:
    """Second derivatives in half precision are mostly rounding."""
    for name, weight in problem.weights.items():
        if weight.dtype in (torch.float16, torch.bfloat16):
            kind = str(weight.dtype).removeprefix("torch.")
            raise HapError(
                f"{name} is in {kind}, too coarse for second derivatives; call model.float() first, or use "
                'JointTrace("gauss-newton")'
            )


def _deflated(problem: ScoringContext, how: JointTrace) -> Tensor:
    """Estimates as those of `_probed`, with what the Hessian's leading directions contribute known exactly."""
    blocks = quadratics(problem, how.probes, 1, how.seed, how.deflate)
    probes = ({n: q[i] for n, q in block.items()} for block in blocks for i in range(len(next(iter(block.values())))))
    return torch.stack(
        [per_unit_of_all(problem, lambda g, p, e=elements: problem.per_unit(g, p, e[p.weight])) for elements in probes]
    )


def _probed(problem: ScoringContext, how: JointTrace) -> Tensor:
    """v^T H_pp v for every probe and unit (probes, units): a double backward per probe and batch.

    Products are summed along the axes of units, and folded into units once, since that waits for the device.
    """
    device = next(iter(problem.weights.values())).device
    axes = dict.fromkeys((p.weight, p.dim) for g in problem.groups.values() for p in g.producers)
    sums = {
        (name, dim): torch.zeros(how.probes, problem.weights[name].shape[dim], dtype=torch.float64, device=device)
        for name, dim in axes
    }
    for batch, share in zip(problem.batches, problem.shares(), strict=True):
        weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            _, loss = problem.evaluate(weights, batch)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
        for probe in range(how.probes):
            signs = _signs(weights, device, how.seed * 1_000_003 + probe)
            products = torch.autograd.grad(slopes, list(weights.values()), signs, True, materialize_grads=True)
            elements = {n: v * p for n, v, p in zip(weights, signs, products, strict=True)}
            for (name, dim), total in sums.items():
                total[probe] += share * _sum_along(elements[name], dim)
    distributed.sum_(sums.values())
    return per_unit_of_all(problem, lambda g, p: fold(g, p, sums[p.weight, p.dim]))


def _sum_along(values: Tensor, dim: int) -> Tensor:
    """The sum over all other axes, in float64."""
    rest = [d for d in range(values.ndim) if d != dim]
    return values.sum(rest, dtype=torch.float64) if rest else values.double()


def _signs(weights: dict[str, Tensor], device: torch.device, seed: int) -> list[Tensor]:
    """The same probe for every batch, drawn again each time instead of being kept."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randint(0, 2, w.shape, generator=generator, device=device).to(w).mul_(2).sub_(1) for w in weights.values()
    ]


# ---- the Gauss-Newton trace -----------------------------------------------------------------------------------


def _input_axes(problem: ScoringContext) -> dict[str, int]:
    """Which axis of each matrix its layer reads with: the one across from that of the units it computes."""
    axes: dict[str, int] = {}
    for group in problem.groups.values():
        axes |= {p.weight: 1 - p.dim for p in group.producers} | dict(group.consumers)
    return axes


# ---- the gradient of a gate -----------------------------------------------------------------------------------

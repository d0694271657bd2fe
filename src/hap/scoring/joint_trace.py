"""Equation 6 with all that a unit owns as one group of parameters, as in the paper's experiment on heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hap.errors import Argument, HapError
from hap.scoring.base import Criterion, Scores, ScoringContext, fold
from hap.scoring.hessian_trace import HessianTrace, equation_6, hutchinson
from hap.scoring.input_checks import check_finite_scores
from hap.scoring.over_all_slices import with_all_slices
from hap.scoring.sampled_gauss_newton import drawn_squares

METHODS = ("hutchinson", "gauss-newton")


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
            _refuse_half(joint)
            how = HessianTrace("hutchinson", self.probes, chunk=1, seed=self.seed, deflate=self.deflate)
            return hutchinson(joint, how, jointly=True)
        squares = drawn_squares(joint, _input_axes(problem), self.draws, self.seed)
        values = equation_6(joint, lambda g, p: fold(g, p, squares[p.weight, p.dim]), jointly=True)
        check_finite_scores(torch.cat(list(values.values()), dim=1), "a squared gradient")
        return Scores({n: v.mean(0) for n, v in values.items()}, about={"method": self.method, "draws": self.draws})


def _refuse_half(problem: ScoringContext) -> None:
    """Second derivatives in half precision are mostly rounding."""
    for name, weight in problem.weights.items():
        if weight.dtype in (torch.float16, torch.bfloat16):
            kind = str(weight.dtype).removeprefix("torch.")
            raise HapError(
                f"{name} is in {kind}, too coarse for second derivatives; call model.float() first, or use "
                'JointTrace("gauss-newton")'
            )


def _input_axes(problem: ScoringContext) -> dict[str, int]:
    """Which axis of each matrix its layer reads with: the one across from that of the units it computes."""
    axes: dict[str, int] = {}
    for group in problem.groups.values():
        axes |= {p.weight: 1 - p.dim for p in group.producers} | dict(group.consumers)
    return axes

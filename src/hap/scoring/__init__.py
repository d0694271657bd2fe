"""score: how sensitive the loss is to each unit. A new criterion is one class and one line in CRITERIA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from hap.errors import Argument, ForPython, HapError
from hap.execution.input_checks import check_finite, outside_inference
from hap.groups.groups import Groups
from hap.groups.unprunable_summary import nothing_in_words
from hap.scoring.base import Criterion, Scores, ScoringContext
from hap.scoring.batch import Loss
from hap.scoring.gate_curvature import GateCurvature
from hap.scoring.gate_gradient import GateGradient
from hap.scoring.gradient_baselines import OBD, DiagonalFisher, Taylor
from hap.scoring.hessian_trace import HessianTrace
from hap.scoring.joint_trace import JointTrace
from hap.scoring.over_all_slices import Whole
from hap.scoring.weight_baselines import L1, BNScale, GeometricMedian, Magnitude, Random

__all__ = [
    "CRITERIA",
    "L1",
    "OBD",
    "BNScale",
    "Criterion",
    "DiagonalFisher",
    "GateCurvature",
    "GateGradient",
    "GeometricMedian",
    "HessianTrace",
    "JointTrace",
    "Magnitude",
    "Random",
    "Reversed",
    "Scores",
    "ScoringContext",
    "Taylor",
    "Whole",
    "as_criterion",
    "score",
]  # fmt: skip


@dataclass(frozen=True)
class Reversed(Criterion):
    """Another criterion upside down: the most sensitive go first. The paper's R-HAP."""

    of: Criterion

    name: ClassVar[str] = "reversed"

    def scores(self, problem: ScoringContext) -> Scores:
        inner = self.of.scores(problem)
        return Scores({n: -v for n, v in inner.items()}, inner.errors, inner.about)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "of": self.of.to_dict()}


CRITERIA: dict[str, type[Criterion]] = {
    c.name: c
    for c in (
        HessianTrace, Magnitude, L1, Random, BNScale, Taylor, DiagonalFisher, OBD, GeometricMedian, JointTrace,
        GateGradient, GateCurvature,
    )
}  # fmt: skip


def as_criterion(value: Criterion | str) -> Criterion:
    """A criterion, or the name of one; "reversed-NAME" turns one upside down."""
    if isinstance(value, Criterion):
        return value
    if isinstance(value, str) and value.startswith("reversed-"):
        return Reversed(as_criterion(value.removeprefix("reversed-")))
    if value not in CRITERIA:
        seen = Argument("criterion", value, text="criterion")
        rest = ForPython(", reversed-NAME, or a hap criterion", (" or reversed-NAME",))
        raise HapError(seen, f" is {value!r}; expected one of {', '.join(CRITERIA)}", rest)
    return CRITERIA[value]()


def score(
    model: nn.Module,
    groups: Groups,
    batches: Iterable[Any] | None,
    loss: Loss | None,
    criterion: Criterion | str = "hessian",
) -> Scores:
    """One value per unit of every group: `scores[name][unit]`, a float64 tensor on the CPU. Low ones go first.

    `batches` is any iterable of (input, target); it and `loss` (output, target -> mean over the batch) may be None for
    criteria that need no data. The model is left exactly as found. Under torch.distributed each process passes its own
    batches, and all get the scores of the whole.
    """
    if not len(groups):
        check_finite(model)
        raise HapError(nothing_in_words(groups), ForPython("; print(groups) has all reasons"))
    with outside_inference(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        scores = as_criterion(criterion).scores(ScoringContext(model, groups, batches, loss))
    if not all(bool(v.isfinite().all()) for v in scores.values()):
        check_finite(model)
    return Scores({n: v.cpu() for n, v in scores.items()}, {n: v.cpu() for n, v in scores.errors.items()}, scores.about)

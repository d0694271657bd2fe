"""Scores: how much the loss is expected to rise when a unit goes.

A criterion turns a `ScoringContext` (model, groups, batches, loss) into `Scores`, one value per unit; it knows weights
and axes, and no types of layers. Each family of criteria has a file of its own, and a new one needs its file and its
line in `CRITERIA` (docs/extending.md). Start reading at `base.py`, then `baselines.py`.

The paper's criterion is `hessian_trace.py`. Traces come from random probes (`hutchinson.py`) or from backward
passes for each output (`gauss_newton.py`).
Import from here `score`, the criteria and what one of your own needs; not from further down.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from hap.errors import Argument, ForPython, HapError
from hap.execution.input_checks import check_finite, outside_inference
from hap.groups.groups import Groups
from hap.groups.unprunable_summary import nothing_in_words
from hap.scoring.base import Criterion, Loss, Scores, ScoringContext
from hap.scoring.baselines import L1, OBD, BNScale, DiagonalFisher, GeometricMedian, Magnitude, Random, Taylor
from hap.scoring.gates import GateCurvature, GateGradient
from hap.scoring.hessian_trace import HessianTrace
from hap.scoring.over_all_slices import JointTrace
from hap.scoring.over_all_slices import Whole as Whole
from hap.scoring.reconstruction import Reconstruction


@dataclass(frozen=True)
class Reversed(Criterion):
    """Another criterion upside down: the most sensitive units go first. The paper's R-HAP.

    >>> Reversed(Magnitude()).to_dict()
    {'name': 'reversed', 'of': {'name': 'magnitude'}}
    """

    of: Criterion

    name: ClassVar[str] = "reversed"

    def scores(self, problem: ScoringContext) -> Scores:
        inner = self.of.scores(problem)
        return Scores({n: -v for n, v in inner.items()}, inner.errors, inner.about)


_BASELINES = (Magnitude, L1, Random, BNScale, Taylor, DiagonalFisher, OBD, GeometricMedian)
_EVERY = (HessianTrace, *_BASELINES, JointTrace, GateGradient, GateCurvature, Reconstruction)
CRITERIA: dict[str, type[Criterion]] = {criterion.name: criterion for criterion in _EVERY}
"""Criteria by name. All lists of names, such as those of the command line, are made from this."""


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
    """How much the loss is expected to rise when a unit goes, for every unit of every group.

    Arguments:
        model: in eval mode; it is left exactly as found.
        groups: what `hap.trace` found.
        batches: an iterable of (input, target); None for criteria that need no data. Under torch.distributed each
            process passes its own batches, and all get the scores of the whole.
        loss: (output, target) -> mean over the batch, twice differentiable; None for criteria that need no data.
        criterion: a criterion, or its name: one of `hap.scoring.CRITERIA`, or reversed-NAME.

    Returns:
        `Scores`: `scores[name][unit]`, a float64 tensor on the CPU for each group. Low ones go first.

    >>> import hap
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    >>> model[0].weight.data = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 0.0]])
    >>> groups = hap.trace(model, torch.randn(1, 2))
    >>> hap.score(model, groups, None, None, "magnitude")["0"].tolist()
    [12.5, 0.0, 4.5]
    """
    if not len(groups):
        check_finite(model)
        raise HapError(nothing_in_words(groups), ForPython("; print(groups) has all reasons"))
    with outside_inference(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        scores = as_criterion(criterion).scores(ScoringContext(model, groups, batches, loss))
    if not all(bool(v.isfinite().all()) for v in scores.values()):
        check_finite(model)
    return Scores({n: v.cpu() for n, v in scores.items()}, {n: v.cpu() for n, v in scores.errors.items()}, scores.about)

"""One score for all slices of a unit: what a head's query, key, value and output say together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hap.errors import HapError
from hap.groups.groups import Groups
from hap.groups.types import Group, Producer
from hap.scoring.base import Criterion, Scores, ScoringContext
from hap.scoring.weight_baselines import Magnitude


def all_slices(groups: Groups, group: Group) -> tuple[Producer, ...]:
    """All that a unit owns: the slices that compute it, and the slices that read it. Of a head these are the query,
    key, value and output slices."""
    unit = np.full(groups.classes, -1, dtype=np.int64)
    unit[group.classes] = np.arange(len(group))
    readers = [Producer(weight, dim, unit[groups.axes[weight, dim]]) for weight, dim in group.consumers]
    return (*group.producers, *readers)


def with_all_slices(problem: ScoringContext) -> ScoringContext:
    """A context in which each unit owns the slices that read it as well as those that compute it."""
    groups = problem.groups
    grown = {n: replace(g, producers=all_slices(groups, g)) for n, g in groups.items()}
    return replace(problem, groups=replace(groups, groups=grown))


@dataclass(frozen=True)
class Whole(Criterion):
    """Another criterion over all that a unit owns: of a head the query, key, value and output slices. The magnitude is
    the mean square over all of them, however the model stores them; the others add the scores of the slices.

    >>> Whole(Magnitude()).to_dict()
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
        problem = with_all_slices(problem)
        return Scores(mean_squares(problem)) if isinstance(self.of, Magnitude) else self.of.scores(problem)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "of": self.of.to_dict()}


def mean_squares(problem: ScoringContext) -> dict[str, Tensor]:
    """||w_p||^2 / |p| for each unit, over all its slices together."""
    norms = problem.assemble(partial(problem.sum_of, torch.square))
    sizes = problem.assemble(problem.sizes)
    return {n: norms[n] / sizes[n].clamp_min(1) for n in norms}

"""Budgets on the heads and the MLP neurons of a transformer, and pruning to them in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from hap.errors import HapError
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import only, units_of
from hap.groups.types import Ints
from hap.implants import NarrowHeads
from hap.planning.assemble import draft
from hap.planning.budget import DEFAULT_LIMITS, Budget, Limits
from hap.planning.cost import Cost
from hap.planning.plan import Plan
from hap.planning.search import plan
from hap.pruning.apply import apply_
from hap.pruning.narrowable_heads import narrowable
from hap.scoring import Criterion, score
from hap.scoring.batch import Loss
from hap.tracing.trace import trace


def plan_blocks(groups: Groups, scores: Mapping[str, Tensor], *, heads: float | None = None, mlp: float | None = None,
                flops: float | None = None, implant: NarrowHeads | None = None,
                limits: Limits = DEFAULT_LIMITS) -> Plan:  # fmt: skip
    """A plan for the blocks of a transformer that leaves its stream, embeddings and classifier alone.

    `heads` and `mlp` are the shares of heads and of hidden neurons that are LEFT, each ranked among its own kind over
    all layers; `flops` instead is one budget over both. At least one head stays in each layer. With an `implant`, which
    goes with `flops` alone, some of the heads that would go are narrowed; the groups then come from `hap.narrowable`.
    """
    budgets = _budgets(heads, mlp, flops)
    if implant is not None and flops is None:
        raise HapError("a narrow head counts as a head, so heads= and mlp= leave nothing to implant; expected flops=")
    if flops is not None:
        return plan(units_of(groups, *budgets), scores, Budget(flops=flops), implant, limits)
    removed: dict[str, list[int]] = {}
    for kind, budget in budgets.items():
        removed |= plan(units_of(groups, kind), scores, budget, limits=limits).removed
    return draft(only(groups, removed), removed)


def prune_blocks_(model: nn.Module, example: Any, batches: Iterable[Any] | None = None, loss: Loss | None = None, *,
                  heads: float | None = None, mlp: float | None = None, flops: float | None = None,
                  implant: NarrowHeads | None = None, criterion: Criterion | str = "joint",
                  limits: Limits = DEFAULT_LIMITS, verify: bool = True) -> Plan:  # fmt: skip
    """Remove heads and/or MLP neurons from a transformer in place, and return the plan: see `plan_blocks`.

    plan = hap.prune_blocks_(model, example, batches, loss, heads=0.5)
    """
    budgets = _budgets(heads, mlp, flops)
    groups = trace(model, example)
    groups = groups if implant is None else narrowable(model, groups, example)
    scores = score(model, units_of(groups, *budgets), batches, loss, criterion)
    chosen = plan_blocks(groups, scores, heads=heads, mlp=mlp, flops=flops, implant=implant, limits=limits)
    apply_(model, chosen, example, verify)
    return chosen


def _budgets(heads: float | None, mlp: float | None, flops: float | None) -> Mapping[str, Budget]:
    """The budget of each kind of units that may go; one over both is that of either."""
    given = {kind: _Share(channels=x, kind=kind) for kind, x in (("heads", heads), ("mlp", mlp)) if x is not None}
    if (flops is None) == (not given):
        raise HapError(f"heads={heads}, mlp={mlp}, flops={flops}; expected heads and/or mlp, or flops alone")
    return given or dict.fromkeys(("heads", "mlp"), Budget(flops=flops))


@dataclass(frozen=True)
class _Share(Budget):
    """A budget of units that goes by the name that the caller gave it, in errors too."""

    kind: str = ""

    @property
    def given(self) -> dict[str, float]:
        return {self.kind: self.channels} if self.channels is not None else {}

    def of(self, cost: Cost) -> Ints:
        return np.array([cost.channels], dtype=np.int64)

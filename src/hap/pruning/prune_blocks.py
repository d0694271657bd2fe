"""plan_blocks and prune_blocks_: budgets on the heads and the MLP neurons of a transformer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hap.errors import HapError
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import only, units_of
from hap.implants import NarrowHeads
from hap.planning.assemble import draft
from hap.planning.budget import DEFAULT_LIMITS, Budget, Limits
from hap.planning.choose_units import plan
from hap.planning.plan import Plan
from hap.pruning.apply import apply_
from hap.pruning.narrowable_heads import narrowable
from hap.scoring import Criterion, score
from hap.scoring.base import Loss
from hap.tracing.trace import trace


def plan_blocks(
    groups: Groups,
    scores: Mapping[str, Tensor],
    *,
    heads: float | None = None,
    mlp: float | None = None,
    flops: float | None = None,
    implant: NarrowHeads | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Plan:
    """Plan for the blocks of a transformer, whose stream, embeddings and classifier are left alone.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> groups = hap.trace(layer, torch.randn(1, 3, 8))
    >>> hap.plan_blocks(groups, {"linear1": torch.arange(16)}, mlp=0.25).kept
    {'linear1': [12, 13, 14, 15]}

    Arguments: `heads` and `mlp` are the shares of heads and of hidden neurons that are LEFT, each ranked among its own
    kind over all layers; `flops` instead is one budget over both. With an `implant`, which needs `flops`, some of the
    heads that would go are narrowed; the groups then come from `hap.narrowable`.
    Returns: the plan. At least one head stays in each layer.
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


def prune_blocks_(
    model: nn.Module,
    example: Any,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    *,
    heads: float | None = None,
    mlp: float | None = None,
    flops: float | None = None,
    implant: NarrowHeads | None = None,
    criterion: Criterion | str = "joint",
    limits: Limits = DEFAULT_LIMITS,
    verify: bool = True,
) -> Plan:
    """Remove heads and/or MLP neurons from a transformer in place.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> plan = hap.prune_blocks_(layer, torch.randn(1, 3, 8), mlp=0.25, criterion="magnitude")
    >>> layer.linear1.out_features
    4

    Arguments: those of `hap.plan_blocks`, `hap.score` and `hap.apply_`. Returns: the plan.
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

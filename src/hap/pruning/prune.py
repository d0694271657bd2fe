"""prune_: trace, score, plan and apply in one call."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hap.errors import HapError
from hap.execution.input_checks import check_given, outside_inference
from hap.graph.partition import Parts
from hap.groups.groups import Groups
from hap.groups.unprunable_summary import share_unprunable
from hap.implants import Implant, as_implant
from hap.planning.budget import DEFAULT_LIMITS, Budget, Limits
from hap.planning.choose_units import plan
from hap.planning.plan import Plan
from hap.pruning.apply import apply_
from hap.pruning.compensate import compensate_
from hap.pruning.in_parts import check_parts, trace_whole_or_parts
from hap.pruning.narrowable_heads import narrowable
from hap.pruning.plan_for_latency import plan_for_latency
from hap.scoring import Criterion, score
from hap.scoring.base import Loss
from hap.surgery.rotate_heads import restored_on_failure, values_of

MUCH = 1 / 3
"""Where more of the parameters than that could not be touched, a warning says so; the plan's text says it of less."""


def prune_(
    model: nn.Module,
    example: Any,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    *,
    params: float | None = None,
    flops: float | None = None,
    channels: float | None = None,
    activations: float | None = None,
    latency: float | None = None,
    backend: str = "eager",
    threads: int | None = None,
    implant: Implant | float | None = None,
    coupling: str = "joint",
    criterion: Criterion | str = "hessian",
    limits: Limits = DEFAULT_LIMITS,
    ignore: Sequence[str] = (),
    stream: bool = False,
    per_cost: bool = False,
    compensate: bool = False,
    verify: bool = True,
) -> Plan:
    """Prune a trained `model`, which is in eval mode, in place. If anything fails, it is left as it was.

    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> plan = prune_(net, net[0].weight[:2].detach(), criterion="magnitude", flops=0.5)
    >>> net[0].out_features
    8

    Arguments: those of `hap.trace`, `hap.score`, `hap.plan` and `hap.apply_`. Budgets, from `params` to `latency`, are
    the fraction LEFT. `backend` and `threads` are for `latency`, which is met by timing copies. `implant` may be the
    share of the removed units to replace by 1x1 convolutions. `compensate` repairs what reads removed units.
    Returns: the plan. `print(plan)` says what could not be touched, as does a warning where that is over a third.
    A model that torch.export cannot capture as a whole, such as a detector, is pruned by its parts (`hap.parts`), which
    a warning names: what passes between them is kept, and budgets of FLOPs are those of the parts.
    """
    check_given(model, example)
    budget = Budget(params, flops, channels, latency, activations)
    batches = list(batches) if batches is not None else None
    if compensate and batches is None:
        raise HapError("compensate=True needs batches, an iterable of (input, target)")
    with outside_inference(model):
        groups, view = trace_whole_or_parts(model, example, coupling, ignore, stream)
        if (kind := as_implant(implant)) is not None and kind.needs_head_spaces:
            groups = narrowable(model, groups, example) if view is None else narrowable(view, groups, view.example)
        scores = score(model, groups, batches, loss, criterion)
        if budget.latency is None:
            chosen = plan(groups, scores, budget, implant, limits, per_cost=per_cost)
        else:
            how: dict[str, Any] = {"per_cost": per_cost, "backend": backend, "threads": threads}
            chosen = plan_for_latency(model, groups, scores, example, budget, implant, limits, **how).plan
        with restored_on_failure(model, values_of(model) if compensate else {}):
            if compensate:
                compensate_(model, chosen, batches or ())
            if view is not None and verify:
                check_parts(model, view, chosen, example)
            apply_(model, chosen, example, verify and view is None, batches)
    _warn_of_much(groups, view, chosen)
    return chosen


def _warn_of_much(groups: Groups, view: Parts | None, chosen: Plan) -> None:
    if share_unprunable(groups) > MUCH:
        more = "" if view is not None else "; print(hap.trace(model, example)) has all reasons"
        warnings.warn(chosen.untouched + more, stacklevel=3)

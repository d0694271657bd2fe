"""prune_: trace, score, plan and apply in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hap.compensation import compensate_
from hap.errors import HapError
from hap.implants import Implant
from hap.planning import DEFAULT_LIMITS, Budget, Limits, plan
from hap.plans import Plan
from hap.scoring import Criterion, score
from hap.scoring.base import Loss
from hap.surgery import apply_
from hap.timed_planning import plan_for_latency
from hap.tracing import trace


def prune_(model: nn.Module, example: Any, batches: Iterable[Any] | None = None, loss: Loss | None = None, *,
           params: float | None = None, flops: float | None = None, channels: float | None = None,
           latency: float | None = None, backend: str = "eager", threads: int | None = None,
           implant: Implant | float | None = None, coupling: str = "joint", criterion: Criterion | str = "hessian",
           limits: Limits = DEFAULT_LIMITS, ignore: Sequence[str] = (), per_cost: bool = False,
           compensate: bool = False, verify: bool = True) -> Plan:  # fmt: skip
    """Prune `model` in place to one budget and return the plan. Budgets are the fraction LEFT.

        plan = hap.prune_(model, example, batches, torch.nn.functional.cross_entropy, flops=0.4, implant=0.2)

    The model should be trained and in eval mode. `implant` is a share of the removed units to replace by 1x1
    convolutions, or an implant such as `hap.Pointwise(0.2, init="center")`; `compensate` repairs the layers that read
    removed units by least squares. `latency` is met by timing pruned copies on the example, with the `backend` and
    `threads` of `hap.latency`. If anything fails, the model is left as it was.
    """
    budget = Budget(params=params, flops=flops, channels=channels, latency=latency)
    batches = list(batches) if batches is not None else None
    if compensate and batches is None:
        raise HapError("compensate=True needs batches, an iterable of (input, target)")
    groups = trace(model, example, coupling, ignore)
    scores = score(model, groups, batches, loss, criterion)
    if budget.latency is None:
        chosen = plan(groups, scores, budget, implant, limits, per_cost=per_cost)
    else:
        chosen = plan_for_latency(model, groups, scores, example, budget, implant, limits, per_cost=per_cost,
                                  backend=backend, threads=threads).plan  # fmt: skip
    before = {n: p.detach().clone() for n, p in model.named_parameters()} if compensate else {}
    try:
        if compensate and batches is not None:
            compensate_(model, chosen, batches)
        apply_(model, chosen, example, verify, batches)
    except BaseException:
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.data.copy_(before[name])
        raise
    return chosen

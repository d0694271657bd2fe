"""prune_: trace, score, plan and apply in one call."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hap.errors import CaptureError, HapError
from hap.execution.calling import call_arguments, describe, run
from hap.execution.fast_copy import deepcopied
from hap.execution.input_checks import check_finite, check_given, outside_inference
from hap.graph.partition import Parts, captured_parts, view_where_it_chooses
from hap.groups.groups import Groups
from hap.groups.types import Frozen
from hap.groups.unprunable_summary import layer_of, nothing_in_words, share_unprunable
from hap.implants import Implant, as_implant
from hap.planning.budget import DEFAULT_LIMITS, Limits
from hap.planning.order import Order
from hap.planning.plan import Plan
from hap.pruning.apply import apply_
from hap.pruning.narrowable_heads import narrowable
from hap.pruning.plan_for_drop import Evaluate, Tolerance, goal_of, reach
from hap.pruning.prune_in_rounds import Choice, check_rounds
from hap.pruning.repair import apply_with_repair_, checked_repair
from hap.scoring import Criterion
from hap.scoring.base import Loss
from hap.tracing.trace import trace, trace_captured
from hap.utils.module_tree import named_tensors

MUCH = 1 / 3
"""Where more of the parameters than that could not be touched, a warning says so; the plan's text says it of less."""
NAMED = 8
"""So many parts are named."""
OUTSIDE = "the example does not run it, or code that chooses by value uses it"
SINGLE = "a part by itself, and what passes between parts is kept"
ALL_REASONS = "; print(hap.trace(model, example)) has all reasons"
ALL_REASONS_OF_PARTS = (
    "; it is pruned in parts, and what passes between them is kept: take view = hap.parts(model, example), and "
    "print(hap.trace(view, view.example)) has all reasons"
)


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
    max_drop: float | None = None,
    max_rise: float | None = None,
    evaluate: Evaluate | None = None,
    backend: str = "eager",
    threads: int | None = None,
    implant: Implant | float | None = None,
    coupling: str | None = None,
    criterion: Criterion | str | None = None,
    order: Order | None = None,
    limits: Limits = DEFAULT_LIMITS,
    ignore: Sequence[str] = (),
    stream: bool = False,
    per_cost: bool = False,
    compensate: bool = False,
    repair: str | None = None,
    minutes: float | None = None,
    augment: Callable[[Any], Any] | None = None,
    rounds: int = 1,
    verify: bool = True,
) -> Plan:
    """Prune a trained `model`, which is in eval mode, in place. If anything fails, it is left as it was.

    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> prune_(net, net[0].weight[:2].detach(), criterion="magnitude", flops=0.5).after.macs / 192
    0.5

    Arguments: those of `hap.trace`, `hap.score`, `hap.plan` and `hap.apply_`; without an `order` `criterion` is
    "hessian" and `coupling` "joint". Budgets, from `params` to `latency`, are the fraction LEFT; `latency` is met by
    timing copies. In place of one, `max_drop` finds the smallest network at most so much worse by `evaluate(model)`
    (higher is better; one value, or one per sample), and `max_rise` by the loss of every fourth sample of `batches`.
    `implant` may be the share of the removed units to replace by 1x1 convolutions. `repair` mends what is left on the
    inputs of `batches`: "refit" solves all layers anew, "distil" then trains for `minutes` with `augment`, "norms"
    estimates batch normalisations anew, "compensate" adjusts what reads removed units. In each of `rounds` a part goes,
    the rest is repaired and scored anew. What cannot be captured whole is pruned in parts.
    Returns: the plan. `print(plan)` says what could not be touched, as does a warning where that is over a third.
    """
    check_given(model, example)
    batches = list(batches) if batches is not None else None
    asked = {"params": params, "flops": flops, "channels": channels, "latency": latency, "activations": activations}
    goal = goal_of(asked, max_drop, max_rise, evaluate, batches, loss)
    repair = checked_repair(repair, compensate, minutes, batches, augment, isinstance(goal, Tolerance))
    check_rounds(rounds, latency, kind := as_implant(implant), order)
    criterion, per_cost, *how = _what_goes_first(order, criterion, per_cost, coupling, ignore, stream)
    with outside_inference(model):
        groups, view = traced(model, example, kind, *how)
        known = None if order is None else order.scores_for(groups)
        given = model, groups, example, batches, loss, criterion, kind, limits, per_cost, backend, threads, known
        chosen, repaired = reach(Choice(*given), goal, rounds, repair)
        return _carried_out(model, groups, view, chosen, example, verify, batches, repair, minutes, augment, repaired)


def _what_goes_first(
    order: Order | None,
    criterion: Criterion | str | None,
    per_cost: bool,
    coupling: str | None,
    ignore: Sequence[str],
    stream: bool,
) -> tuple[Any, ...]:
    """Criterion, per_cost, coupling, ignore and stream: those given, or those of an order, beside which none may be."""
    if order is None:
        criterion = "hessian" if criterion is None else criterion
        return criterion, per_cost, "joint" if coupling is None else coupling, ignore, stream
    if not isinstance(order, Order):
        raise HapError(f"order is {type(order).__name__}; expected what hap.order or hap.Order.from_json returned")
    order.check_alone(criterion=criterion, coupling=coupling, ignore=ignore, stream=stream, per_cost=per_cost)
    return order.criterion["name"], order.per_cost, order.coupling, order.ignore, order.stream


def traced(
    model: nn.Module, example: Any, implant: Implant | None, coupling: str, ignore: Sequence[str], stream: bool
) -> tuple[Groups, Parts | None]:
    """What `trace_whole_or_parts` finds, with what an implant needs to know of attention heads."""
    groups, view = trace_whole_or_parts(model, example, coupling, ignore, stream)
    if implant is not None and implant.needs_head_spaces:
        groups = narrowable(model, groups, example) if view is None else narrowable(view, groups, view.example)
    return groups, view


def _carried_out(
    model: nn.Module, groups: Groups, view: Parts | None, chosen: Plan, example: Any, verify: bool, *repair: Any
) -> Plan:
    """The plan, carried out, and a warning if much could not be touched. Parts are checked on a copy before."""
    if view is not None and verify:
        check_parts(model, view, chosen, example)
    apply_with_repair_(model, chosen, example, verify and view is None, *repair)
    if share_unprunable(groups) > MUCH:
        more = "" if view is not None else "; print(hap.trace(model, example)) has all reasons"
        warnings.warn(chosen.untouched + more, stacklevel=3)
    return chosen


# ---- models that torch.export cannot capture as a whole ----


def trace_whole_or_parts(
    model: nn.Module, example: Any, coupling: str, ignore: Sequence[str], stream: bool
) -> tuple[Groups, Parts | None]:
    """The groups of the model and None, or those of its parts and a view of these, which a warning names. HapError if
    nothing can be removed."""
    view = view_where_it_chooses(model, example)
    subject, inputs = (model, example) if view is None else (view, view.example)
    try:
        groups = trace(subject, inputs, coupling, ignore, stream)
    except CaptureError:
        view, captured = captured_parts(model, example)
        groups = trace_captured(captured, view, view.example, coupling, ignore, stream)
    if view is not None:
        groups = _as_parts(model, example, view, groups)
    if not len(groups):
        check_finite(model)
        more = ALL_REASONS if view is None else ALL_REASONS_OF_PARTS
        raise HapError(nothing_in_words(groups) + more + _hint(model, example, view))
    return groups, view


def _as_parts(model: nn.Module, example: Any, view: Parts, groups: Groups) -> Groups:
    """The groups with what is known of the parts, which a warning names."""
    names = list(dict.fromkeys(view.names))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    warnings.warn(
        f"torch.export cannot capture {type(model).__name__} as a whole, so it is pruned in parts: "
        f"{', '.join(names[:NAMED])}{more}; what passes between them is kept{_hint(model, example, view)}",
        stacklevel=5,
    )
    curved = groups.curved or "what happens between the parts is not known"
    unprunable = {**_outside(view, groups), **_single(view, groups), **groups.unprunable}
    return replace(groups, curved=curved, example=describe(example), unprunable=unprunable)


def _outside(view: Parts, groups: Groups) -> dict[str, Frozen]:
    """The weights that no part holds, such as those of experts that no token was sent to."""
    inside = {id(t) for name in view.names for t in named_tensors(view.get_submodule(name)).values()}
    weights = {name: tensor for name, tensor in named_tensors(view).items() if name in groups.trainable}
    return {n: Frozen(layer_of(n), OUTSIDE) for n, t in weights.items() if t.ndim > 1 and id(t) not in inside}


def _single(view: Parts, groups: Groups) -> dict[str, Frozen]:
    """The weights of layers that are parts by themselves: what they read and what they compute is kept."""
    layers = {name for name in view.names if not [*view.get_submodule(name).children()]}
    cut = {weight for (weight, _), classes in groups.axes.items() if classes.any()}
    weights = {term.weight: term.weight.rpartition(".")[0] for term in groups.costs.weight_macs}
    return {w: Frozen(layer, SINGLE) for w, layer in weights.items() if layer in layers and w not in cut}


def _hint(model: nn.Module, example: Any, view: Parts | None) -> str:
    """What lets torch.export capture more of a decoder: modules that are called with a cache it cannot capture."""
    takes = view is not None and "use_cache" in inspect.signature(model.forward).parameters
    if not takes or "use_cache" in call_arguments(example)[1]:
        return ""
    return '. A cache of keys and values keeps torch.export from larger parts: give the example "use_cache": False'


def check_parts(model: nn.Module, view: Parts, chosen: Plan, example: Any) -> None:
    """Prune a copy: each part must do what the plan says, and the whole must still run."""
    trial = deepcopied(model, {})
    apply_(Parts(trial, list(zip(view.names, view.example, strict=True))), chosen, view.example)
    try:
        run(trial, example)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HapError(
            f"{type(model).__name__} does not run once its parts are pruned, so nothing was changed: {reason}. Leave "
            "alone what the code between its parts counts on, with ignore=(...)"
        ) from error

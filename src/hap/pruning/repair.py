"""What is done, without training, about the error that pruning leaves: beside `apply_`, by name."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hap.distil import check_minutes, distil_
from hap.errors import Argument, HapError
from hap.execution.fast_copy import copy_with
from hap.planning.plan import Plan
from hap.pruning.apply import apply_
from hap.pruning.compensate import compensate_
from hap.refit import estimate_norms_, refit_, refit_layers_
from hap.utils.module_tree import named_tensors

REPAIRS = ("refit", "norms", "compensate", "distil")


def repair_asked(repair: str | None, compensate: bool, minutes: float | None) -> str | None:
    """The name of the repair: minutes are for distillation, and `compensate` is an older name."""
    if minutes is None:
        return repair or ("compensate" if compensate else None)
    check_minutes(minutes)
    if compensate or repair not in (None, "distil"):
        seen = Argument("repair", repair or "compensate", text="repair")
        raise HapError(seen, f" is {repair or 'compensate'!r}, which takes no minutes; they are for 'distil'")
    return "distil"


def check_repair(repair: str | None, batches: object, asked: str = "") -> None:
    """Refuse a repair that is not known, and one without the inputs that all need. `asked`: how it was named."""
    if repair is None:
        return
    seen = Argument("repair", repair, text="repair")
    if repair not in REPAIRS:
        raise HapError(seen, f" is {repair!r}; expected one of {', '.join(map(repr, REPAIRS))}, or None")
    if batches is None:
        raise HapError(asked or Argument("repair", repair), " needs batches, an iterable of (input, target)")


def checked_repair(
    repair: str | None, compensate: bool, minutes: float | None, batches: object, augment: object, refit: bool
) -> str | None:
    """The name of the repair that is asked for; "none" asks for none. Where nothing is asked for and there are inputs,
    `refit` says whether to. Refuses what is not known, missing inputs, and an `augment` that nothing would call."""
    named = repair_asked(repair, compensate, minutes) or ("refit" if refit and batches is not None else None)
    named = None if named == "none" else named
    check_repair(named, batches, asked="compensate=True" if compensate else f"repair={named!r}")
    if augment is not None and named != "distil":
        raise HapError(f"augment is for repair='distil', and repair is {named!r}: nothing else would call it")
    return named


def apply_with_repair_(
    model: nn.Module,
    plan: Plan,
    example: Any,
    verify: bool,
    batches: Iterable[Any] | None,
    repair: str | None,
    minutes: float | None = None,
    augment: Callable[[Any], Any] | None = None,
    repaired: nn.Module | None = None,
) -> nn.Module:
    """Carry out a plan in place, and repair what is left on the inputs of `batches`. All or nothing.

    Arguments: those of `apply_`, and a `repair`. "refit" solves every layer anew (`hap.refit_`), "distil" then trains
    for `minutes` towards the dense outputs (`hap.distil_`, which also takes `augment`), "norms" estimates the
    statistics of batch normalisations again, "compensate" adjusts what reads removed units (`hap.compensate_`).
    `repaired` is what `repaired_copy` returned, where that was called already.
    Returns: the model.
    """
    check_repair(repair, batches)
    if repair is None and repaired is None:
        return apply_(model, plan, example, verify, batches)
    batches = None if batches is None else list(batches)
    repaired = repaired_copy(model, plan, batches, repair) if repaired is None else repaired
    if repair == "distil":
        distil_(repaired, model, batches or (), minutes, augment=augment)
    values = {name: tensor.detach() for name, tensor in named_tensors(repaired).items()}
    apply_(model, plan, example, verify, batches)
    for name, tensor in named_tensors(model).items():
        tensor.data.copy_(values[name])
    return model


def repaired_copy(
    model: nn.Module, plan: Plan, batches: list[Any] | None, repair: str | None, start: nn.Module | None = None
) -> nn.Module:
    """A copy of `start` (the model itself if None), pruned by a plan and repaired to do what the model does. Nothing is
    trained: "distil" is a refit here. `start` is of the dense shape and has the values to begin with."""
    source = model if start is None else start
    copy = copy_with(source, {name: parameter.detach().clone() for name, parameter in source.named_parameters()})
    if repair == "compensate":
        compensate_(copy, plan, batches or ())
    apply_(copy, plan, verify=False, batches=batches)
    if repair in ("refit", "distil"):
        (refit_ if start is None else refit_layers_)(copy, model, batches or (), plan)
    elif repair == "norms":
        estimate_norms_(copy, batches or ())
    return copy

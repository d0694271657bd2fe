"""The executed check: whether a pruned model does on an example what its plan says."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.compare_outputs import (
    TOLERANCE,
    VALUES,
    difference,
    in_float64,
    is_float32,
    largest,
    measured_rounding,
    output_tensors,
)
from hap.execution.fast_copy import cloned, copy_with
from hap.execution.masked_execution import Remembering, SkippingZeros, Sparse
from hap.graph.partition import touched
from hap.implants import ImplantModule
from hap.planning.plan import Plan
from hap.planning.steps import Cut
from hap.surgery.cut import cut_tensors, shortened, update_modules_
from hap.utils.module_tree import named_tensors
from hap.verification.informative_inputs import informative_example
from hap.verification.informative_weights import informative_weights

REFUSED = "the pruned model does not do what the plan says, so nothing was changed"
UNKNOWN = "the pruned model cannot be checked, so nothing was changed: the model with zeros in place of what goes"
COUNTED = "the model's forward counts on its size"
UNCOPIED = "no copy of the model can be tried"
BY_ZEROS = "the model does not run with zeros in place of some of it"
UNLIKE = "without some of it the model returns something else than with zeros there"
UNKNOWABLE = "what the model returns without some of it cannot be compared"
Listener = Callable[[nn.Module], None]
FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that go another way, with fused kernels and nested tensors, where no mode of torch's watches functions."""
FUSED_TOLERANCE = dict.fromkeys(TOLERANCE, 0.1)
"""How far fused kernels may be off: some compute GELU another way."""
LARGE = 1 << 14
"""Weights with as many elements are not written out with zeros in place of what goes: see hap.zeros."""


class Misfit(HapError):
    """A pruned model does not do what its plan says: why not, as a reason to leave units alone, and what was seen."""

    def __init__(self, message: str, why: str, seen: str):
        super().__init__(message)
        self.why, self.seen = why, seen


def verify_plan(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, shorter: dict[str, Tensor],
    everywhere: bool = False,
) -> None:  # fmt: skip
    """The check of apply_. Not `everywhere`, some places of large maps will do, unless they show a difference.

    With a classifier of zeros any two models agree: such weights get values, alike in both. So do constant inputs.
    """
    model, example = touched(model, example, [cut.name for cut in plan.cuts])
    example = informative_example(model, example)
    if changed := informative_weights(model):
        before, model = named_tensors(model), copy_with(model, changed)
        other = {name for name, tensor in named_tensors(model).items() if tensor is not before[name]}
        shorter = shorter | cut_tensors(model, plan, other)
    if _may_fuse(model, plan):
        wanted = check_by_running(model, plan, implants, example, shorter=shorter)
        _check_fused(model, plan, implants, example, shorter, wanted)
    elif everywhere or not _agree_at_some_places(model, plan, implants, example, shorter):
        check_by_running(model, plan, implants, example, shorter=shorter)


def _agree_at_some_places(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, shorter: dict[str, Tensor]
) -> bool:
    """Whether the pruned model does what the plan says with large maps computed at some places alone: see hap.places.

    If it does not, or fails, that may be for the values in between: then these are to be computed too. So they are
    where an output is zero everywhere, or not finite, which may come of the places, and tells nothing.
    """
    try:
        problem, wanted = _compare(model, plan, implants, example, None, shorter, coarse=True)
    except Misfit:
        return False
    numbers = [x for x in wanted if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    return problem is None and all(0 < largest(x) < math.inf for x in numbers)


def check_by_running(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None = None,
    shorter: dict[str, Tensor] | None = None, wanted: list[Any] | None = None, gross: float | None = None,
    listen: Listener | None = None,
) -> list[Any]:  # fmt: skip
    """Raise Misfit unless the pruned model does on the example what the plan says. Changes nothing.

    It is held against the dense model with zeros in place of what goes; with `base`, a milder plan, against what that
    one leaves of the dense model, which runs faster. `shorter` holds what the plan leaves of tensors, where that is
    known, and `wanted` what that model with zeros returns, which is returned for the next time: in float64, where
    float32 was not enough to tell. A difference of more than `gross` times the largest value is no rounding. `listen`
    gets the pruned copy before it runs.
    """
    shorter = cut_tensors(model, plan) if shorter is None else shorter
    problem, wanted = _compare(model, plan, implants, example, base, shorter, wanted, gross=gross, listen=listen)
    if problem and problem.startswith(VALUES):  # rounding, or a real difference?
        problem, wanted = _compare_exactly(model, plan, implants, example, base)
    if problem:
        raise Misfit(f"{REFUSED}: {problem}", _why(problem), problem)
    return wanted


def _why(problem: str) -> str:
    """What a difference between a pruned model and the one with zeros comes to."""
    if VALUES in problem:
        return UNLIKE
    return UNKNOWABLE if "finite" in problem else COUNTED


def _compare_exactly(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None
) -> tuple[str | None, list[Any]]:
    """The same without short cuts, in float64. A forward may fail in that, such as one that makes tensors in float32
    by itself: then it is measured how far off rounding is."""
    if is_float32(model):
        exact, again = in_float64(model, example)
        doubles = {name: copy.deepcopy(implant).double() for name, implant in implants.items()}
        try:
            return _compare(exact, plan, doubles, again, base, cut_tensors(exact, plan), skip=False)
        except Misfit:  # as much as _compare raises; in single precision it raises it again, if it is not the type
            pass
    shorter = cut_tensors(model, plan)
    tolerance = TOLERANCE
    if is_float32(model):
        tolerance = measured_rounding(_masked(model, plan, implants, base, shorter, None)[0], example)
    return _compare(model, plan, implants, example, base, shorter, skip=False, tolerance=tolerance)


def _compare(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None,
    shorter: dict[str, Tensor], wanted: list[Any] | None = None, skip: bool = True, gross: float | None = None,
    listen: Listener | None = None, tolerance: Mapping[torch.dtype, float] = TOLERANCE, coarse: bool = False,
) -> tuple[str | None, list[Any]]:  # fmt: skip
    """What differs between the pruned and the masked model, in words, and what the masked one returns."""
    try:
        pruned = _pruned(model, plan, implants, shorter)
        if listen is not None:
            listen(pruned)
        known = Remembering(dict(pruned.named_parameters())) if wanted is None and skip else None
        with known or nullcontext():
            seen = output_tensors(pruned, example, coarse=coarse)
    except Misfit:
        raise
    except Exception as error:
        line = in_a_line(error)
        raise Misfit(f"{REFUSED}: its forward fails with {line}", COUNTED, line) from error
    if wanted is None:
        try:
            wanted = _reference(model, plan, implants, example, base, shorter, known, coarse)
        except Exception as error:
            raise Misfit(f"{UNKNOWN} fails with {in_a_line(error)}", BY_ZEROS, in_a_line(error)) from error
    problem = difference(wanted, seen, plan.exact, tolerance)
    if problem and problem.startswith(VALUES) and gross is not None and _apart(wanted, seen, gross):
        problem = f"beyond all rounding, {problem}"
    return problem, wanted


def _may_fuse(model: nn.Module, plan: Plan) -> bool:
    """Whether fused kernels may compute with what the plan cuts. Attention has none once it lost rows of its own
    weights: see hap.fewer_heads."""
    tensors = named_tensors(model)
    cut = {id(tensors[c.name]) for c in plan.cuts}

    def loses(module: nn.Module, recurse: bool) -> bool:
        return not cut.isdisjoint(map(id, module.parameters(recurse)))

    modules = [m for m in model.modules() if isinstance(m, FUSED) and loses(m, recurse=True)]
    return any(not (isinstance(m, nn.MultiheadAttention) and loses(m, recurse=False)) for m in modules)


def _check_fused(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, shorter: dict[str, Tensor],
    wanted: list[Any],
) -> None:  # fmt: skip
    """Run it once more as the caller will, with nothing that watches: what torch then fuses counts on sizes too.

    Most often that returns what is `wanted` without fused kernels. Where it does not, the model with zeros is asked,
    with fused kernels as well: these may, for one, leave out what is padded.
    """
    try:
        seen = output_tensors(_pruned(model, plan, implants, shorter), example, watched=False)
    except Exception as error:
        raise HapError(f"{REFUSED}: its forward fails in torch's fused kernels with {in_a_line(error)}") from error
    if difference(wanted, seen, plan.exact, FUSED_TOLERANCE) is None:
        return
    try:
        wanted = output_tensors(_masked(model, plan, implants, None, shorter, None)[0], example, watched=False)
    except Exception as error:
        raise HapError(f"{UNKNOWN} fails in torch's fused kernels with {in_a_line(error)}") from error
    if problem := difference(wanted, seen, plan.exact, FUSED_TOLERANCE):
        raise HapError(f"{REFUSED}: with torch's fused kernels {problem}")


def _pruned(model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], shorter: dict[str, Tensor]) -> nn.Module:
    """A forward may write to its tensors: those of the reference, and what the caller's model gets, stay apart."""
    try:
        pruned = copy_with(model, {name: cloned(tensor) for name, tensor in shorter.items()})
    except Exception as error:  # copying runs code of whatever the model holds
        line = in_a_line(error)
        raise Misfit(f"{REFUSED}: the model cannot be copied to try it, {line}", UNCOPIED, line) from error
    update_modules_(pruned, plan, copy.deepcopy(implants))
    return pruned


def _apart(wanted: list[Any], seen: list[Any], gross: float) -> bool:
    """Whether outputs, all of them finite, differ by more than so many times the largest value."""
    pairs = [(a, b) for a, b in zip(wanted, seen, strict=True) if isinstance(a, Tensor) and a.is_floating_point()]
    pairs = [(a, b) for a, b in pairs if a.numel()]
    finite = all(bool(x.isfinite().all()) for pair in pairs for x in pair)
    return finite and any(largest(a - b) > gross * largest(a) for a, b in pairs)


def in_a_line(error: BaseException) -> str:
    """The type of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


def _reference(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None,
    shorter: dict[str, Tensor], known: Remembering | None, coarse: bool,
) -> list[Any]:  # fmt: skip
    """What the masked model returns. If it fails with short cuts, it is run without: vmap, say, forbids some."""
    try:
        return _masked_outputs(model, plan, implants, example, base, shorter, known, coarse)
    except Exception:
        if known is None:
            raise
    return _masked_outputs(model, plan, implants, example, base, shorter, None, coarse)


def _masked_outputs(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None,
    shorter: dict[str, Tensor], known: Remembering | None, coarse: bool,
) -> list[Any]:  # fmt: skip
    """What the dense model (or what `base` leaves of it) returns with zeros where the plan cuts."""
    masked, sparse = _masked(model, plan, implants, base, shorter, known)
    with nullcontext() if known is None else SkippingZeros(sparse, known):
        return output_tensors(masked, example, coarse=coarse)


def _masked(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], base: Plan | None, shorter: dict[str, Tensor],
    known: Remembering | None,
) -> tuple[nn.Module, dict[nn.Parameter, Sparse]]:  # fmt: skip
    """A copy of the dense model, or of what `base` leaves of it, with zeros where the plan cuts.

    Each implant is written out as the k x k kernel it equals. With what is `known` of the pruned model, large weights
    are not written out but come with it, by the parameter that stands for each: see hap.zeros.
    """
    tensors, cuts = named_tensors(model), _by_name(base)
    grafted = {name for g in plan.grafts for name in (f"{g.module}.weight", f"{g.module}.bias")}
    changed = {n: tensors[n].detach().clone() for n in grafted if n in tensors and n not in _by_name(plan)}
    sparse: dict[nn.Parameter, Sparse] = {}
    for name, masks in _by_name(plan).items():
        tensor = tensors[name].detach()
        directed = _has_direction(name, tensors)
        if known is not None and _worth_skipping(tensors[name]) and not directed and name not in grafted:
            thin = _sparse(name, tensor, shorter[name], cuts.get(name, {}), masks)
            changed[name] = placeholder = thin.placeholder()
            sparse[placeholder] = thin
        else:
            changed[name] = _zeroed(tensor, cuts.get(name, {}), masks, 1e-12 if directed else 0.0)
    masked = copy_with(model, changed)
    if base is not None:
        update_modules_(masked, base, {})
    modules, inputs = dict(masked.named_modules()), {name: list(keep) for name, keep in plan.kept_inputs().items()}
    for graft in plan.grafts:
        weight, implant, rows = modules[graft.module].weight, implants[graft.module], list(graft.rows)
        assert isinstance(weight, Tensor)
        dense = weight.data.new_zeros(len(rows), *weight.shape[1:])
        dense[:, inputs.get(graft.weight, list(range(weight.shape[1])))] = implant.kernel()
        weight.data[rows] = dense
        if implant.bias_values is not None:
            modules[graft.module].bias.data[rows] = implant.bias_values.detach()
    return masked, sparse


def _by_name(plan: Plan | None) -> dict[str, dict[int, Cut]]:
    """The cuts of each tensor, by axis."""
    found: dict[str, dict[int, Cut]] = {}
    for cut in plan.cuts if plan else ():
        found.setdefault(cut.name, {})[cut.dim] = cut
    return found


def _has_direction(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a weight may be computed from this one's direction, as by either weight_norm: zeros have none."""
    return "parametrizations." in name or (name.endswith("_v") and f"{name[:-1]}g" in tensors)


def _worth_skipping(tensor: Tensor) -> bool:
    large = tensor.numel() >= LARGE and tensor.ndim > 1 and tensor.is_floating_point()
    return large and isinstance(tensor, nn.Parameter)


def _sparse(name: str, tensor: Tensor, small: Tensor, cuts: dict[int, Cut], masks: dict[int, Cut]) -> Sparse:
    """A tensor that is cut, and zero where more of it would be cut."""
    shape = [len(cuts[d].keep) if d in cuts else size for d, size in enumerate(tensor.shape)]
    index = {}
    for dim, mask in masks.items():
        place = torch.arange(mask.size, device=tensor.device)
        if dim in cuts:
            place[list(cuts[dim].keep)] = torch.arange(len(cuts[dim].keep), device=tensor.device)
        index[dim] = place[list(mask.keep)]
    return Sparse(small, tuple(shape), index, name)


def _zeroed(tensor: Tensor, cuts: dict[int, Cut], masks: dict[int, Cut], nothing: float) -> Tensor:
    """A new tensor, cut along some axes, with next to nothing where more of it would be cut."""
    for cut in cuts.values():
        tensor = shortened(tensor, cut)
    tensor = tensor if cuts else tensor.clone()
    for dim, mask in masks.items() if tensor.is_floating_point() else ():
        stay = set(mask.keep)
        gone = [i for i, k in enumerate(cuts[dim].keep if dim in cuts else range(mask.size)) if k not in stay]
        tensor.index_fill_(dim, torch.tensor(gone, dtype=torch.int64, device=tensor.device), nothing)
    return tensor

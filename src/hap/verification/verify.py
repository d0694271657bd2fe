"""The executed check: whether a pruned model does on an example what its plan says."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.fast_copy import copy_with
from hap.execution.masked_execution import SkippingZeros
from hap.execution.model_outputs import (
    FUSED,
    SAMPLED,
    TOLERANCE,
    VALUES,
    WATCHED,
    Modes,
    difference,
    float_outputs,
    is_float32,
    largest,
    measured_rounding,
    output_tensors,
)
from hap.graph.partition import touched
from hap.implants import ImplantModule
from hap.planning.plan import Plan
from hap.surgery.cut import cut_tensors
from hap.utils.module_tree import named_tensors
from hap.verification.comparison import BY_ZEROS, COUNTED, REFUSED, UNKNOWABLE, UNLIKE, Comparison, Misfit, in_a_line
from hap.verification.informative_values import informative_example, informative_weights

UNKNOWN = "the pruned model cannot be checked, so nothing was changed: the model with zeros in place of what goes"
FUSED_MODULES = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that go another way, with fused kernels and nested tensors, where no mode of torch's watches functions."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FAR = dict.fromkeys(TOLERANCE, 0.1)
"""No rounding is off as far, but fused kernels may be: some compute GELU another way."""


def verify_plan(
    model: nn.Module,
    plan: Plan,
    implants: dict[str, ImplantModule],
    example: Any,
    shorter: dict[str, Tensor],
    everywhere: bool = False,
) -> None:
    """The check of apply_: HapError if the pruned model does not do on the example what the plan says.

    Not `everywhere`, some places of large maps are computed first, and all of them if these show a difference. With a
    classifier of zeros any two models agree: such weights get values, alike in both. So do constant inputs.
    """
    model, example = touched(model, example, [cut.name for cut in plan.cuts])
    example = informative_example(model, example)
    if changed := informative_weights(model):
        before, model = named_tensors(model), copy_with(model, changed)
        other = {name for name, tensor in named_tensors(model).items() if tensor is not before[name]}
        shorter = shorter | cut_tensors(model, plan, other)
    comparison = Comparison(model, plan, example, implants, shorter=shorter)
    if _may_fuse(model, plan):
        _check_fused(comparison, check_by_running(comparison))
    elif everywhere or not agree_at_some_places(comparison):
        check_by_running(comparison)


def check_by_running(comparison: Comparison, wanted: list[Any] | None = None, hasty: bool = False) -> list[Any]:
    """Raise Misfit unless both models of a comparison return the same. Changes nothing.

    `wanted` is what the model with zeros returns, if that is known. It is returned for the next time: in float64, where
    float32 was not enough to tell. Unless it is `hasty`, that is asked however far off values are.
    """
    seen, wanted = _run_both(comparison, wanted)
    problem = difference(wanted, seen, comparison.plan.exact)
    if problem and problem.startswith(VALUES):  # rounding, or a real difference?
        if hasty and "is off by" in (difference(wanted, seen, comparison.plan.exact, FAR) or ""):
            problem = f"beyond all rounding, {problem}"
        else:
            problem, wanted = _compare_exactly(comparison)
    if problem:
        raise Misfit(f"{REFUSED}: {problem}", _reason(problem), problem)
    return wanted


def agree_at_some_places(comparison: Comparison) -> bool:
    """Whether both models return the same with large maps computed at some places alone: see `sampled_convolution`.

    If not, that may come of these places. So it may where an output is zero everywhere, or not finite. Models without
    layers for such maps are not asked: the mode that samples them takes time too.
    """
    if not any(isinstance(m, CONVOLUTIONS) for m in comparison.model.modules()):
        return False
    try:
        seen, wanted = _run_both(comparison, modes=SAMPLED)
    except Misfit:
        return False
    return (
        all(0 < largest(x) < math.inf for x in float_outputs(wanted) if x.numel())
        and difference(wanted, seen, comparison.plan.exact) is None
    )


def _reason(problem: str) -> str:
    """What a difference between a pruned model and the one with zeros comes to."""
    if VALUES in problem:
        return UNLIKE
    return UNKNOWABLE if "finite" in problem else COUNTED


def _compare_exactly(comparison: Comparison) -> tuple[str | None, list[Any]]:
    """What differs without any short cuts in float64, in words, and what the model with zeros returns.

    Where a forward fails in float64, as it may by making tensors in float32, it is measured how far off rounding is.
    """
    tolerance = TOLERANCE
    comparison = replace(comparison, shorter=None)
    if is_float32(comparison.model):
        exact = comparison.in_float64()
        try:
            seen, wanted = _run_both(exact, short_cuts=False)
            return difference(wanted, seen, exact.plan.exact), wanted
        except Misfit:  # in single precision it is raised again, if it is not the type
            tolerance = measured_rounding(comparison.masked()[0], comparison.example)
    seen, wanted = _run_both(comparison, short_cuts=False)
    return difference(wanted, seen, comparison.plan.exact, tolerance), wanted


def _run_both(
    comparison: Comparison, wanted: list[Any] | None = None, short_cuts: bool = True, modes: Modes = WATCHED
) -> tuple[list[Any], list[Any]]:
    """What the pruned model returns, and what the one with zeros does, which is not run if that is `wanted` already."""
    fails = "fails with" if modes else "fails in torch's fused kernels with"
    try:
        seen = output_tensors(comparison.pruned(), comparison.example, modes=modes)
    except Misfit:
        raise
    except Exception as error:
        line = in_a_line(error)
        raise Misfit(f"{REFUSED}: its forward {fails} {line}", COUNTED, line) from error
    if wanted is None:
        try:
            wanted = masked_outputs(comparison, short_cuts, modes)
        except Exception as error:
            raise Misfit(f"{UNKNOWN} {fails} {in_a_line(error)}", BY_ZEROS, in_a_line(error)) from error
    return seen, wanted


def masked_outputs(comparison: Comparison, skip_zeros: bool = False, modes: Modes = WATCHED) -> list[Any]:
    """What the model with zeros returns. If it fails where these are skipped, it is run without: vmap forbids some."""
    masked, sparse = comparison.masked(skip_zeros)
    try:
        with SkippingZeros(sparse) if skip_zeros else nullcontext():
            return output_tensors(masked, comparison.example, modes=modes)
    except Exception:
        if not skip_zeros:
            raise
    return masked_outputs(comparison, modes=modes)


def _may_fuse(model: nn.Module, plan: Plan) -> bool:
    """Whether fused kernels may compute with what the plan cuts. Attention has none once it lost rows of its own
    weights: see `surgery.multihead_attention`."""
    tensors = named_tensors(model)
    cut = {id(tensors[c.name]) for c in plan.cuts}

    def loses(module: nn.Module, recurse: bool) -> bool:
        return not cut.isdisjoint(map(id, module.parameters(recurse)))

    modules = [m for m in model.modules() if isinstance(m, FUSED_MODULES) and loses(m, recurse=True)]
    return any(not (isinstance(m, nn.MultiheadAttention) and loses(m, recurse=False)) for m in modules)


def _check_fused(comparison: Comparison, wanted: list[Any]) -> None:
    """Run it once more as the caller will, with nothing that watches: what torch then fuses counts on sizes too.

    Most often that returns what is `wanted` without fused kernels. Where it does not, the model with zeros is asked,
    with fused kernels as well: these may, for one, leave out what is padded.
    """
    for known in (wanted, None):
        seen, other = _run_both(comparison, known, short_cuts=False, modes=FUSED)
        problem = difference(other, seen, comparison.plan.exact, FAR)
        if problem is None:
            return
    raise HapError(f"{REFUSED}: with torch's fused kernels {problem}")

"""What models return, and whether two of them return the same.

Objects that torch.export cannot look into, such as a decoder's cache of keys and values, are left out. Nobody compares
them, and what is in them changes with the heads: None stands in for them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.execution.calling import run
from hap.execution.fast_copy import copy_with, deepcopied
from hap.execution.masked_execution import NoEmptyHeads
from hap.execution.sampled_convolution import SampledConvolutions
from hap.utils.plain_mapping import as_dict

PLAIN = (Tensor, bool, int, float, str, type(None))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far outputs may be off by rounding, relative to the largest."""
SEVERAL, MOST_ROUNDING = 4.0, 1e-3
"""Rounding that was measured may be so many times larger in another order of sums, and is never more than this."""
VALUES = "the value of output"
"""How a difference begins that more precision could settle."""
Modes = tuple[type[AbstractContextManager[Any]], ...]
WATCHED: Modes = (NoEmptyHeads,)
SAMPLED: Modes = (NoEmptyHeads, SampledConvolutions)
FUSED: Modes = ()
"""Modes to run a model in; without any torch may take its fused kernels."""


def plain_outputs(output: Any) -> Any:
    """What a model returned: tensors, numbers and strings, and None for other objects. Dataclasses become dicts."""
    return pytree.tree_map(_plain_value, output)


def _plain_value(x: Any) -> Any:
    if isinstance(x, PLAIN):
        return x
    if isinstance(x, Mapping):
        return plain_outputs(dict(x))
    if is_dataclass(x) and not isinstance(x, type):
        return plain_outputs({field.name: getattr(x, field.name, None) for field in fields(x)})
    return None


def _with_plain_tuples(output: Any) -> Any:
    """An output with plain tuples in place of named ones and of torch's own: files know no classes."""

    def own(x: Any) -> bool:
        return isinstance(x, tuple) and type(x) is not tuple

    return pytree.tree_map(lambda x: tuple(map(_with_plain_tuples, x)) if own(x) else x, output, is_leaf=own)


def float_outputs(output: Any) -> list[Tensor]:
    """The tensors of real numbers that a model returned."""
    return [x for x in pytree.tree_leaves(plain_outputs(output)) if isinstance(x, Tensor) and x.is_floating_point()]


@contextmanager
def returning_plain_outputs(model: nn.Module, plain_tuples: bool = False) -> Iterator[None]:
    """Inside, the model returns its `plain_outputs`. HapError while it runs, if there is no tensor among them."""

    def leave_out(module: nn.Module, args: Any, output: Any) -> Any:
        found = plain_outputs(output)
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(found)):
            raise HapError(
                f"{type(module).__name__} returns a {type(output).__name__}, in which no tensor is found; expected "
                "tensors, or tuples, lists, dicts or dataclasses of them"
            )
        return _with_plain_tuples(found) if plain_tuples else found

    handle = model.register_forward_hook(leave_out)
    try:
        yield
    finally:
        handle.remove()


# ---- whether two models return the same -------------------------------------------------------------------------


def output_tensors(model: nn.Module, example: Any, modes: Modes = WATCHED) -> list[Any]:
    """All that a model returns on an example, in one list, while it runs in these modes."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        return [_real(x) for x in pytree.tree_leaves(plain_outputs(run(model, example)))]


def _real(value: Any) -> Any:
    """Complex numbers as pairs of real ones; all else as it is."""
    return torch.view_as_real(value.resolve_conj()) if isinstance(value, Tensor) and value.is_complex() else value


def difference(
    wanted: Sequence[Any], seen: Sequence[Any], exact: bool = True, tolerance: Mapping[torch.dtype, float] = TOLERANCE
) -> str | None:
    """How the outputs of two models differ by more than rounding, in words; None if they do not.

    Unless they should be `exact`ly equal, only shapes and values that are not finite are compared. `tolerance` holds
    what may be rounding for each dtype, relative to the largest value.
    """
    if len(wanted) != len(seen):
        return f"it returns {len(seen)} values instead of {len(wanted)}"
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(wanted, seen, strict=True)) if isinstance(a, Tensor)]
    for i, a, b in pairs:
        if a.shape != b.shape:
            return f"output {i} has shape {tuple(b.shape)} instead of {tuple(a.shape)}"
        if problem := _off(a, b, exact, tolerance):
            return f"{VALUES} {i} {problem}"
    filled = [a for _, a, _ in pairs if a.numel()]
    if exact and filled and not any(bool(a.isfinite().any()) for a in filled):
        return "no output is finite on the example, so nothing can be compared"
    return None


def _off(a: Tensor, b: Tensor, exact: bool, tolerance: Mapping[torch.dtype, float]) -> str | None:
    if not a.is_floating_point():
        return f"differs in {int((a != b).sum())} places" if exact and not torch.equal(a, b) else None
    if not a.numel():
        return None
    most, gap = largest(a), 0.0
    if math.isfinite(most) and math.isfinite(largest(b)):
        gap = largest(a - b) if exact else 0.0
    else:
        finite = a.isfinite()
        if bool((finite & ~b.isfinite()).any()) or (exact and not torch.equal(finite, b.isfinite())):
            return "is not finite in other places"
        if exact and finite.any():
            gap, most = (largest(x[finite]) for x in (a - b, a))
    allowed = tolerance.get(a.dtype, 1e-5) * most
    return f"is off by {gap:.3g} (allowed {allowed:.3g})" if gap > allowed else None


def largest(x: Tensor) -> float:
    """The largest absolute value. Where one is not finite, neither is this."""
    return max(float(end.abs()) for end in x.aminmax())


def measured_rounding(model: nn.Module, example: Any) -> dict[torch.dtype, float]:
    """The tolerance for a model, measured with weights that differ in their last digits alone.

    Small differences of large numbers, or a long recurrence, may well be off by more than is usual.
    """
    random = torch.Generator().manual_seed(0)
    real = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point()}
    signs = {name: torch.randn(p.shape, generator=random).sign().to(p) for name, p in real.items()}
    changed = {name: p * (1 + torch.finfo(p.dtype).eps * signs[name]) for name, p in real.items()}
    tolerance = dict(TOLERANCE)
    for a, b in zip(output_tensors(model, example), output_tensors(copy_with(model, changed), example), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point() and a.numel() and (most := largest(a)) > 0:
            off = SEVERAL * largest(a - b) / most
            tolerance[a.dtype] = max(tolerance.get(a.dtype, 0.0), min(off, MOST_ROUNDING) if math.isfinite(off) else 0)
    return tolerance


def is_float32(model: nn.Module) -> bool:
    return all(p.dtype == torch.float32 for p in model.parameters())


def in_float64(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """Copies of a model and its example in float64."""
    return deepcopied(model, {}).double(), example_in_float64(example)


def example_in_float64(example: Any) -> Any:
    """The example with its real numbers in float64."""
    return pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, as_dict(example))

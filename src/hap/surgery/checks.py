"""Whether a plan fits a model: every name, length and index is checked before anything is touched."""

from __future__ import annotations

from torch import nn

from hap.errors import HapError
from hap.planning.plan import Plan
from hap.utils.module_tree import named_tensors


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made for another model, or that was carried out already."""
    tensors = named_tensors(model)
    for cut in plan.cuts:
        shape = tuple(tensors[cut.name].shape) if cut.name in tensors else None
        if shape is None or not 0 <= cut.dim < len(shape) or shape[cut.dim] != cut.size:
            seen = f"has shape {shape}" if shape else "does not exist"
            raise HapError(
                f"the plan does not fit this model: {cut.name} should have length {cut.size} on axis {cut.dim}, but "
                f"{seen}. Was the plan made for another model, or applied to this one before?"
            )
        if not _distinct_below(cut.keep, cut.size):
            raise HapError(f"the plan is damaged: it keeps {list(cut.keep)[:5]}... of the {cut.size} in {cut.name}")
    modules = dict(model.named_modules())
    added = (plan.grafts, plan.widenings, plan.resizes, plan.narrowings)
    around = [*(widen.inside for widen in plan.widenings), *(narrow.inside for narrow in plan.narrowings)]
    for name in [*(item.module for items in added for item in items), *(n for n in around if n is not None)]:
        if name not in modules:
            raise HapError(f"the plan does not fit this model: it has no module {name!r}")
    for graft in plan.grafts:
        conv = modules[graft.module]
        order = graft.order if graft.order is not None else ()
        rows_fit = isinstance(conv, nn.Conv2d) and _distinct_below(graft.rows, len(conv.weight))
        if not rows_fit or not _distinct_below(order, len(order)):
            raise HapError(f"the plan does not fit this model: {graft.module} cannot take its implant")
    if plan.grafts and plan.implant is None:
        raise HapError("the plan is damaged: it has implants but does not say of which kind")
    for resize in plan.resizes:
        old = vars(modules[resize.module]).get(resize.attribute)
        whole = isinstance(old, tuple | list) and 0 <= resize.entry < len(old)
        size = old[resize.entry] if whole else old  # type: ignore[index]
        if type(size) is not int or type(resize.value) is not int or not 1 <= resize.value <= size:
            where = f"{resize.module}.{resize.attribute}".lstrip(".")
            raise HapError(
                f"the plan sets {where} to {resize.value!r}: expected 1 to {size}. Keep one of the units it counts."
            )
    for widen in plan.widenings:
        if not _distinct_below(widen.index, widen.width):
            raise HapError(f"the plan is damaged: {widen.module} cannot be spread over {widen.width} channels")
    for part in (part for space in plan.turns for part in (*space.left, *space.right)):
        for name, dim in [(part.weight, part.dim), *([(part.bias, 0)] if part.bias else [])]:
            if name not in tensors or not 0 <= part.start <= tensors[name].shape[dim] - part.width:
                raise HapError(f"the plan does not fit this model: {name} has no head at {part.start}")
    for narrow in plan.narrowings:
        if not narrow.index or not _distinct_below(narrow.index, narrow.size):
            raise HapError(f"the plan is damaged: {narrow.module} cannot pick {list(narrow.index)} of {narrow.size}")


def _distinct_below(values: tuple[int, ...], size: int) -> bool:
    """Whether these are different indices of something that has `size` elements."""
    different = set(values)
    whole = set(map(type, different)) <= {int} and len(different) == len(values)
    return whole and (not different or (min(different) >= 0 and max(different) < size))

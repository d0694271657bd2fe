"""apply_: carry out a plan on a model, in place, and prove by running it that nothing else changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hap.calibration import pointwise_fits
from hap.checking import verify_plan
from hap.copying import apart
from hap.cutting import cut_tensors, operate_
from hap.errors import HapError
from hap.examples import imagine
from hap.garbage import left_for_later
from hap.given import outside_inference
from hap.groups import Site
from hap.implants import ChannelImplant, ImplantModule
from hap.plans import Plan
from hap.turning import turned
from hap.walking import named_tensors


@left_for_later()
def apply_(
    model: nn.Module,
    plan: Plan,
    example: Any = None,
    verify: bool = True,
    batches: Iterable[Any] | None = None,
) -> nn.Module:
    """Prune `model` in place and return it. Modules keep their classes and names.

    `verify` runs the result on `example` (or on random inputs like the traced ones) and compares it with the dense
    model whose removed slices are zero; if they differ, HapError is raised and `model` is left as it was.
    Implants that are fitted by least squares need `batches`, the calibration inputs; without them they start at the
    kernel's centre. Make a new optimizer afterwards: the old one's momentum has the old shapes.
    """
    check_fits(model, plan)
    if example is None and verify:
        example = imagine(plan.example, next(iter(model.parameters())).device)
    with outside_inference(model):
        with turned(model, plan.turns, example if verify else None):
            implants = _build_implants(model, plan, _fits(model, plan, batches))
            shorter = cut_tensors(model, plan)
            if verify:
                verify_plan(model, plan, implants, example, shorter)
                apart(shorter.values())
        operate_(model, plan, implants, shorter)
    return model


def rebuild_(model: nn.Module, plan: Plan) -> nn.Module:
    """The shape of the pruned model, in place: implants get start values that a checkpoint is about to overwrite."""
    check_fits(model, plan)
    operate_(model, plan, _build_implants(model, plan), cut_tensors(model, plan))
    return model


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


def _fits(model: nn.Module, plan: Plan, batches: Iterable[Any] | None) -> dict[str, Tensor]:
    if batches is None or plan.implant is None or not plan.implant.needs_inputs:
        return {}
    inputs = plan.kept_inputs()
    return pointwise_fits(model, {g.module: (g.rows, inputs.get(g.weight)) for g in plan.grafts}, batches)


def _build_implants(model: nn.Module, plan: Plan, fits: dict[str, Tensor] | None = None) -> dict[str, ImplantModule]:
    if not plan.grafts:
        return {}
    assert isinstance(plan.implant, ChannelImplant)
    fits = fits or {}
    modules = dict(model.named_modules())
    inputs = plan.kept_inputs()
    built = {}
    for graft in plan.grafts:
        module = modules[graft.module]
        assert isinstance(module, nn.Conv2d)
        weight = module.weight.detach()[list(graft.rows)]
        weight = weight[:, list(inputs[graft.weight])] if graft.weight in inputs else weight
        bias = None if module.bias is None else module.bias.detach()[list(graft.rows)]
        implant = plan.implant.build(site_of(graft.module, graft.weight, module), weight, bias, fits.get(graft.module))
        built[graft.module] = implant.to(module.weight.device, module.weight.dtype).train(module.training)
    return built


def site_of(name: str, weight: str, conv: nn.Conv2d) -> Site:
    """The convolution's geometry; sizes of maps are not needed to build."""
    assert not isinstance(conv.padding, str)
    kernel, stride, padding, dilation = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    return Site(name, weight, kernel, stride, padding, dilation, (0, 0), (0, 0), 1)  # type: ignore[arg-type]

"""apply_: carry out a plan on a model, in place, and prove by running it that nothing else changed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from hap.calibration import pointwise_fits
from hap.comparing import VALUES, difference, in_float64, is_float32, largest, outputs
from hap.copying import deepcopied
from hap.errors import HapError
from hap.examples import imagine, named_tensors
from hap.fewer_heads import FewerHeads
from hap.groups import Site
from hap.implants import ChannelImplant, ImplantModule
from hap.parts import touched
from hap.plans import Cut, Graft, Narrow, Plan, Widen
from hap.telling import telling_weights
from hap.turning import turned
from hap.untold import telling_example
from hap.zeros import Remembering, SkippingZeros, Sparse


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
    with turned(model, plan.turns, example if verify else None):
        implants = _build_implants(model, plan, _fits(model, plan, batches))
        shorter = cut_tensors(model, plan)
        if verify:
            verify_plan(model, plan, implants, example, shorter)
    _operate(model, plan, implants, shorter)
    return model


def rebuild_(model: nn.Module, plan: Plan) -> nn.Module:
    """The shape of the pruned model, in place: implants get start values that a checkpoint is about to overwrite."""
    check_fits(model, plan)
    _operate(model, plan, _build_implants(model, plan), cut_tensors(model, plan))
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
    for name in [item.module for items in added for item in items]:
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


def _operate(model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], shorter: dict[str, Tensor]) -> None:
    tensors = named_tensors(model)
    with torch.no_grad():
        for name, tensor in shorter.items():
            _replace_data(tensors[name], tensor)
    _follow(model, plan, implants)


def _follow(model: nn.Module, plan: Plan, implants: dict[str, ImplantModule]) -> None:
    """Everything but the tensors, which are cut already: attributes, implants and what stands around modules."""
    modules, tensors = dict(model.named_modules(remove_duplicate=False)), named_tensors(model)
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)
    touched: dict[str, dict[str, list[int]]] = {}
    for cut in plan.cuts:
        for alias in aliases[id(tensors[cut.name])]:
            owner, leaf = _owner(modules, alias, tensors[cut.name])
            shape = touched.setdefault(owner, {}).setdefault(leaf, list(tensors[cut.name].shape))
            shape[cut.dim] = cut.size
    for owner, before in touched.items():
        _sync(modules[owner], before)
    for resize in plan.resizes:
        old = vars(modules[resize.module])[resize.attribute]
        if isinstance(old, tuple | list):
            new = type(old)([*old[: resize.entry], resize.value, *old[resize.entry + 1 :]])
        setattr(modules[resize.module], resize.attribute, new if isinstance(old, tuple | list) else resize.value)
    for graft in plan.grafts:
        _attach_implant(modules[graft.module], implants[graft.module], graft)
    for widen in plan.widenings:
        _attach_widening(modules[widen.module], widen)
    for narrow in plan.narrowings:
        _attach_narrowing(modules[narrow.module], narrow)


def _owner(modules: dict[str, nn.Module], name: str, tensor: Tensor) -> tuple[str, str]:
    """The module that a tensor belongs to and its name there, also where that is computed from it."""
    owner, _, leaf = name.rpartition(".")
    layer, found, parametrized = owner.rpartition("parametrizations.")
    if found and getattr(modules[layer.rstrip(".")], parametrized).shape == tensor.shape:
        return layer.rstrip("."), parametrized
    return owner, leaf


def _replace_data(tensor: Tensor, shorter: Tensor) -> None:
    """Through .data, so that modules that share the parameter go on sharing it."""
    if tensor.requires_grad:  # a graph still alive holds a gradient accumulator of the old shape; a new type drops it
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = shorter
    tensor.grad = None


def _shortened(tensor: Tensor, cut: Cut) -> Tensor:
    index = torch.tensor(cut.keep, dtype=torch.int64, device=tensor.device)
    return tensor.index_select(cut.dim, index).contiguous(memory_format=_format(tensor))


def _format(tensor: Tensor) -> torch.memory_format:
    channels_last = (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    )
    return torch.channels_last if channels_last else torch.contiguous_format


# ---- attributes follow the tensors --------------------------------------------------------------------------


def _sync(module: nn.Module, before: dict[str, list[int]]) -> None:
    """Make a module's integers agree with its tensors again. `before` holds the old shapes of those that were cut."""
    if isinstance(module, _ConvNd):
        _sync_convolution(module, before.get("weight", list(module.weight.shape)))
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _NormBase):
        vectors = (module.weight, module.bias, module.running_mean)
        module.num_features = next(len(v) for v in vectors if v is not None)
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = len(module.weight)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.MultiheadAttention):
        FewerHeads.take_over(module)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)


def _sync_convolution(module: _ConvNd, before: list[int]) -> None:
    weight = module.weight
    if module.groups > 1 and (module.transposed or module.groups >= before[1]):  # whole groups went: rules._tie_groups
        module.groups = module.groups * weight.shape[0] // before[0]
    first, second = weight.shape[0], weight.shape[1] * module.groups
    module.in_channels, module.out_channels = (first, second) if module.transposed else (second, first)


# ---- what is added to modules: an implant beside a convolution, zeros around a branch -----------------------


class Stream(nn.Module):
    """Places the channels of a narrow branch among those of a wider stream and leaves zeros elsewhere."""

    def __init__(self, widen: Widen, device: torch.device):
        super().__init__()
        self.width, self.dim = widen.width, widen.dim
        self.register_buffer("index", torch.tensor(widen.index, dtype=torch.int64, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.new_zeros(*x.shape[: self.dim], self.width, *x.shape[self.dim + 1 :])
        return wide.index_copy(self.dim, self.index, x)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{len(self.index)} -> {self.width}"  # type: ignore[arg-type]


class Padded(Stream):
    """The same for heads along the last axis, block by block, which is faster than one by one."""

    def __init__(self, widen: Widen, device: torch.device):
        super().__init__(widen, device)
        self.blocks = blocks_of(widen.index, widen.width)

    def forward(self, x: Tensor) -> Tensor:
        mine = iter(x.split([size for size, own in self.blocks if own], -1))
        return torch.cat([next(mine) if own else x.new_zeros(*x.shape[:-1], size) for size, own in self.blocks], -1)


def blocks_of(index: tuple[int, ...], width: int) -> list[tuple[int, bool]]:
    """Runs of indices below `width` that are all in `index`, or all not: how long, and which of the two."""
    inside = set(index)
    return [(len(list(run)), own) for own, run in itertools.groupby(range(width), lambda i: i in inside)]


def _to_stream(module: Any, args: Any, output: Tensor) -> Tensor:
    return module.stream(output)


def _attach_widening(module: nn.Module, widen: Widen) -> None:
    device = next(iter([*module.parameters(), *module.buffers()])).device
    module.add_module("stream", (Padded if widen.dim == -1 else Stream)(widen, device))
    module.register_forward_hook(_to_stream)


class Part(nn.Module):
    """Picks some indices along an axis of a tensor that a module is called with."""

    def __init__(self, narrow: Narrow, device: torch.device):
        super().__init__()
        self.argument, self.dim = narrow.argument, narrow.dim
        self.register_buffer("index", torch.tensor(narrow.index, device=device), persistent=False)

    def forward(self, table: Tensor) -> Tensor:
        return table.index_select(self.dim, self.index)  # type: ignore[arg-type]


class Blocks(Part):
    """The same for heads along the last axis, block by block."""

    def __init__(self, narrow: Narrow, device: torch.device):
        super().__init__(narrow, device)
        self.blocks = blocks_of(narrow.index, narrow.size)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split([size for size, _ in self.blocks], -1)
        return torch.cat([p for p, (_, own) in zip(pieces, self.blocks, strict=True) if own], -1)


def _pick_parts(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The forward pre-hook of a module that gets parts of tables."""
    parts = module.parts
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    taken = vars(parts)["taken"] = []
    for part in parts:
        whole = given[part.argument]
        given[part.argument] = part.forward(whole)
        taken.append((given[part.argument], whole))
    return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}


def _give_back(module: Any, args: Any, output: Any) -> Any:
    """The forward hook of such a module: a table that it hands on leaves whole, so that others can pick their parts."""
    parts = module.parts
    taken, vars(parts)["taken"] = vars(parts)["taken"], []

    def whole(x: Any) -> Any:
        return next((whole for part, whole in taken if part is x), x)

    if type(output) is tuple and all(x is None or isinstance(x, Tensor) for x in output):  # what most return: fast
        return tuple(map(whole, output))
    return pytree.tree_map(whole, output)


def _attach_narrowing(module: nn.Module, narrow: Narrow) -> None:
    if not hasattr(module, "parts"):
        module.add_module("parts", nn.ModuleList())
        module.parts.taken = []  # type: ignore[union-attr]
        module.register_forward_pre_hook(_pick_parts, with_kwargs=True)
        module.register_forward_hook(_give_back)
    device = next(iter([*module.parameters(), *module.buffers()])).device
    assert isinstance(module.parts, nn.ModuleList)
    module.parts.append((Blocks if narrow.dim == -1 else Part)(narrow, device))


def _with_implant(module: Any, args: Any, output: Tensor) -> Tensor:
    """The forward hook of a convolution that has an implant."""
    joined = torch.cat([output, module.implant(args[0])], dim=1)
    return joined if module.implant.order is None else joined.index_select(1, module.implant.order)


def _attach_implant(module: Any, implant: ImplantModule, graft: Graft) -> None:
    order = None if graft.order is None else torch.tensor(graft.order, device=module.weight.device)
    implant.register_buffer("order", order, persistent=False)
    module.add_module("implant", implant)
    module.register_forward_hook(_with_implant)


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


# ---- the executed check -------------------------------------------------------------------------------------

REFUSED = "the pruned model does not do what the plan says, so nothing was changed"
Listener = Callable[[nn.Module], None]
LARGE = 1 << 14
"""Weights with as many elements are not written out with zeros in place of what goes: see hap.zeros."""


def verify_plan(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, shorter: dict[str, Tensor]
) -> None:
    """The check of apply_.

    With a classifier of zeros any two models agree: such weights get values, alike in both. So do constant inputs.
    """
    model, example = touched(model, example, [cut.name for cut in plan.cuts])
    example = telling_example(model, example)
    if changed := telling_weights(model):
        model = variant(model, changed)
        shorter = cut_tensors(model, plan)
    check_by_running(model, plan, implants, example, shorter=shorter)


def check_by_running(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None = None,
    shorter: dict[str, Tensor] | None = None, wanted: list[Any] | None = None, gross: float | None = None,
    listen: Listener | None = None,
) -> list[Any]:  # fmt: skip
    """Raise HapError unless the pruned model does on the example what the plan says. Changes nothing.

    It is held against the dense model with zeros in place of what goes; with `base`, a milder plan, against what that
    one leaves of the dense model, which runs faster. `shorter` holds what the plan leaves of tensors, where that is
    known, and `wanted` what that model with zeros returns, which is returned for the next time: in float64, where
    float32 was not enough to tell. A difference of more than `gross` times the largest value is no rounding. `listen`
    gets the pruned copy before it runs.
    """
    shorter = cut_tensors(model, plan) if shorter is None else shorter
    problem, wanted = _compare(model, plan, implants, example, base, shorter, wanted, gross=gross, listen=listen)
    if problem and problem.startswith(VALUES):  # rounding, or a real difference? Float64 without short cuts tells.
        exact, again = model, example
        if is_float32(model):
            exact, again = in_float64(model, example)
            implants = {k: copy.deepcopy(v).double() for k, v in implants.items()}
        problem, wanted = _compare(exact, plan, implants, again, base, cut_tensors(exact, plan), skip=False)
    if problem:
        raise HapError(f"{REFUSED}: {problem}")
    return wanted


def _compare(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None,
    shorter: dict[str, Tensor], wanted: list[Any] | None = None, skip: bool = True, gross: float | None = None,
    listen: Listener | None = None,
) -> tuple[str | None, list[Any]]:  # fmt: skip
    """What differs between the pruned and the masked model, in words, and what the masked one returns."""
    try:
        # a forward may write to its tensors: those of the reference, and what the caller's model gets, stay apart
        pruned = variant(model, {name: tensor.clone() for name, tensor in shorter.items()})
        _follow(pruned, plan, copy.deepcopy(implants))
        if listen is not None:
            listen(pruned)
        known = Remembering(dict(pruned.named_parameters())) if wanted is None and skip else None
        with known or nullcontext():
            seen = outputs(pruned, example)
    except Exception as error:
        raise HapError(f"{REFUSED}: its forward fails with {_in_a_line(error)}") from error
    if wanted is None:
        try:
            wanted = _reference(model, plan, implants, example, base, shorter, known)
        except Exception as error:
            why = f"the model with zeros in place of what goes fails with {_in_a_line(error)}"
            raise HapError(f"the pruned model cannot be checked, so nothing was changed: {why}") from error
    problem = difference(wanted, seen, plan.exact)
    if problem and problem.startswith(VALUES) and gross is not None and _apart(wanted, seen, gross):
        problem = f"beyond all rounding, {problem}"
    return problem, wanted


def _apart(wanted: list[Any], seen: list[Any], gross: float) -> bool:
    """Whether outputs, all of them finite, differ by more than so many times the largest value."""
    pairs = [(a, b) for a, b in zip(wanted, seen, strict=True) if isinstance(a, Tensor) and a.is_floating_point()]
    pairs = [(a, b) for a, b in pairs if a.numel()]
    finite = all(bool(x.isfinite().all()) for pair in pairs for x in pair)
    return finite and any(largest(a - b) > gross * largest(a) for a, b in pairs)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


def _reference(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None,
    shorter: dict[str, Tensor], known: Remembering | None,
) -> list[Any]:  # fmt: skip
    """What the masked model returns. If it fails with short cuts, it is run without: vmap, say, forbids some."""
    try:
        return _masked_outputs(model, plan, implants, example, base, shorter, known)
    except Exception:
        if known is None:
            raise
    return _masked_outputs(model, plan, implants, example, base, shorter, None)


def _masked_outputs(
    model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], example: Any, base: Plan | None,
    shorter: dict[str, Tensor], known: Remembering | None,
) -> list[Any]:  # fmt: skip
    """What the dense model (or what `base` leaves of it) returns with zeros where the plan cuts.

    Each implant is written out as the k x k kernel it equals. With what is `known` of the pruned model, large weights
    are not multiplied by zeros, and what both models compute from the same inputs is taken from there.
    """
    tensors, cuts = named_tensors(model), _by_name(base)
    grafted = {name for g in plan.grafts for name in (f"{g.module}.weight", f"{g.module}.bias")}
    changed = {n: tensors[n].detach().clone() for n in grafted if n in tensors and n not in _by_name(plan)}
    sparse: dict[nn.Parameter, Sparse] = {}
    for name, masks in _by_name(plan).items():
        tensor = tensors[name].detach()
        if known is not None and _worth_skipping(tensors[name], name) and name not in grafted:
            thin = _sparse(name, tensor, shorter[name], cuts.get(name, {}), masks)
            changed[name] = placeholder = thin.placeholder()
            sparse[placeholder] = thin
        else:
            changed[name] = _zeroed(tensor, cuts.get(name, {}), masks)
    masked = variant(model, changed)
    if base is not None:
        _follow(masked, base, {})
    modules, inputs = dict(masked.named_modules()), {name: list(keep) for name, keep in plan.kept_inputs().items()}
    for graft in plan.grafts:
        weight, implant, rows = modules[graft.module].weight, implants[graft.module], list(graft.rows)
        assert isinstance(weight, Tensor)
        dense = weight.data.new_zeros(len(rows), *weight.shape[1:])
        dense[:, inputs.get(graft.weight, list(range(weight.shape[1])))] = implant.kernel()
        weight.data[rows] = dense
        if implant.bias_values is not None:
            modules[graft.module].bias.data[rows] = implant.bias_values.detach()
    with nullcontext() if known is None else SkippingZeros(sparse, known):
        return outputs(masked, example)


def _by_name(plan: Plan | None) -> dict[str, dict[int, Cut]]:
    """The cuts of each tensor, by axis."""
    found: dict[str, dict[int, Cut]] = {}
    for cut in plan.cuts if plan else ():
        found.setdefault(cut.name, {})[cut.dim] = cut
    return found


def cut_tensors(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """What the plan leaves of the tensors that it cuts."""
    tensors = named_tensors(model)
    shorter: dict[str, Tensor] = {}
    with torch.no_grad():
        for cut in plan.cuts:
            shorter[cut.name] = _shortened(shorter.get(cut.name, tensors[cut.name].detach()), cut)
    return shorter


def variant(model: nn.Module, changed: dict[str, Tensor]) -> nn.Module:
    """A copy with some tensors changed. Other parameters are shared."""
    memo: dict[int, Any] = {}
    tensors = named_tensors(model)
    for name, new in changed.items():
        old = tensors[name]
        wrap = isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter)
        memo[id(old)] = nn.Parameter(new, old.requires_grad) if wrap else new
    for tensor in tensors.values():
        if isinstance(tensor, nn.Parameter):
            memo.setdefault(id(tensor), tensor)
    made = cast(nn.Module, deepcopied(model, memo))
    if shared := {id(m) for m in model.modules()} & {id(m) for m in made.modules()}:
        name = next(n for n, m in model.named_modules() if id(m) in shared)
        raise HapError(f"{name or 'the model'} copies itself as itself (__deepcopy__), so no copy of it can be tried")
    return made


def _worth_skipping(tensor: Tensor, name: str) -> bool:
    large = tensor.numel() >= LARGE and tensor.ndim > 1 and tensor.is_floating_point()
    return large and isinstance(tensor, nn.Parameter) and "parametrizations." not in name


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


def _zeroed(tensor: Tensor, cuts: dict[int, Cut], masks: dict[int, Cut]) -> Tensor:
    """A new tensor, cut along some axes and zero where more of it would be cut."""
    for cut in cuts.values():
        tensor = _shortened(tensor, cut)
    tensor = tensor if cuts else tensor.clone()
    for dim, mask in masks.items() if tensor.is_floating_point() else ():
        stay = set(mask.keep)
        gone = [i for i, k in enumerate(cuts[dim].keep if dim in cuts else range(mask.size)) if k not in stay]
        nearly = 1e-12 if "parametrizations." in mask.name else 0.0  # a row of zeros has no direction to keep
        tensor.index_fill_(dim, torch.tensor(gone, dtype=torch.int64, device=tensor.device), nearly)
    return tensor

"""What a plan adds to modules: implants beside convolutions, zeros around branches and heads, parts of tables."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hap.groups.types import ConvGeometry
from hap.implants import ImplantModule
from hap.planning.plan import ImplantStep, InputSelectionStep, OutputScatterStep, Plan


def has_additions(model: nn.Module) -> bool:
    """Whether a plan added modules to this model."""
    return any(isinstance(m, ImplantModule | Scatter | Select) for m in model.modules())


def _device(module: nn.Module) -> torch.device:
    return next(iter([*module.parameters(), *module.buffers()])).device


# ---- implants -----------------------------------------------------------------------------------------------


def build_implants(model: nn.Module, plan: Plan, fits: Mapping[str, Tensor] | None = None) -> dict[str, ImplantModule]:
    """The implants of a plan by module; `fits` are start values for some."""
    modules, inputs, built = dict(model.named_modules()), plan.kept_inputs(), {}
    for graft in plan.grafts:
        module: Any = modules[graft.module]
        weight = module.weight.detach()[list(graft.rows)]
        weight = weight[:, list(inputs[graft.weight])] if graft.weight in inputs else weight
        bias = None if module.bias is None else module.bias.detach()[list(graft.rows)]
        shape = (module.kernel_size, module.stride, module.padding, module.dilation)
        geometry = ConvGeometry(graft.module, graft.weight, *shape, (0, 0), (0, 0), 1)  # the size of maps is not needed
        assert plan.implant is not None
        implant = plan.implant.build(geometry, weight, bias, (fits or {}).get(graft.module))
        built[graft.module] = implant.to(module.weight.device, module.weight.dtype).train(module.training)
    return built


def attach_implant(module: Any, implant: ImplantModule, graft: ImplantStep) -> None:
    order = None if graft.order is None else torch.tensor(graft.order, device=module.weight.device)
    implant.register_buffer("order", order, persistent=False)
    module.add_module("implant", implant)
    module.register_forward_hook(_with_implant)


def _with_implant(module: Any, args: Any, output: Tensor) -> Tensor:
    joined = torch.cat([output, module.implant(args[0])], dim=1)
    return joined if module.implant.order is None else joined.index_select(1, module.implant.order)


# ---- zeros behind a module ----------------------------------------------------------------------------------


class _Indices(nn.Module):
    """Some indices of an axis of length `width`, and `runs` of those that are all among them, or all not: how long, and
    which of the two. Heads stand along the last axis, where copying runs takes a fraction of the time of copying one
    by one."""

    index: Tensor

    def __init__(self, index: tuple[int, ...], width: int, dim: int, device: torch.device):
        super().__init__()
        self.width, self.dim, inside = width, dim, set(index)
        self.runs = [(len(list(run)), own) for own, run in itertools.groupby(range(width), inside.__contains__)]
        self.register_buffer("index", torch.tensor(index, dtype=torch.int64, device=device), persistent=False)


class Scatter(_Indices):
    """Places the channels of a narrow branch among those of a wider stream and leaves zeros elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == -1:
            mine = iter(x.split([size for size, own in self.runs if own], -1))
            return torch.cat([next(mine) if own else x.new_zeros(*x.shape[:-1], size) for size, own in self.runs], -1)
        wide = x.new_zeros(*x.shape[: self.dim], self.width, *x.shape[self.dim + 1 :])
        return wide.index_copy(self.dim, self.index, x)

    def extra_repr(self) -> str:
        return f"{len(self.index)} -> {self.width}"


def attach_output_scatter(modules: Mapping[str, nn.Module], widen: OutputScatterStep) -> None:
    module = modules[widen.module]
    module.add_module("stream", Scatter(widen.index, widen.width, widen.dim, _device(module)))
    if widen.inside is None:
        module.register_forward_hook(_scattered)
    else:
        _spread_inside(modules[widen.inside], widen.module.removeprefix(f"{widen.inside}."))


def _scattered(module: Any, args: Any, output: Tensor) -> Tensor:
    return module.stream(output)


# ---- parts of what a module is called with ------------------------------------------------------------------


class Select(_Indices):
    """Picks some indices along an axis of a tensor that a module is called with."""

    argument: int | str

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == -1:
            pieces = x.split([size for size, _ in self.runs], -1)
            return torch.cat([piece for piece, (_, own) in zip(pieces, self.runs, strict=True) if own], -1)
        return x.index_select(self.dim, self.index)


def attach_input_selection(modules: Mapping[str, nn.Module], narrow: InputSelectionStep) -> None:
    module: Any = modules[narrow.module]
    if not hasattr(module, "parts"):
        module.add_module("parts", nn.ModuleList())
        if narrow.inside is None:
            module.parts.taken = []
            module.register_forward_pre_hook(_selected, with_kwargs=True)
            module.register_forward_hook(_given_back)
        else:
            _spread_inside(modules[narrow.inside], narrow.module.removeprefix(f"{narrow.inside}."))
    module.parts.append(part := Select(narrow.index, narrow.size, narrow.dim, _device(module)))
    part.argument = narrow.argument


def _selected(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The forward pre-hook of a module that gets parts of tables."""
    parts = module.parts
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    taken = vars(parts)["taken"] = []
    for part in parts:
        whole = given[part.argument]
        given[part.argument] = part.forward(whole)
        taken.append((given[part.argument], whole))
    return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}


def _given_back(module: Any, args: Any, output: Any) -> Any:
    """The forward hook of such a module: a table that it hands on leaves whole, so that others can pick their parts."""
    parts = module.parts
    taken, vars(parts)["taken"] = vars(parts)["taken"], []

    def whole(x: Any) -> Any:
        return next((whole for part, whole in taken if part is x), x)

    if type(output) is tuple and all(x is None or isinstance(x, Tensor) for x in output):  # what most return: fast
        return tuple(map(whole, output))
    return pytree.tree_map(whole, output)


# ---- around a layer that is not called: a forward hands its weight to functional.linear, as in
# qkv = functional.linear(x, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))


def _spread_inside(module: nn.Module, layer: str) -> None:
    """Let a module's forward find zeros in place of what this layer of it, by its name there, lost or does not read. It
    becomes one of a subclass, in which such a call takes and returns as many columns as ever."""
    layers = vars(module).setdefault("spread_layers", [])
    if not layers:
        module.__class__ = _spreading(type(module))
    if layer not in layers:
        layers.append(layer)


def _spreading(kind: Any) -> Any:
    """The subclass, made in a way that runs no code of its class; one for all modules of a class."""
    if known := next((k for k in type.__subclasses__(kind) if "_spreads" in vars(k)), None):
        return known

    class Spreading(nn.Module):
        _spreads = True

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            layers = vars(self)["spread_layers"]
            with _SpreadLinear([self.get_submodule(name) for name in layers]):
                return super().forward(*args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:  # a class made here is known by no name
            return _made_again, (type(self).__bases__[0],), self.__getstate__()

    Spreading.__name__, Spreading.__qualname__, Spreading.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    Spreading.__doc__ = kind.__doc__
    Spreading.__bases__ = (kind,)
    return Spreading


def _made_again(kind: Any) -> Any:
    """An empty module of the subclass, for copies and pickles to fill."""
    return object.__new__(_spreading(kind))


class _SpreadLinear(TorchFunctionMode):
    """Inside, `functional.linear` with the weight of one of these layers has its `parts` in front, `stream` behind."""

    def __init__(self, layers: Sequence[Any]):
        super().__init__()
        self.layers = layers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            given = {"bias": None, **dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
            for layer in self.layers:
                if given["weight"] is layer.weight:
                    return _spread(layer, **given)
        return func(*args, **kwargs)


def _spread(layer: Any, input: Any, weight: Any, bias: Any) -> Any:
    """A bias that is as long as ever loses what the weight lost."""
    modules = dict(layer.named_children())
    for part in modules.get("parts", ()):
        input = part(input)
    if bias is not None and len(bias) > len(weight):
        bias = bias.index_select(0, layer.stream.index)
    output = functional.linear(input, weight, bias)
    return modules["stream"](output) if "stream" in modules else output

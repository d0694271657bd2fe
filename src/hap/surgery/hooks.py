"""What a plan adds to modules: an implant beside a convolution, zeros around a branch, parts of tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.implants import ImplantModule
from hap.planning.steps import ImplantStep, InputSelectionStep, OutputScatterStep
from hap.surgery.scatter_in_forward import scatter_inside


class Scatter(nn.Module):
    """Places the channels of a narrow branch among those of a wider stream and leaves zeros elsewhere."""

    def __init__(self, widen: OutputScatterStep, device: torch.device):
        super().__init__()
        self.width, self.dim = widen.width, widen.dim
        self.register_buffer("index", torch.tensor(widen.index, dtype=torch.int64, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.new_zeros(*x.shape[: self.dim], self.width, *x.shape[self.dim + 1 :])
        return wide.index_copy(self.dim, self.index, x)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{len(self.index)} -> {self.width}"  # type: ignore[arg-type]


class ScatterBlocks(Scatter):
    """Places heads along the last axis block by block, which is faster than one by one."""

    def __init__(self, widen: OutputScatterStep, device: torch.device):
        super().__init__(widen, device)
        self.blocks = blocks_of(widen.index, widen.width)

    def forward(self, x: Tensor) -> Tensor:
        mine = iter(x.split([size for size, own in self.blocks if own], -1))
        return torch.cat([next(mine) if own else x.new_zeros(*x.shape[:-1], size) for size, own in self.blocks], -1)


def blocks_of(index: tuple[int, ...], width: int) -> list[tuple[int, bool]]:
    """Runs of indices below `width` that are all in `index`, or all not: how long, and which of the two."""
    inside = set(index)
    return [(len(list(run)), own) for own, run in itertools.groupby(range(width), lambda i: i in inside)]


def _scatter(module: Any, args: Any, output: Tensor) -> Tensor:
    return module.stream(output)


def attach_output_scatter(modules: Mapping[str, nn.Module], widen: OutputScatterStep) -> None:
    module = modules[widen.module]
    device = next(iter([*module.parameters(), *module.buffers()])).device
    module.add_module("stream", (ScatterBlocks if widen.dim == -1 else Scatter)(widen, device))
    if widen.inside is None:
        module.register_forward_hook(_scatter)
    else:
        scatter_inside(modules[widen.inside], widen.module.removeprefix(f"{widen.inside}."))


class Select(nn.Module):
    """Picks some indices along an axis of a tensor that a module is called with."""

    def __init__(self, narrow: InputSelectionStep, device: torch.device):
        super().__init__()
        self.argument, self.dim = narrow.argument, narrow.dim
        self.register_buffer("index", torch.tensor(narrow.index, device=device), persistent=False)

    def forward(self, table: Tensor) -> Tensor:
        return table.index_select(self.dim, self.index)  # type: ignore[arg-type]


class SelectBlocks(Select):
    """Picks heads along the last axis block by block."""

    def __init__(self, narrow: InputSelectionStep, device: torch.device):
        super().__init__(narrow, device)
        self.blocks = blocks_of(narrow.index, narrow.size)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split([size for size, _ in self.blocks], -1)
        return torch.cat([p for p, (_, own) in zip(pieces, self.blocks, strict=True) if own], -1)


def _select(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def attach_input_selection(modules: Mapping[str, nn.Module], narrow: InputSelectionStep) -> None:
    module = modules[narrow.module]
    if not hasattr(module, "parts"):
        module.add_module("parts", nn.ModuleList())
        if narrow.inside is None:
            module.parts.taken = []  # type: ignore[union-attr]
            module.register_forward_pre_hook(_select, with_kwargs=True)
            module.register_forward_hook(_give_back)
        else:
            scatter_inside(modules[narrow.inside], narrow.module.removeprefix(f"{narrow.inside}."))
    device = next(iter([*module.parameters(), *module.buffers()])).device
    assert isinstance(module.parts, nn.ModuleList)
    module.parts.append((SelectBlocks if narrow.dim == -1 else Select)(narrow, device))


def _with_implant(module: Any, args: Any, output: Tensor) -> Tensor:
    """The forward hook of a convolution that has an implant."""
    joined = torch.cat([output, module.implant(args[0])], dim=1)
    return joined if module.implant.order is None else joined.index_select(1, module.implant.order)


def attach_implant(module: Any, implant: ImplantModule, graft: ImplantStep) -> None:
    order = None if graft.order is None else torch.tensor(graft.order, device=module.weight.device)
    implant.register_buffer("order", order, persistent=False)
    module.add_module("implant", implant)
    module.register_forward_hook(_with_implant)


def has_additions(model: nn.Module) -> bool:
    """Whether a plan added modules to this model."""
    return any(isinstance(m, ImplantModule | Scatter | Select) for m in model.modules())

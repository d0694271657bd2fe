"""Quick walks through the modules of a model: trials copy one, and ask for its tensors, many times over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


def takes_hooks(module: nn.Module) -> bool:
    """Modules that torch.jit has scripted take none in Python, and nothing of them can be cut."""
    return not isinstance(module, torch.jit.ScriptModule)


def every_module(model: nn.Module) -> list[nn.Module]:
    """What model.modules() yields: each module once, outer ones first."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += reversed(module._modules.values())
    return list(found.values())


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for path, module in _every_name(model):
        parameters.update({path + name: p for name, p in module._parameters.items() if p is not None})
        buffers.update({path + name: b for name, b in module._buffers.items() if b is not None})
    return parameters | buffers


def _every_name(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules under all their names, each with the dot that what it holds is named behind."""
    waiting: list[tuple[str, nn.Module | None]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module is not None:
            yield path, module
            waiting += [(f"{path}{name}.", child) for name, child in reversed(module._modules.items())]


def set_mode(model: nn.Module, training: bool) -> None:
    """model.train(training)."""
    modules = every_module(model)
    if switched_by_flag(modules):
        set_flags((module, training) for module in modules)
    else:
        model.train(training)


def switched_by_flag(modules: Iterable[nn.Module]) -> bool:
    """Whether nothing but a flag of each of these changes with its mode."""
    kinds: set[Any] = set()
    for module in modules:
        kinds.add(type(module))
        if "train" in vars(module):
            return False
    return all(map(_usual, kinds))


def set_flags(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, mode in modes:
        vars(module)["training"] = mode


@lru_cache(maxsize=4096)
def _usual(kind: Any) -> bool:
    own = (kind.train, kind.eval, kind.__setattr__) != (nn.Module.train, nn.Module.eval, nn.Module.__setattr__)
    return not own and not hasattr(kind, "training")

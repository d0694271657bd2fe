"""Models that torch.export cannot capture as a whole, such as detectors, by the parts that it can.

A detector picks boxes by value, which no fixed graph can express, but its backbone, neck and heads are plain networks.
`parts` runs the model once, finds the largest submodules that torch.export can capture, and gives a view of the model
that runs just those, each on what it was called with. The view has the same submodules under the same names, so
whatever prunes the view prunes the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.examples import evaluating, run

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Parts(nn.Module):
    """The parts of a model: same submodules, same names, but a forward that runs each part on its own inputs.

    `example` holds these inputs, one (arguments, keyword arguments) for each call of a part. The outputs of all parts
    are outputs of the view, and so what passes between parts is never cut.
    """

    def __init__(self, model: nn.Module, calls: list[tuple[str, Call]]):
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.names = [name for name, _ in calls]
        self.example = tuple(call for _, call in calls)

    def forward(self, *calls: Call) -> list[Any]:
        return [self.get_submodule(name)(*args, **kw) for name, (args, kw) in zip(self.names, calls, strict=True)]


def parts(model: nn.Module, example: Any) -> Parts:
    """A view of the largest parts of `model` that torch.export can capture. The model is not changed.

    Prune the view, and the model is pruned: `view = parts(detector, ([image],)); hap.prune_(view, view.example, ...)`.
    """
    calls = _calls(model, example)
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{part}.") for part in found)
        if name in calls and not inside and _has_parameters(module) and captures(module, *calls[name][0]):
            found.append(name)
    if not found:
        raise HapError(f"torch.export can capture no part of {type(model).__name__} on this example")
    return Parts(model, [(name, call) for name in found for call in calls[name]])


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _calls(model: nn.Module, example: Any) -> dict[str, list[Call]]:
    """What every submodule is called with when the model runs on the example, by the module's name."""
    calls: dict[str, list[Call]] = {}
    with _recording(model, calls):
        run(model, example)
    return calls


@contextmanager
def _recording(model: nn.Module, calls: dict[str, list[Call]]) -> Iterator[None]:
    def recorder(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, []).append(pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs)))

        return record

    hooks = [m.register_forward_pre_hook(recorder(n), with_kwargs=True) for n, m in model.named_modules() if n]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def captures(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch.export gives a graph of this module in which every size is known."""
    try:
        with evaluating(module), torch.no_grad(), redirect_stderr(StringIO()):  # where torch prints half a graph
            program = torch.export.export(module, args, kwargs, strict=False)
    except Exception:  # whatever keeps torch.export from it, its own parts are tried next
        return False
    values = pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes])
    return all(type(size) is int for value in values if isinstance(value, torch.Tensor) for size in value.shape)

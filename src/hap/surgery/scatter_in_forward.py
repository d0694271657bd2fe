"""Zeros around a layer whose weight a forward hands to `functional.linear`, so that no hook can stand around it.

    qkv = functional.linear(x, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))

The module whose forward that is becomes one of a subclass, in which such a call takes and returns as many columns as
ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class _Spreading(TorchFunctionMode):
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


def scatter_inside(module: nn.Module, layer: str) -> None:
    """Let a module's forward find zeros in place of what this layer of it, by its name there, lost or does not read."""
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
            with _Spreading([self.get_submodule(name) for name in layers]):
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

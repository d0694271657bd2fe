"""Convolutions at some places of a large map alone, where not the values count but which channels they come from.

What channels a layer reads and writes is the same wherever in an image it looks. A convolution at every fourth row and
column, with each value repeated up to the next, is still linear in its inputs and weights and of the same shape, so two
models that should compute the same, one of them pruned, can be held against each other by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

FEWEST = 7
"""No fewer places along an axis are computed, where there are as many."""


class Coarse(TorchDispatchMode):
    """Inside, convolutions are computed at some places of a map, and the others get what is nearest: results have
    their true shapes and values of their kind."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default and not args[6]:  # which would be a transposed one
            sides = _sides(*args[:6])
            steps = [max(1, side // FEWEST) for side in sides]
            if max(steps) > 1:
                x, weight, bias, stride, *rest = args
                wider = [a * b for a, b in zip(stride, steps, strict=True)]
                return functional.interpolate(func(x, weight, bias, wider, *rest), sides, mode="nearest")
        return func(*args, **(kwargs or {}))


def _sides(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    """How many places a convolution computes along each axis of a map."""
    axes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [(side + 2 * pad - reach * (kernel - 1) - 1) // step + 1 for side, kernel, step, pad, reach in axes]

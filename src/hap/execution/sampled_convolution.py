"""Convolutions at some places of a large map alone, to see quickly which channels values come from.

What channels a layer reads and writes is the same wherever in an image it looks. A convolution at every fifth row and
column, with values in between that change evenly from one to the next, is still linear in its inputs and weights and of
the same shape, so two models that should compute the same, one of them pruned, can be held against each other by it.
"""

from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

ABOUT, FEWEST = 7, 3
"""About so many places along an axis are computed, and no fewer than these; all, where that would not save any."""
BETWEEN = {3: "linear", 4: "bilinear", 5: "trilinear"}
"""How values in between are found, by the number of axes of a tensor."""


class SampledConvolutions(TorchDispatchMode):
    """Inside, convolutions are computed at some places of a map, and interpolated in between to their true shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default and not args[6]:  # which would be a transposed one
            x, weight, bias, *settings, _, _, _ = args
            axes = x.ndim - 2
            stride, padding, dilation = (each * axes if len(each) == 1 else each for each in settings)
            sides = _sides(x, weight, stride, padding, dilation)
            steps = [step_of(side) for side in sides]
            if max(steps) > 1:
                wider = [a * b for a, b in zip(stride, steps, strict=True)]
                some = func(x, weight, bias, wider, padding, dilation, *args[6:])
                return functional.interpolate(some, sides, mode=BETWEEN[x.ndim], align_corners=True)
        return func(*args, **(kwargs or {}))


def step_of(side: int) -> int:
    """From one place to the next. It has no factor 2 or 3, so that places meet all parts of what was put together by
    turns, as by a pixel shuffle."""
    step = next(n for n in count(max(1, side // ABOUT)) if n % 2 and n % 3)
    return step if side > (FEWEST - 1) * step else 1


def _sides(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> list[int]:
    """How many places a convolution computes along each axis of a map."""
    axes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [(side + 2 * pad - reach * (kernel - 1) - 1) // step + 1 for side, kernel, step, pad, reach in axes]

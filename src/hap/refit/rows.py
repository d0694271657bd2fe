"""A layer as a linear map: what each position of its result is computed from, as rows of a matrix.

Whatever the layer, its result at a position is `row @ weight.T + bias`: the row holds the inputs under the kernel. Of a
large map a part of the positions is drawn at random. Grouped layers are several maps side by side, on axis 0.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from hap.execution.windows import windows
from hap.graph.nodes import arguments, short_name
from hap.graph.operator_families import CONVOLUTIONS, TRANSPOSED


@dataclass(frozen=True)
class LinearMap:
    """The layout of one layer: from its weight to matrices (groups, outputs, inputs), and from its input to rows."""

    node: fx.Node

    @property
    def kind(self) -> str:
        return short_name(self.node)

    @property
    def given(self) -> dict[str, Any]:
        return arguments(self.node)

    @property
    def groups(self) -> int:
        return int(self.given.get("groups", 1))

    @property
    def spatial(self) -> int:
        """How many axes of the input a kernel moves along."""
        return int(self.kind[-2]) if self.kind in CONVOLUTIONS | TRANSPOSED else 0

    def matrices(self, weight: Tensor) -> Tensor:
        """(groups, outputs of a group, inputs of one output)."""
        if self.kind == "addmm":
            return weight.t()[None]
        if self.kind in TRANSPOSED:  # (inputs, outputs of a group, *kernel)
            parts = weight.flip(tuple(range(2, weight.ndim))).unflatten(0, (self.groups, -1))
            return parts.transpose(1, 2).flatten(2)
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def weight(self, matrices: Tensor, like: Tensor) -> Tensor:
        """The parameter that these matrices make; `matrices` backwards."""
        if self.kind == "addmm":
            return matrices[0].t()
        if self.kind in TRANSPOSED:
            shape = (self.groups, like.shape[1], like.shape[0] // self.groups, *like.shape[2:])
            parts = matrices.reshape(shape).transpose(1, 2).flatten(0, 1)
            return parts.flip(tuple(range(2, like.ndim)))
        return matrices.reshape(like.shape)

    def rows(self, x: Tensor, kernel: tuple[int, ...], positions: tuple[Tensor, ...]) -> Tensor:
        """(groups, positions, inputs of one output), where `positions` has one index for each axis of the result but
        that of the channels."""
        if not self.spatial:
            return x[positions][None]
        if x.ndim == self.spatial + 1:  # one sample without an axis for it
            x, positions = x[None], (torch.zeros_like(positions[0]), *positions)
        windows = self._windows(x, kernel)  # (batch, channels, *positions, *kernel)
        taken = windows.movedim(1, 1 + self.spatial)[positions]  # (rows, channels, *kernel)
        return taken.reshape(len(taken), self.groups, -1).transpose(0, 1)

    def _windows(self, x: Tensor, kernel: tuple[int, ...]) -> Tensor:
        """A view of the padded input with the inputs of each position on axes of their own."""
        given, n = self.given, self.spatial
        stride, dilation = (_several(given[name], n) for name in ("stride", "dilation"))
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if self.kind in TRANSPOSED:
            padding, more = (_several(given[name], n) for name in ("padding", "output_padding"))
            sides = [(r - p, r - p + m) for r, p, m in zip(reach, padding, more, strict=True)]
            x, stride = _spread(x, stride), [1] * n
        elif isinstance(given["padding"], str):
            sides = [(r // 2, r - r // 2) if given["padding"] == "same" else (0, 0) for r in reach]
        else:
            sides = [(p, p) for p in _several(given["padding"], n)]
        return windows(x, kernel, stride, dilation, sides)


def _several(value: Any, count: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [int(v) for v in (values * count if len(values) == 1 else values)]


def _spread(x: Tensor, stride: list[int]) -> Tensor:
    """The input of a transposed convolution with zeros between its elements, as a plain one would read it."""
    sizes = [(size - 1) * s + 1 for size, s in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    places: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    wide[places] = x
    return wide


def by_axis(positions: Tensor, shape: tuple[int, ...], axis: int) -> tuple[Tensor, ...]:
    """An index along each axis but that of the channels, for positions that are counted over all these axes."""
    sizes = [size for i, size in enumerate(shape) if i != axis]
    return cast(tuple[Tensor, ...], torch.unravel_index(positions, sizes))


def at(value: Tensor, axis: int, positions: Tensor) -> Tensor:
    """(positions, channels) of a tensor whose channels lie along `axis`."""
    return value.movedim(axis, -1)[by_axis(positions, tuple(value.shape), axis)]

"""Run a model in which much of the weights is zero, without multiplying by the zeros and without writing them out.

A layer whose weight is zero in some rows and columns computes the same from what is left: pick the inputs that count,
multiply by the small weight, and place the results among zeros. To hold a pruned model against the dense one with zeros
in place of what went then costs about as much as the pruned model does, not the dense one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LAYERS = (functional.linear, torch.conv1d, torch.conv2d, torch.conv3d)
"""Functions of (input, weight, bias); convolutions also of (stride, padding, dilation, groups)."""

_READS_NO_VALUES = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse", "is_quantized",
                 "is_meta", "is_nested", "is_leaf", "grad")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex}  # fmt: skip


@dataclass(frozen=True)
class Sparse:
    """A tensor of this shape that is `small` at the given indices of some axes and zero elsewhere."""

    small: Tensor
    shape: tuple[int, ...]
    index: Mapping[int, Tensor]

    def placeholder(self) -> nn.Parameter:
        """Stands for the tensor in a module: right in shape, and not a number, should anything read it unnoticed."""
        nothing = torch.full((), math.nan, dtype=self.small.dtype, device=self.small.device)
        return nn.Parameter(nothing.expand(self.shape), requires_grad=False)

    def full(self) -> Tensor:
        tensor = self.small
        for dim, index in self.index.items():
            shape = [*tensor.shape[:dim], self.shape[dim], *tensor.shape[dim + 1 :]]
            tensor = tensor.new_zeros(shape).index_copy_(dim, index, tensor)
        return tensor

    def apply(self, layer: Callable[..., Tensor], x: Tensor, bias: Tensor | None, *rest: Any) -> Tensor | None:
        """What a linear layer or a convolution with this weight computes. None: it takes the whole weight for that."""
        channels = 1 - len(self.shape)
        groups = rest[3] if len(rest) > 3 else 1
        if not set(self.index) <= {0, 1}:
            return None
        inputs = self.index.get(1)
        if groups > 1:
            if (found := self._grouped(groups, x.shape[channels] // groups)) is None:
                return None
            inputs, left = found
            rest = (*rest[:3], left, *rest[4:])
        x = x if inputs is None else x.index_select(channels, inputs)
        if 0 not in self.index:
            return layer(x, self.small, bias, *rest)
        rows = self.index[0]
        some = layer(x, self.small, None if bias is None else bias[rows], *rest)
        shape = [*some.shape[:channels], self.shape[0], *some.shape[some.ndim + channels + 1 :]]
        if bias is None:
            return some.new_zeros(shape).index_copy_(channels, rows, some)
        along = bias.to(some.dtype).view(-1, *[1] * (-channels - 1))
        return along.expand(shape).clone(memory_format=torch.contiguous_format).index_copy_(channels, rows, some)

    def _grouped(self, groups: int, per: int) -> tuple[Tensor | None, int] | None:
        """The inputs that count and the number of groups left, if whole groups went, or equally many of each.

        `per` is the number of inputs of a group.
        """
        width = self.shape[0] // groups
        rows = self.index.get(0, torch.arange(self.shape[0], device=self.small.device))
        counts = torch.bincount(rows // width, minlength=groups)
        left, inside = counts.nonzero().flatten(), self.index.get(1)
        if (counts[left] != counts.max()).any() or not torch.equal(rows, rows.sort().values):
            return None
        inside = torch.arange(per, device=rows.device) if inside is None else inside
        return (left[:, None] * per + inside).flatten(), len(left)


class SkippingZeros(TorchFunctionMode):
    """Inside, functions get the real tensors in place of placeholders, and layers with such weights skip the zeros."""

    def __init__(self, sparse: Mapping[nn.Parameter, Sparse]):
        super().__init__()
        self.sparse = {id(placeholder): tensor for placeholder, tensor in sparse.items()}
        self.placeholders = list(sparse)  # alive, so that nothing else gets their ids
        self.written: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS and not kwargs and id(args[1]) in self.sparse:
            x, weight, bias = (*args[:3], None)[:3]
            if (result := self.sparse[id(weight)].apply(func, x, bias, *args[3:])) is not None:
                return result
        if func not in _READS_NO_VALUES and self._occurs((*args, *kwargs.values())):
            args, kwargs = pytree.tree_map_only(nn.Parameter, self._real, (args, kwargs))
        return func(*args, **kwargs)

    def _occurs(self, values: Any) -> bool:
        return any(
            id(v) in self.sparse or (isinstance(v, list | tuple | dict) and self._occurs(pytree.tree_leaves(v)))
            for v in values
        )

    def _real(self, parameter: nn.Parameter) -> Tensor:
        key = id(parameter)
        if key in self.sparse and key not in self.written:
            self.written[key] = nn.Parameter(self.sparse[key].full(), requires_grad=False)
        return self.written.get(key, parameter)

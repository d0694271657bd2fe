"""Run a model in which much of the weights is zero, without multiplying by the zeros and without writing them out.

A layer whose weight is zero in some rows and columns computes the same from what is left: pick the inputs that count,
multiply by the small weight, and place the results among zeros. To hold a pruned model against the dense one with zeros
in place of what went then costs about as much as the pruned model does, not the dense one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hap.errors import HapError

LAYERS = (functional.linear, torch.conv1d, torch.conv2d, torch.conv3d)
"""Functions of (input, weight, bias); convolutions also of (stride, padding, dilation, groups)."""

ATTENTION = functional.scaled_dot_product_attention
ATTENTIONS = {ATTENTION, torch.ops.aten.scaled_dot_product_attention.default}


@dataclass(frozen=True)
class SparseWeight:
    """A tensor of this shape that is `small` at the given indices of some axes and zero elsewhere."""

    small: Tensor
    shape: tuple[int, ...]
    index: Mapping[int, Tensor]

    def placeholder(self) -> nn.Parameter:
        """Stands for the tensor in a module: right in shape, and not a number, should anything read it unnoticed."""
        nothing = torch.full((), math.nan, dtype=self.small.dtype, device=self.small.device)
        return nn.Parameter(nothing.expand(self.shape), requires_grad=False)

    def full(self, zero: float = 0.0) -> Tensor:
        """The tensor, with something in place of zero."""
        tensor = self.small
        for dim, index in self.index.items():
            shape = [*tensor.shape[:dim], self.shape[dim], *tensor.shape[dim + 1 :]]
            tensor = tensor.new_full(shape, zero).index_copy_(dim, index, tensor)
        return tensor

    def apply(self, layer: Callable[..., Tensor], x: Tensor, bias: Tensor | None, *rest: Any) -> Tensor | None:
        """What a linear layer or a convolution with this weight computes.

        None, if that takes the whole weight, as where kernels are cut, or for a convolution with several groups.
        """
        channels = 1 - len(self.shape)
        if not set(self.index) <= {0, 1} or (len(rest) > 3 and rest[3] > 1):
            return None
        x = x.index_select(channels, self.index[1]) if 1 in self.index else x
        result = layer(x, self.small, None, *rest)
        if 0 in self.index:
            shape = [*result.shape[:channels], self.shape[0], *result.shape[result.ndim + channels + 1 :]]
            result = result.new_zeros(shape).index_copy_(channels, self.index[0], result)
        return result if bias is None else result + bias.to(result.dtype).view(-1, *[1] * (-channels - 1))


class NoEmptyHeads(TorchFunctionMode):
    """Inside, attention without heads, or with heads of no width, raises.

    A forward that slices what was cut by sizes that did not follow may ask for that, and the kernels of some versions
    of torch divide by the number of heads: that ends the process, and no trial could go on.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ATTENTIONS:
            named = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
            for name in ("query", "key", "value"):
                shape = tuple(named[name].shape)
                if not shape[-1] or (len(shape) > 3 and not shape[-3]):
                    raise HapError(f"the {name} of an attention has shape {shape}; expected at least one head")
        return func(*args, **(kwargs or {}))


class SkippingZeros(TorchFunctionMode):
    """Inside, functions get the real tensors in place of placeholders, and layers with such weights skip the zeros."""

    def __init__(self, sparse: Mapping[nn.Parameter, SparseWeight]):
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
        if self._occurs((*args, *kwargs.values())):
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

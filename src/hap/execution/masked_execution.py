"""Run a model in which much of the weights is zero, without multiplying by the zeros and without writing them out.

A layer whose weight is zero in some rows and columns computes the same from what is left: pick the inputs that count,
multiply by the small weight, and place the results among zeros. To hold a pruned model against the dense one with zeros
in place of what went then costs about as much as the pruned model does, not the dense one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
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
_MULTI_HEAD = functional.multi_head_attention_forward
_multi_head = FunctionType(
    _MULTI_HEAD.__code__, vars(functional) | {"has_torch_function": lambda _: False}, None, _MULTI_HEAD.__defaults__
)
"""The code behind it, which does not ask a mode to take its place, so that a mode gets to see what it calls."""
POINTWISE = {functional.gelu, functional.silu, torch.sigmoid, torch.tanh, torch.exp}
POINTWISE |= {Tensor.sigmoid, Tensor.tanh, Tensor.exp}
"""Functions of single elements. Kernels round differently at the end of a row, where no whole vector is left."""
VECTOR = 64
"""A multiple of the elements in a vector."""
ROOM = 1 << 30
"""How many bytes of what layers read and compute are held at most, so as not to compute it twice."""

_FIELDS = "shape dtype device ndim layout requires_grad grad is_leaf is_cuda is_sparse is_quantized is_meta is_nested"
_READS_NO_VALUES = {getattr(Tensor, name).__get__ for name in _FIELDS.split()}
_READS_NO_VALUES |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex}


@dataclass(frozen=True)
class SparseWeight:
    """A tensor of this shape that is `small` at the given indices of some axes and zero elsewhere."""

    small: Tensor
    shape: tuple[int, ...]
    index: Mapping[int, Tensor]
    name: str = ""

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
        """What a linear layer or a convolution with this weight computes.

        None, if that takes the whole weight, as where kernels are cut, or for a convolution with several groups.
        """
        channels = 1 - len(self.shape)
        if not set(self.index) <= {0, 1} or (len(rest) > 3 and rest[3] > 1):
            return None
        x = x.index_select(channels, self.index[1]) if 1 in self.index else x
        if 0 not in self.index:
            return layer(x, self.small, bias, *rest)
        rows = self.index[0]
        some = layer(x, self.small, None if bias is None else bias[rows], *rest)
        shape = [*some.shape[:channels], self.shape[0], *some.shape[some.ndim + channels + 1 :]]
        if bias is None:
            return some.new_zeros(shape).index_copy_(channels, rows, some)
        filled = bias.to(some.dtype).view(-1, *[1] * (-channels - 1))
        return filled.expand(shape).clone(memory_format=torch.contiguous_format).index_copy_(channels, rows, some)


def _in_whole_vectors(func: Any, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """What a pointwise function computes of x, wherever its elements lie: those of a narrow tensor and of a wide one
    get the same values, to the last bit."""
    if x.is_contiguous() and x.numel() % VECTOR == 0:
        return func(x, **kwargs)
    dense = torch.empty_like(x).copy_(x)  # laid out as the result would be
    flat = functional.pad(dense.as_strided((x.numel(),), (1,)), (0, -x.numel() % VECTOR))
    return func(flat, **kwargs).as_strided(x.shape, dense.stride())


def _is_pointwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is such a function of one plain tensor on a CPU, which it does not write to."""
    others = kwargs.keys() - {"approximate"} and kwargs != {"inplace": False}
    if func not in POINTWISE or len(args) != 1 or type(args[0]) is not Tensor or others:
        return False
    x = args[0]
    plain = x.device.type == "cpu" and x.layout is torch.strided and x.is_floating_point() and not x.requires_grad
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)


Operands = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Result:
    """A copy of what a function computed, and its operands. `versions` tell if these were written to since."""

    operands: Operands
    rest: tuple[Any, ...]
    value: Tensor
    versions: tuple[int, ...]

    @classmethod
    def of(cls, operands: Operands, rest: tuple[Any, ...], value: Tensor) -> Result:
        return cls(operands, rest, value.clone(), _versions(operands))

    def reused(self, operands: Operands, rest: tuple[Any, ...]) -> Tensor | None:
        """The value, if these operands equal the recorded ones to the last bit; else None."""
        unchanged = self.rest == rest and _versions(self.operands) == self.versions
        same = unchanged and all(a is b or _equal(a, b) for a, b in zip(self.operands, operands, strict=True))
        return self.value if same else None


def _versions(tensors: Operands) -> tuple[int, ...]:
    return tuple(t._version for t in tensors if t is not None)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


class RecordedResults(TorchFunctionMode):
    """Records what layers with these weights compute inside, by the weight's name, and what attention does.

    A second model that has much in common with the first then computes the rest alone.
    """

    def __init__(self, weights: Mapping[str, Tensor]):
        super().__init__()
        self.names = {id(weight): name for name, weight in weights.items() if weight.ndim > 1}
        self.weights = list(weights.values())  # alive, so that nothing else gets their ids
        self.results: dict[tuple[Any, str], list[Result]] = {}
        self.room = ROOM

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _MULTI_HEAD:
            with self:
                return _multi_head(*args, **(kwargs or {}))
        if _is_pointwise(func, args, kwargs or {}):
            return _in_whole_vectors(func, args[0], kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func in LAYERS and not kwargs and id(args[1]) in self.names:
            self._note(func, self.names[id(args[1])], (*args[:3], None)[:3], tuple(args[3:]), result)
        elif func is ATTENTION and (call := _attention_call(args, kwargs)) is not None:
            self._note(func, "", call[0], call[1], result)
        return result

    def _note(self, func: Any, name: str, operands: Operands, rest: tuple[Any, ...], value: Tensor) -> None:
        if value.requires_grad:  # it belongs to a graph, through which another model's derivatives would be lost
            return
        self.room -= sum(t.numel() * t.element_size() for t in (operands[0], value) if t is not None)
        if self.room > 0 and not any(t.is_inference() for t in (*operands, value) if t is not None):
            self.results.setdefault((func, name), []).append(Result.of(operands, rest, value))

    def reused(self, func: Any, name: str, operands: Operands, rest: tuple[Any, ...]) -> Tensor | None:
        """What the first call that was not asked for yet returned, if it had the same operands; else None."""
        known = self.results.get((func, name), [])
        return known.pop(0).reused(operands, rest) if known else None

    def layer(self, func: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        """The layer with the weight of this name, which computes only what is not recorded."""

        def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
            known = self.reused(func, name, (x, weight, bias), rest)
            return func(x, weight, bias, *rest) if known is None else known

        return compute

    def attention(self, operands: Operands, rest: tuple[Any, ...]) -> Tensor:
        """Attention without the heads whose values are all zero, and so is what they compute."""
        q, k, v, mask = operands
        assert q is not None and k is not None and v is not None
        if v.ndim > 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
            live = (v != 0).any(-1).any(-1).flatten(0, -2).any(0) if v.ndim > 3 else (v != 0).any(-1).any(-1)
            if 0 < int(live.sum()) < len(live):
                heads = live.nonzero().flatten()
                if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:  # one for each head
                    mask = mask.index_select(-3, heads)
                some = self.attention((*(t.index_select(-3, heads) for t in (q, k, v)), mask), rest)
                return some.new_zeros(*q.shape[:-1], v.shape[-1]).index_copy_(-3, heads, some)
        known = self.reused(ATTENTION, "", operands, rest)
        return ATTENTION(q, k, v, mask, *rest[:2], **dict(rest[2:])) if known is None else known


def _attention_call(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Operands, tuple[Any, ...]] | None:
    """The tensors of a call (query, key, value and mask), and the rest. None, if it is called in another way."""
    named = dict(kwargs or {})
    if len(args) < 3:
        return None
    mask = args[3] if len(args) > 3 else named.pop("attn_mask", None)
    dropout = args[4] if len(args) > 4 else named.pop("dropout_p", 0.0)
    causal = args[5] if len(args) > 5 else named.pop("is_causal", False)
    return ((*args[:3], mask), (dropout, causal, *sorted(named.items()))) if len(args) < 7 else None


class NoEmptyHeads(TorchFunctionMode):
    """Inside, attention without heads, or with heads of no width, raises.

    A forward that slices what was cut by sizes that did not follow may ask for that, and the kernels of some versions
    of torch divide by the number of heads: that ends the process, and no trial could go on.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTENTIONS:
            named = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
            for name in ("query", "key", "value"):
                _refuse_empty_heads(name, named[name])
        return func(*args, **(kwargs or {}))


_ATTENTIONS = {ATTENTION, torch.ops.aten.scaled_dot_product_attention.default}


def _refuse_empty_heads(name: str, tensor: Tensor) -> None:
    if not tensor.shape[-1] or (tensor.ndim > 3 and not tensor.shape[-3]):
        raise HapError(f"the {name} of an attention has shape {tuple(tensor.shape)}; expected at least one head")


class SkippingZeros(TorchFunctionMode):
    """Inside, functions get the real tensors in place of placeholders, and layers with such weights skip the zeros.

    What is `recorded` is not computed again.
    """

    def __init__(self, sparse: Mapping[nn.Parameter, SparseWeight], recorded: RecordedResults | None = None):
        super().__init__()
        self.recorded = recorded or RecordedResults({})
        self.sparse = {id(placeholder): tensor for placeholder, tensor in sparse.items()}
        self.placeholders = list(sparse)  # alive, so that nothing else gets their ids
        self.written: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS and not kwargs and id(args[1]) in self.sparse:
            x, weight, bias = (*args[:3], None)[:3]
            sparse = self.sparse[id(weight)]
            if (result := sparse.apply(self.recorded.layer(func, sparse.name), x, bias, *args[3:])) is not None:
                return result
        elif func in LAYERS and not kwargs and id(args[1]) in self.recorded.names:
            return self.recorded.layer(func, self.recorded.names[id(args[1])])(*args)
        elif func is ATTENTION and (call := _attention_call(args, kwargs)) is not None:
            return self.recorded.attention(*call)
        elif func is _MULTI_HEAD:
            with self:
                return _multi_head(*args, **kwargs)
        elif _is_pointwise(func, args, kwargs):
            return _in_whole_vectors(func, args[0], kwargs)
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

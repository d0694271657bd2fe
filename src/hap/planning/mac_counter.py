"""Count the multiply-adds of a running model, operator by operator, and note the operators that are not counted."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

Shape = Sequence[int]


class Counter(FlopCounterMode):
    """Torch's counter with more matrix products, which also notes the operators that it passes over: `uncounted` says
    how often each of them ran, but for pure views, and those in `unknown` are or may be matrix products. An einsum that
    sums over nothing, or over an axis of length 1, is a pointwise product to torch; here it is a matrix product."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_formulas())
        self.uncounted: dict[str, int] = {}
        self.unknown: set[str] = set()
        self._einsums = _Einsums()

    def __enter__(self) -> Self:
        self._einsums.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> Any:
        left = super().__exit__(*args)
        self._einsums.__exit__(*args)
        return left

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet is torch.ops.aten.mul and self._einsums.running:
            for module in set(self.mod_tracker.parents):
                self.flop_counts[module][func_packet] += 2 * out.numel()
        elif func_packet not in self.flop_registry:
            overloads = [getattr(func_packet, name) for name in func_packet.overloads()]
            name = func_packet._qualified_op_name
            if not all(getattr(o, "is_view", False) for o in overloads) and name != "aten::detach":
                self.uncounted[name] = self.uncounted.get(name, 0) + 1
                if _may_multiply(name, (args, kwargs)):
                    self.unknown.add(name)
        return super()._count_flops(func_packet, out, args, kwargs)


class _Einsums(TorchFunctionMode):
    """Tells whether an einsum is running."""

    running = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.einsum, torch.ops.aten.einsum.default):
            return func(*args, **(kwargs or {}))
        self.running = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running = False


# ---- products that torch's counter does not know ----------------------------------------------------------------


def _product(a: Shape, b: Shape, *rest: Any) -> int:
    """Rows x inner by inner x columns, for each of a batch."""
    return math.prod(a) * b[-1]


def _grouped(a: Shape, b: Shape, *rest: Any) -> int:
    """Groups of rows, of columns or of what is summed over, each with a matrix of its own: each is used once."""
    return math.prod(a if len(a) == len(b) else a[-2:]) * b[-1]


def _of_three(a: Shape, b: Shape, c: Shape, *missing: Any) -> int:
    """What nn.Bilinear is made of: a product of three, in which the axes that one is missing are stretched."""
    stretched = []
    for shape, axes in zip((a, b, c), missing, strict=False):
        sizes = iter(shape)
        stretched.append([1 if d in axes else next(sizes) for d in range(len(shape) + len(axes))])
    return math.prod(map(max, *stretched))


def _distances(a: Shape, b: Shape, *rest: Any) -> int:
    """Between all rows of one and all rows of the other. The batch of each is broadcast to that of both."""
    return math.prod(torch.broadcast_shapes(a[:-2], b[:-2])) * a[-2] * b[-2] * a[-1]


def _recurrent(x: Shape, weights: Sequence[Shape], *rest: Any) -> int:
    """Each matrix of all layers and directions meets each step of each sequence."""
    return math.prod(x[:-1]) * sum(math.prod(w) for w in weights if len(w) == 2)


_MULTIPLY_ADDS: dict[str, Callable[..., int]] = (
    dict.fromkeys(("_int_mm", "_scaled_mm_v2"), _product)
    | dict.fromkeys(
        ("addmm_", "baddbmm_", "addbmm", "addbmm_", "_addmm_activation"), lambda to, a, b, *rest: _product(a, b)
    )
    | dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped)
    | {"transformers::grouped_mm_fallback": _grouped}  # what its experts are captured with
    | dict.fromkeys(("mv", "dot", "vdot"), lambda a, *rest: math.prod(a))
    | dict.fromkeys(("addmv", "addmv_"), lambda to, a, *rest: math.prod(a))
    | dict.fromkeys(("addr", "addr_"), lambda to, a, b, *rest: math.prod(a) * math.prod(b))
    | dict.fromkeys(("_cdist_forward", "_euclidean_dist"), _distances)
    | dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), _recurrent)
    | {"mkldnn_rnn_layer": lambda x, first, second, *rest: _recurrent(x, [first, second])}
    | {"_trilinear": _of_three}
    | {"conv_tbc": lambda x, w, bias, padding=0: (x[0] + 2 * padding - w[0] + 1) * x[1] * math.prod(w)}
)


def _operations(multiply_adds: Callable[..., int]) -> Callable[..., int]:
    """As torch's counter wants it: a multiply-add is two operations, and shapes come in place of tensors."""
    return lambda *shapes, out_shape=None, **kwargs: 2 * multiply_adds(*shapes)


def _formulas() -> dict[Any, Callable[..., int]]:
    """By operator, for those that are there: some come with a newer torch, or with a library that is not imported."""
    found = {}
    for name, multiply_adds in _MULTIPLY_ADDS.items():
        kind, _, short = name.rpartition("::")
        if operator := getattr(getattr(torch.ops, kind or "aten"), short, None):
            found[operator] = _operations(multiply_adds)
    return found


# ---- products that nobody knows -----------------------------------------------------------------------------------

_PRODUCTS = re.compile(r"(^|_)(\w*mm|mv|matmul|linear|\w*conv\w*|rnn|lstm|gru|attention|linalg|cholesky|\w*solve)(_|$)")
_NO_PRODUCTS = re.compile(r"vector_norm|cross|check_errors|powsum|_cell$|_weight$|_backward$|^_?thnn_")


def _may_multiply(name: str, given: Any) -> bool:
    """Whether an operator is a product by its name, or one that is not torch's with operands like those of a product:
    two matrices, or tensors with more axes, that are equally long along some axis."""
    kind, _, short = name.partition("::")
    if _NO_PRODUCTS.search(short):
        return False
    if kind in ("aten", "prim", "prims") or _PRODUCTS.search(short):
        return bool(_PRODUCTS.search(short))
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1]
    return any({*a.shape} & {*b.shape} - {1} for a, b in combinations(tensors, 2))

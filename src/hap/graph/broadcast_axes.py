"""Along which axes a tensor in a graph differs at all: one that is merely expanded along an axis has no say there.

A mask of padding is made for each head by `expand`, and is then seen as one axis of batch times heads and taken apart
again. So axes are followed as products of lengths, each of which the tensor differs along, or not.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hap.graph.nodes import is_pointwise, shape_of, short_name
from hap.graph.operator_families import STRUCTURAL, Trait, having

Factor = tuple[int, bool]
Axis = tuple[Factor, ...]
"""Lengths whose product is that of the axis, outer ones first, and whether the tensor differs along each."""
KEY, GIVEN = "hap.axes", "hap.given"
COPYING, EXPANDING, FILLING = having(Trait.COPIES), having(Trait.EXPANDS), having(Trait.FILLS)
SAME_ORDER = having(Trait.SAME_ORDER)


def varying_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a tensor, with 1 for axes along which it is all the same.

    Of what is `given`, such as a mask, so are axes of which a part is: samples times heads may lose heads.
    """
    sizes, given = shape_of(node), node.meta.get(GIVEN, False)
    count = all if given else any
    return tuple(n if count(own for _, own in axis) else 1 for n, axis in zip(sizes, _axes(node), strict=True))


def note_given(node: fx.Node, given: bool | None = None) -> None:
    """Note whether a node is computed from inputs and constants alone. What it is computed from is noted already."""
    node.meta[GIVEN] = given if given is not None else all(a.meta.get(GIVEN, False) for a in node.all_input_nodes)


def _differs(axis: Axis) -> bool:
    return any(own for _, own in axis)


def _axes(node: fx.Node) -> list[Axis]:
    if KEY not in node.meta:
        node.meta[KEY] = _found(node)
    return node.meta[KEY]


def _found(node: fx.Node) -> list[Axis]:
    shape = shape_of(node)
    whole = [_axis(n) for n in shape]
    name = short_name(node) if node.op == "call_function" else ""
    operands = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    if name in FILLING:
        return [_axis(n, own=False) for n in shape] if not _written_to(node) else whole
    if not operands or name == "":
        return whole
    if name in EXPANDING:
        return _combined(operands[:1], shape)
    if name in SAME_ORDER and math.prod(shape_of(operands[0])) == math.prod(shape):
        return _regrouped(_axes(operands[0]), shape) or whole
    if name in STRUCTURAL:
        return _moved(node, operands[0]) or whole
    return _combined(operands, shape) if is_pointwise(node) else whole


def _axis(size: int, own: bool = True) -> Axis:
    return ((size, own),) if size > 1 else ()


def _written_to(node: fx.Node) -> bool:
    """Whether a tensor may be filled with other values later, by itself or through a view of it."""
    names = {short_name(user) for user in node.users if user.op == "call_function"} - COPYING
    return any(name.endswith("_") or name in STRUCTURAL for name in names)


def _regrouped(before: list[Axis], shape: Sequence[int]) -> list[Axis] | None:
    """Axes of the elements in another shape; None, if lengths do not divide each other."""
    left = [factor for axis in before for factor in axis]
    found = []
    for size in shape:
        axis: list[Factor] = []
        while size > 1:
            length, own = left.pop(0)
            taken = math.gcd(size, length)
            if taken not in (size, length):
                return None
            axis.append((taken, own))
            size //= taken
            if taken < length:
                left.insert(0, (length // taken, own))
        found.append(tuple(axis))
    return found


def _moved(node: fx.Node, source: fx.Node) -> list[Axis] | None:
    """By the operator itself, on a tensor without data that has strides of zero; None, if there are none."""
    sizes, axes = shape_of(source), _axes(source)
    if all(map(_differs, (axis for axis in axes if axis))):
        return None
    short = [n if _differs(axis) else 1 for n, axis in zip(sizes, axes, strict=True)]
    probe = torch.empty(short, device="meta").expand(sizes)
    args, kwargs = fx.map_arg((node.args[1:], node.kwargs), lambda a: a.meta["val"].to("meta"))
    result: Any = node.target(probe, *args, **kwargs) if node.args[:1] == (source,) else None  # type: ignore[operator]
    if not isinstance(result, Tensor):
        return None
    return [_axis(n, result.stride(d) != 0) for d, n in enumerate(result.shape)]


def _combined(operands: list[fx.Node], shape: Sequence[int]) -> list[Axis]:
    """Of operands that are broadcast against each other, or of one that is expanded."""
    found = []
    known = [_axes(operand) for operand in operands]
    for d, size in enumerate(reversed(shape), 1):
        axes = {_simplest(axes[-d]) for axes in known if d <= len(axes)}
        differing = {axis for axis in axes if _differs(axis)}
        found.append(differing.pop() if len(differing) == 1 else _axis(size, own=len(differing) > 0))
    return found[::-1]


def _simplest(axis: Axis) -> Axis:
    """An axis with as few lengths as will do."""
    runs = itertools.groupby(axis, key=lambda factor: factor[1])
    return tuple((math.prod(n for n, _ in run), own) for own, run in runs)

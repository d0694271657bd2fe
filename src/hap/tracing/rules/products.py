"""Rules for products of activations, and so for attention: a head is what a batched product cuts as a whole."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from string import ascii_letters
from typing import Any

from torch import Tensor, fx

from hap.graph.broadcast_axes import varying_shape
from hap.graph.nodes import arguments, shape_of, short_name
from hap.tracing.context import RuleContext
from hap.tracing.label_tensors import aligned, compress, zeros
from hap.tracing.rules.einsum import spelled, weighted
from hap.tracing.rules.elementwise import Operand, merge, operand
from hap.tracing.rules.layers import transposed_linear
from hap.tracing.rules.registry import freeze_all, rule

Shape = tuple[int, ...]


def product(
    context: RuleContext, name: str, whole: Shape, left: Operand, right: Operand, scaled: bool = False
) -> Tensor:
    """Labels of a @ b: a pointwise product over (batch..., rows, columns, inner), summed over the last axis.

    `whole` is the shape of that product; the operands' shapes have 1 where these are expanded.

    Where labels vary along the inner axis and along others (head by head), the inner ones are joined: what is left
    after the sum must have one fate. Inner labels alone may go one by one, from both operands, unless the result is
    `scaled` by how many there are.
    """
    (a, a_shape), (b, b_shape) = left, right
    ndim = max(len(a_shape), len(b_shape))
    a, a_shape = aligned(a, ndim).unsqueeze(-2), (1,) * (ndim - len(a_shape)) + a_shape
    b, b_shape = aligned(b, ndim).transpose(-1, -2).unsqueeze(-3), (1,) * (ndim - len(b_shape)) + b_shape
    a_full = (*a_shape[:-1], 1, a_shape[-1])
    b_full = (*b_shape[:-2], 1, b_shape[-1], b_shape[-2])
    return _contracted(context, name, whole, [(a, a_full), (b, b_full)], 1, range(ndim - 2), scaled)


def _contracted(
    context: RuleContext,
    name: str,
    whole: Shape,
    sides: list[Operand],
    inner: int,
    batch: Container[int],
    scaled: bool = False,
) -> Tensor:
    """Labels of a pointwise product that is summed over its last `inner` axes: see `product`.

    What it sees whole, such as a head, is one of several along the axes in `batch`, which both operands and the result
    have, if nothing varies along others; or all that is summed over for each of several.
    """
    grid, _ = merge(context, name, sides)
    context.activation_product(grid, math.prod(s for s, g in zip(whole, grid.shape, strict=True) if g == 1))
    context.sees_whole(grid, [d for d in range(grid.ndim) if d not in batch])
    outer = grid.ndim - inner
    summed = math.prod(grid.shape[outer:])
    if summed > 1:
        context.sized(grid)
        if grid.numel() == summed:
            if scaled:
                context.freeze(grid, name, "scales by the width of its heads")
            return zeros(outer)
        grid = grid.reshape(*grid.shape[:outer], summed)
        context.join(grid.numpy(), grid[..., :1].numpy())
        grid = grid[..., :1]
        context.sees_whole(grid, [])
    return compress(grid.reshape(grid.shape[:outer]))


@rule("einsum")
def einsum(context: RuleContext, node: fx.Node) -> Any:
    """Two tensors, each with axes of different names."""
    equation, operands = node.args[:2]
    assert isinstance(equation, str) and isinstance(operands, list | tuple)
    names, result = spelled(equation, [len(shape_of(x)) for x in operands])  # type: ignore[arg-type]
    if len(names) != 2 or not all(len(set(term)) == len(term) for term in [*names, result]):
        return freeze_all(context, node, "an equation that is not understood")
    return _by_letters(context, node, operands, names, result)  # type: ignore[arg-type]


@rule("tensordot")
def tensordot(context: RuleContext, node: fx.Node) -> Any:
    """A product summed over some axes of both."""
    a, b, *dims = node.args[:4]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    first = ascii_letters[: len(shape_of(a))]
    second = [*ascii_letters[len(first) :][: len(shape_of(b))]]
    for i, j in zip(*dims, strict=True):
        second[j] = first[i]
    result = "".join(c for c in [*first, *second] if (c in first) != (c in second))
    return _by_letters(context, node, (a, b), [first, "".join(second)], result)


def _by_letters(context: RuleContext, node: fx.Node, operands: Sequence[fx.Node], names: list[str], result: str) -> Any:
    """A product of two over all names of axes, summed over those that go. One may be the weight of a layer."""
    (a, b), (first, second) = (context.weight_view(x) for x in operands), names
    if a is None and b is not None:
        return weighted(context, node, operands[0], first, b, second, result)
    if a is not None and b is None:
        return weighted(context, node, operands[1], second, a, first, result)
    inner = [letter for letter in dict.fromkeys("".join(names)) if letter not in result]
    letters = [*result, *inner]
    context.multiplies(node, *operands)
    sides: list[Operand] = []
    whole: dict[str, int] = {}
    for term, x in zip(names, operands, strict=True):
        labels, sizes = context.labels(x), dict(zip(term, varying_shape(x), strict=True))
        whole |= {c: max(size, whole.get(c, 1)) for c, size in zip(term, shape_of(x), strict=True)}
        order = [letter for letter in letters if letter in sizes]
        labels = labels.permute([term.index(letter) for letter in order])
        short = dict(zip(order, labels.shape, strict=True))
        sides.append((labels.reshape([short.get(c, 1) for c in letters]), tuple(sizes.get(c, 1) for c in letters)))
    batch = [d for d, letter in enumerate(result) if all(letter in term for term in names)]
    return _contracted(context, short_name(node), tuple(whole[c] for c in letters), sides, len(inner), batch)


@rule("matmul")
def matmul(context: RuleContext, node: fx.Node) -> Any:
    a, b = node.args[:2]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    if min(len(shape_of(a)), len(shape_of(b))) < 2:
        return freeze_all(context, node)
    if (weight := context.weight_view(b)) is not None:
        if len(shape_of(b)) == 2:
            return transposed_linear(context, node, a, weight)
        if shape_of(a)[:-2] == shape_of(b)[:-2]:  # a weight for each of several, such as experts
            batch = ascii_letters[: len(shape_of(a)) - 2]
            return weighted(context, node, a, f"{batch}XY", weight, f"{batch}YZ", f"{batch}XZ")
    context.multiplies(node, a, b)
    whole = (*shape_of(node), shape_of(a)[-1])
    return product(context, "matmul", whole, operand(context, a), operand(context, b))


@rule("baddbmm")
def baddbmm(context: RuleContext, node: fx.Node) -> Any:
    """bias + a @ b, batch by batch."""
    bias, a, b = node.args[:3]
    assert isinstance(bias, fx.Node) and isinstance(a, fx.Node) and isinstance(b, fx.Node)
    context.multiplies(node, a, b)
    whole = (*shape_of(node), shape_of(a)[-1])
    labels = product(context, "baddbmm", whole, operand(context, a), operand(context, b))
    sides = [(labels, shape_of(node)), operand(context, bias, labels.ndim)]
    return merge(context, "baddbmm", sides)[0]


@rule("attention")
def attention(context: RuleContext, node: fx.Node) -> Any:
    given = arguments(node)
    q, k, v = (given[name] for name in ("query", "key", "value"))
    context.multiplies(node, q, k)
    context.multiplies(node, k, v)
    labels = {x: context.labels(x) for x in (q, k, v)}
    shapes, (*batch, width) = {x: shape_of(x) for x in (q, k, v)}, shape_of(node)
    inner, keys = shapes[q][-1], shapes[k][-2]
    if given.get("enable_gqa") and shapes[q][-3] != shapes[k][-3]:  # several query heads share a key and a value
        for x in {k, v}:
            repeat = shapes[q][-3] // shapes[x][-3]
            if labels[x].shape[-3] > 1:
                labels[x] = labels[x].repeat_interleave(repeat, -3)
            shapes[x] = (*shapes[x][:-3], shapes[q][-3], *shapes[x][-2:])
    else:
        shapes = {x: varying_shape(x) for x in (q, k, v)}
    scaled = given.get("scale") is None
    whole = (*batch, keys, inner)
    rotated = labels[k].transpose(-1, -2), (*shapes[k][:-2], shapes[k][-1], shapes[k][-2])
    scores = product(context, "attention", whole, (labels[q], shapes[q]), rotated, scaled)
    shape: Shape = (*batch, keys)
    if isinstance(mask := given.get("attn_mask"), fx.Node):
        scores, _ = merge(context, "attention", [(scores, shape), operand(context, mask, len(shape))])
    if scores.shape[-1] > 1:
        context.freeze(scores, "attention", "normalises over an axis that would be cut")
        scores = zeros(len(shape))
    return product(context, "attention", (*batch, width, keys), (scores, shape), (labels[v], shapes[v]))

"""Rules for products of activations, and so for attention: a head is what a batched product cuts as a whole.

Each is seen as an einsum: letters name the axes. One operand may be a weight that a forward multiplies in itself.
"""

import math
from collections.abc import Sequence
from string import ascii_letters, ascii_lowercase
from typing import Any

import numpy as np
from torch import Tensor, fx

from hap.graph.broadcast_axes import varying_shape
from hap.graph.nodes import arguments, shape_of, short_name
from hap.tracing.context import RuleContext, join_along, labels_of_axis
from hap.tracing.labels import compress, labels_on_axis, zeros
from hap.tracing.rules.elementwise import merge, operand
from hap.tracing.rules.layers import linear_layer
from hap.tracing.rules.registry import freeze_all, rule
from hap.tracing.weight_views import View

Side = tuple[str, Tensor, tuple[int, ...]]
"""A letter for each axis of an operand, its labels, and its shape with 1 along axes where it is merely expanded."""


def product(
    context: RuleContext, name: str, sizes: dict[str, int], sides: Sequence[Side], result: str, scaled: bool = False
) -> Tensor:
    """Labels of a pointwise product over all letters, which is summed over those that the result does not have.

    Where labels vary along what is summed over and along others (head by head), those along the former are joined: what
    is left after the sum must have one fate. They alone may go one by one, from both operands, unless the result is
    `scaled` by how many there are.

    What it sees whole, such as a head, is one of several along axes that both operands and the result have, if nothing
    varies along others; or all that is summed over for each of several.
    """
    terms = [term for term, _, _ in sides]
    letters = [*dict.fromkeys(result + "".join(terms))]
    operands = []
    for term, labels, shape in sides:
        labels = labels.permute([term.index(c) for c in letters if c in term])
        labels = labels[tuple(slice(None) if c in term else None for c in letters)]
        operands.append((labels, tuple(shape[term.index(c)] if c in term else 1 for c in letters)))
    grid, _ = merge(context, name, operands)
    context.activation_product(grid, math.prod(sizes[c] for c, n in zip(letters, grid.shape, strict=True) if n == 1))
    apart = [d for d, c in enumerate(letters) if not all(c in term for term in [*terms, result])]
    context.flow.seen_whole.append((grid.numpy(), apart))
    outer = grid.shape[: len(result)]
    summed = math.prod(grid.shape[len(result) :])
    if summed > 1:
        context.sized(grid)
        if grid.numel() == summed:
            if scaled:
                context.freeze(grid, name, "scales by the width of its heads")
            return zeros(len(result))
        grid = grid.reshape(*outer, summed)
        context.join(grid.numpy(), grid[..., :1].numpy())
        grid = grid[..., :1]
        context.flow.seen_whole.append((grid.numpy(), []))
    return compress(grid.reshape(outer))


@rule("einsum")
def einsum(context: RuleContext, node: fx.Node) -> Any:
    """Two tensors, each with axes of different names."""
    equation, operands, *_ = arguments(node).values()
    terms, result = spelled(equation, [len(shape_of(x)) for x in operands])
    if len(terms) != 2 or not all(len(set(term)) == len(term) for term in [*terms, result]):
        return freeze_all(context, node, "an equation that is not understood")
    return _by_letters(context, node, operands, terms, result)


@rule("tensordot")
def tensordot(context: RuleContext, node: fx.Node) -> Any:
    """A product summed over some axes of both."""
    a, b, *dims = arguments(node).values()
    first = ascii_letters[: len(shape_of(a))]
    second = [*ascii_letters[len(first) :][: len(shape_of(b))]]
    for i, j in zip(*dims, strict=True):
        second[j] = first[i]
    result = "".join(c for c in [*first, *second] if (c in first) != (c in second))
    return _by_letters(context, node, (a, b), [first, "".join(second)], result)


def _by_letters(
    context: RuleContext, node: fx.Node, operands: Sequence[fx.Node], terms: Sequence[str], result: str
) -> Any:
    """A product of two over all names of axes, summed over those that go. One may be the weight of a layer."""
    (a, b), (first, second) = (context.weight_view(x) for x in operands), terms
    if a is None and b is not None:
        return weighted(context, node, operands[0], first, b, second, result)
    if a is not None and b is None:
        return weighted(context, node, operands[1], second, a, first, result)
    context.multiplies(node, *operands)
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        sizes |= {c: max(size, sizes.get(c, 1)) for c, size in zip(term, shape_of(x), strict=True)}
    sides = [(term, context.labels(x), varying_shape(x)) for term, x in zip(terms, operands, strict=True)]
    return product(context, short_name(node), sizes, sides, result)


@rule("matmul")
def matmul(context: RuleContext, node: fx.Node) -> Any:
    a, b, *_ = arguments(node).values()
    if min(len(shape_of(a)), len(shape_of(b))) < 2:
        return freeze_all(context, node)
    if (weight := context.weight_view(b)) is not None:
        if len(shape_of(b)) == 2:
            return linear_layer(context, node, a, weight, 0, None)
        if shape_of(a)[:-2] == shape_of(b)[:-2]:  # a weight for each of several, such as experts
            batch = ascii_lowercase[: len(shape_of(a)) - 2]
            return weighted(context, node, a, f"{batch}QD", weight, f"{batch}DV", f"{batch}QV")
    return _batched(context, "matmul", node, a, b)


@rule("baddbmm")
def baddbmm(context: RuleContext, node: fx.Node) -> Any:
    """bias + a @ b, batch by batch."""
    bias, a, b, *_ = arguments(node).values()
    labels = _batched(context, "baddbmm", node, a, b)
    return merge(context, "baddbmm", [(labels, shape_of(node)), operand(context, bias, labels.ndim)])[0]


def _batched(context: RuleContext, name: str, node: fx.Node, a: fx.Node, b: fx.Node) -> Tensor:
    """a @ b, batch by batch."""
    context.multiplies(node, a, b)
    ndim = len(shape_of(node))
    batch = ascii_lowercase[: ndim - 2]
    sizes = dict(zip(f"{batch}QV", shape_of(node), strict=True)) | {"D": shape_of(a)[-1]}
    sides = [(f"{batch}QD", *operand(context, a, ndim)), (f"{batch}DV", *operand(context, b, ndim))]
    return product(context, name, sizes, sides, f"{batch}QV")


@rule("attention")
def attention(context: RuleContext, node: fx.Node) -> Any:
    given = arguments(node)
    q, k, v = (given[name] for name in ("query", "key", "value"))
    context.multiplies(node, q, k)
    context.multiplies(node, k, v)
    shape, keys, heads = shape_of(node), shape_of(k)[-2], shape_of(q)[-3:-2]
    batch = ascii_lowercase[: len(shape) - 2]
    sizes = dict(zip(f"{batch}QV", shape, strict=True)) | {"K": keys, "D": shape_of(q)[-1]}
    sides = []
    for x, axes in ((q, "QD"), (k, "KD"), (v, "KV")):
        labels, own = operand(context, x, len(shape))
        if given.get("enable_gqa") and heads != shape_of(k)[-3:-2]:  # several query heads share a key and a value
            own = (*shape_of(x)[:-3], *heads, *shape_of(x)[-2:])
            if labels.shape[-3] > 1:
                labels = labels.repeat_interleave(heads[0] // labels.shape[-3], -3)
        sides.append((batch + axes, labels, own))
    scores = product(context, "attention", sizes, sides[:2], f"{batch}QK", scaled=given.get("scale") is None)
    seen = (*shape[:-1], keys)
    if isinstance(mask := given.get("attn_mask"), fx.Node):
        scores, _ = merge(context, "attention", [(scores, seen), operand(context, mask, len(seen))])
    if scores.shape[-1] > 1:
        context.freeze(scores, "attention", "normalises over an axis that would be cut")
        scores = zeros(len(seen))
    return product(context, "attention", sizes, [(f"{batch}QK", scores, seen), sides[2]], f"{batch}QV")


# ---- weights that a forward multiplies in itself --------------------------------------------------------------------


def spelled(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """The letters of operands with so many axes each, and of the result: dots written out, the result too."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms, spare = left.split(","), [c for c in ascii_letters if c not in equation]
    hidden = [ndim - len(term) + 3 if "..." in term else 0 for term, ndim in zip(terms, ndims, strict=True)]
    dots = "".join(spare[: max(hidden)])
    terms = [term.replace("...", dots[len(dots) - n :]) for term, n in zip(terms, hidden, strict=True)]
    if not arrow:
        result = "..." + "".join(sorted(c for c in {*left} - {*".,"} if left.count(c) == 1))
    return terms, result.replace("...", dots)


def weighted(context: RuleContext, node: fx.Node, x: fx.Node, axes: str, view: View, term: str, result: str) -> Tensor:
    """Labels of einsum("axes,term->result", x, weight): a layer whose weight may have several axes of either kind.

    Of those that it reads, and of those that it computes, one can be cut: the first.
    """
    own = {c: len(index) for c, index in zip(term, view.index, strict=True)}
    sizes = dict(zip(axes, shape_of(x), strict=True)) | own
    if any(own.get(c, size) != size for c, size in zip(axes, shape_of(x), strict=True)):
        return freeze_all(context, node, "stretches an axis of length one")
    steps = {c: size for c, size in sizes.items() if c in term + result}  # an axis of x alone is summed over first
    cut = [c for c, size in zip(axes, context.labels(x).shape, strict=True) if size > 1]
    labels = {c: np.zeros(size, dtype=np.int64) for c, size in sizes.items()}
    passing, made = [c for c in cut if c in result], [c for c in result if c not in axes]
    if len(passing) > 1 or any(c not in term + result for c in cut) or any(c not in axes + result for c in term):
        return freeze_all(context, node, "an equation that is not understood")
    if passing:
        summed = [axes.index(c) for c in cut if c not in passing]  # what varies elsewhere, such as heads, passes whole
        labels[passing[0]] = join_along(context, context.labels(x), summed).flatten().numpy()
        context.activation_product(labels[passing[0]], math.prod(steps.values()) // sizes[passing[0]])
    else:
        if cut:
            labels[cut[0]] = labels_of_axis(context, x, axes.index(cut[0]))
        context.contraction(node, view, math.prod(size for c, size in steps.items() if c not in term))
    for c in (c for c in term if c in axes):
        context.tie_inputs(view, term.index(c), labels[c])
    if made:
        labels[made[0]] = context.outputs(view, term.index(made[0]))
    if made and passing:
        context.freeze(labels[made[0]], view.name, "works along an axis that is not cut")
    for axis in map(term.index, made[1:]):
        others = context.axis(view.name, view.dims[axis])[view.index[axis]]
        context.join(others, np.zeros_like(others))
    way = next(iter(passing or made), None)
    return zeros(len(result)) if way is None else labels_on_axis(labels[way], len(result), result.index(way))

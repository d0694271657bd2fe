"""Rules for products of activations, and so for attention: a head is what a batched product cuts as a whole."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from hap.graph.broadcast_axes import varying_shape
from hap.graph.nodes import arguments, shape_of, short_name
from hap.graph.operator_families import PRODUCTS
from hap.groups.components import distinct
from hap.groups.types import ActivationMacs, Ints
from hap.tracing import weight_views
from hap.tracing.rules import registry
from hap.tracing.rules.einsum import spelled, weighted

if TYPE_CHECKING:
    from hap.tracing.trace import Tracer

Shape = tuple[int, ...]


def product(
    tracer: Tracer, name: str, whole: Shape, a: Tensor, a_shape: Shape, b: Tensor, b_shape: Shape, scaled: bool = False
) -> Tensor:
    """Labels of a @ b: a pointwise product over (batch..., rows, columns, inner), summed over the last axis.

    `whole` is the shape of that product; the operands' shapes have 1 where these are expanded.

    Where labels vary along the inner axis and along others (head by head), the inner ones are joined: what is left
    after the sum must have one fate. Inner labels alone may go one by one, from both operands, unless the result is
    `scaled` by how many there are.
    """
    ndim = max(len(a_shape), len(b_shape))
    a, a_shape = registry.aligned(a, ndim).unsqueeze(-2), (1,) * (ndim - len(a_shape)) + a_shape
    b, b_shape = registry.aligned(b, ndim).transpose(-1, -2).unsqueeze(-3), (1,) * (ndim - len(b_shape)) + b_shape
    a_full = (*a_shape[:-1], 1, a_shape[-1])
    b_full = (*b_shape[:-2], 1, b_shape[-1], b_shape[-2])
    return _contracted(tracer, name, whole, [(a, a_full), (b, b_full)], 1, range(ndim - 2), scaled)


def _contracted(
    tracer: Tracer, name: str, whole: Shape, sides: list[tuple[Tensor, Shape]], inner: int, batch: Container[int],
    scaled: bool = False,
) -> Tensor:  # fmt: skip
    """Labels of a pointwise product that is summed over its last `inner` axes: see `product`.

    What it sees whole, such as a head, is one of several along the axes in `batch`, which both operands and the result
    have, if nothing varies along others; or all that is summed over for each of several.
    """
    grid, _ = registry.merge(tracer, name, sides)
    tracer.products.append(
        ActivationMacs(grid.flatten().numpy(), math.prod(s for s, g in zip(whole, grid.shape, strict=True) if g == 1))
    )
    tracer.whole.append((grid.numpy(), [d for d in range(grid.ndim) if d not in batch]))
    outer = grid.ndim - inner
    summed = math.prod(grid.shape[outer:])
    if summed > 1:
        tracer.sized.append(distinct(grid))
        if grid.numel() == summed:
            if scaled:
                tracer.freeze(grid, name, "scales by the width of its heads")
            return torch.zeros([1] * outer, dtype=torch.int64)
        grid = grid.reshape(*grid.shape[:outer], summed)
        tracer.join(grid.numpy(), grid[..., :1].numpy())
        grid = grid[..., :1]
        tracer.whole.append((grid.numpy(), []))
    return registry.compress(grid.reshape(grid.shape[:outer]))


def _meet(tracer: Tracer, node: fx.Node, *operands: fx.Node) -> None:
    """A product of what layers compute, and not of activations with a constant, is what an attention is made of."""
    made = [tracer.sources.get(x, frozenset()) for x in operands]
    tracer.mixes[node] = all(layers and layers <= tracer.layers.keys() for layers in made)
    if all(made):
        tracer.met += [distinct(tracer.labels(x)) for x in operands]


def read_from_products(tracer: Tracer) -> list[Ints]:
    """The labels of layers that read a product of what other layers compute, such as an attention's output layer."""
    return [
        distinct(labels)
        for node, labels in tracer.layers.items()
        if isinstance(labels, Tensor) and _reads_product(tracer, node)
    ]


def _reads_product(tracer: Tracer, layer: fx.Node) -> bool:
    """Whether there is such a product before a layer, with no other layer, sum of branches or product in between."""
    seen, todo = {layer}, list(layer.all_input_nodes)
    while todo:
        node = todo.pop()
        if tracer.mixes.get(node):
            return True
        if node not in seen | tracer.mixes.keys() and tracer.sources.get(node, {node}) not in ({node}, set()):
            todo += node.all_input_nodes
        seen.add(node)
    return False


@registry.rule("einsum")
def einsum(tracer: Tracer, node: fx.Node) -> Any:
    """Two tensors, each with axes of different names."""
    equation, operands = node.args[:2]
    assert isinstance(equation, str) and isinstance(operands, list | tuple)
    names, result = spelled(equation, [len(shape_of(x)) for x in operands])  # type: ignore[arg-type]
    if len(names) != 2 or not all(len(set(term)) == len(term) for term in [*names, result]):
        return registry.freeze_all(tracer, node, "an equation that is not understood")
    return _by_letters(tracer, node, operands, names, result)  # type: ignore[arg-type]


@registry.rule("tensordot")
def tensordot(tracer: Tracer, node: fx.Node) -> Any:
    """A product summed over some axes of both."""
    a, b, *dims = node.args[:4]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    first = ascii_letters[: len(shape_of(a))]
    second = [*ascii_letters[len(first) :][: len(shape_of(b))]]
    for i, j in zip(*dims, strict=True):
        second[j] = first[i]
    result = "".join(c for c in [*first, *second] if (c in first) != (c in second))
    return _by_letters(tracer, node, (a, b), [first, "".join(second)], result)


def _by_letters(tracer: Tracer, node: fx.Node, operands: Sequence[fx.Node], names: list[str], result: str) -> Any:
    """A product of two over all names of axes, summed over those that go. One may be the weight of a layer."""
    (a, b), (first, second) = (weight_views.view_of(tracer, x) for x in operands), names
    if a is None and b is not None:
        return weighted(tracer, node, operands[0], first, b, second, result)
    if a is not None and b is None:
        return weighted(tracer, node, operands[1], second, a, first, result)
    inner = [letter for letter in dict.fromkeys("".join(names)) if letter not in result]
    _meet(tracer, node, *operands)
    sides: list[tuple[Tensor, Shape]] = []
    whole: dict[str, int] = {}
    for term, x in zip(names, operands, strict=True):
        labels, sizes = tracer.labels(x), dict(zip(term, varying_shape(x), strict=True))
        whole |= {c: max(size, whole.get(c, 1)) for c, size in zip(term, shape_of(x), strict=True)}
        order = [letter for letter in [*result, *inner] if letter in sizes]
        labels = labels.permute([term.index(letter) for letter in order])
        short = dict(zip(order, labels.shape, strict=True))
        sides.append(
            (labels.reshape([short.get(c, 1) for c in [*result, *inner]]),
             tuple(sizes.get(c, 1) for c in [*result, *inner]))
        )  # fmt: skip
    batch = [d for d, letter in enumerate(result) if all(letter in term for term in names)]
    name = short_name(node)
    return _contracted(tracer, name, tuple(whole[c] for c in [*result, *inner]), sides, len(inner), batch)


@registry.rule(*PRODUCTS)
def matmul(tracer: Tracer, node: fx.Node) -> Any:
    a, b = node.args[:2]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    if min(len(shape_of(a)), len(shape_of(b))) < 2:
        return registry.freeze_all(tracer, node)
    if (weight := weight_views.view_of(tracer, b)) is not None:
        if len(shape_of(b)) == 2:
            return _transposed_linear(tracer, node, a, weight)
        if shape_of(a)[:-2] == shape_of(b)[:-2]:  # a weight for each of several, such as experts
            batch = ascii_letters[: len(shape_of(a)) - 2]
            return weighted(tracer, node, a, f"{batch}XY", weight, f"{batch}YZ", f"{batch}XZ")
    _meet(tracer, node, a, b)
    whole = (*shape_of(node), shape_of(a)[-1])
    return product(tracer, "matmul", whole, tracer.labels(a), varying_shape(a), tracer.labels(b), varying_shape(b))


@registry.rule("baddbmm")
def baddbmm(tracer: Tracer, node: fx.Node) -> Any:
    """bias + a @ b, batch by batch."""
    bias, a, b = node.args[:3]
    assert isinstance(bias, fx.Node) and isinstance(a, fx.Node) and isinstance(b, fx.Node)
    _meet(tracer, node, a, b)
    whole = (*shape_of(node), shape_of(a)[-1])
    labels = product(tracer, "baddbmm", whole, tracer.labels(a), varying_shape(a), tracer.labels(b), varying_shape(b))
    given = (1,) * (labels.ndim - len(shape_of(bias))) + varying_shape(bias)
    sides = [(labels, shape_of(node)), (registry.aligned(tracer.labels(bias), labels.ndim), given)]
    return registry.merge(tracer, "baddbmm", sides)[0]


@registry.rule("addmm")
def addmm(tracer: Tracer, node: fx.Node) -> Any:
    """bias + x @ W with the weight as a parameter, as in GPT-2's layers."""
    bias, x, weight = node.args[:3]
    assert isinstance(x, fx.Node)
    if (view := weight_views.view_of(tracer, weight)) is None:
        return registry.freeze_all(tracer, node, registry.COMPUTED)
    labels = _transposed_linear(tracer, node, x, view)
    registry.tie_bias(tracer, [bias], labels.flatten().numpy())
    return labels


def _transposed_linear(tracer: Tracer, node: fx.Node, x: fx.Node, weight: weight_views.View) -> Tensor:
    """x @ W: a linear layer with its weight transposed."""
    weight_views.tie_inputs(tracer, weight, 0, registry.labels_of_axis(tracer, x, -1))
    tracer.contraction(node, weight, math.prod(shape_of(x)[:-1]))
    return registry.labels_on_axis(weight_views.outputs(tracer, weight, 1), node.meta["val"].ndim, -1)


@registry.rule("_assert_tensor_metadata")
def assertion(tracer: Tracer, node: fx.Node) -> None:
    """Says something of a tensor and leaves it alone."""


@registry.rule("scaled_dot_product_attention")
def attention(tracer: Tracer, node: fx.Node) -> Any:
    given = arguments(node)
    q, k, v = (given[name] for name in ("query", "key", "value"))
    _meet(tracer, node, q, k)
    _meet(tracer, node, k, v)
    labels = {x: tracer.labels(x) for x in (q, k, v)}
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
    turned = (*shapes[k][:-2], shapes[k][-1], shapes[k][-2])
    scaled = given.get("scale") is None
    whole = (*batch, keys, inner)
    scores = product(tracer, "attention", whole, labels[q], shapes[q], labels[k].transpose(-1, -2), turned, scaled)
    shape: Shape = (*batch, keys)
    if isinstance(mask := given.get("attn_mask"), fx.Node):
        bias = registry.aligned(tracer.labels(mask), len(shape))
        full = (1,) * (len(shape) - len(shape_of(mask))) + varying_shape(mask)
        scores, _ = registry.merge(tracer, "attention", [(scores, shape), (bias, full)])
    if scores.shape[-1] > 1:
        tracer.freeze(scores, "attention", "normalises over an axis that would be cut")
        scores = torch.zeros([1] * len(shape), dtype=torch.int64)
    return product(tracer, "attention", (*batch, width, keys), scores, shape, labels[v], shapes[v])


@registry.rule("index")
def index(tracer: Tracer, node: fx.Node) -> Any:
    """x[..., i, ...] with one tensor of positions: fine along axes that are not cut, such as a table's entries."""
    source, places = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(places, list | tuple)
    dims = [d for d, place in enumerate(places) if place is not None]
    if len(dims) != 1 or not isinstance(places[dims[0]], fx.Node):
        return registry.freeze_all(tracer, node)
    if tracer.parameter(source) is None and (labels := tracer.labels(source)).shape[dims[0]] > 1:
        return _picked(tracer, node, labels, dims[0], tracer.index.constant(places[dims[0]]))
    return _looked_up(tracer, node, source, dims[0])


def _picked(tracer: Tracer, node: fx.Node, labels: Tensor, dim: int, places: Tensor | None) -> Any:
    """x[..., [-2], ...] along an axis that is cut, at places that the code says.

    They stay right if all stays that they are counted past: what comes before them, or after those from the end.
    """
    if places is None or places.dtype != torch.int64 or not places.numel():
        return registry.freeze_all(tracer, node, "looks up along an axis that would be cut")
    before, after = max(int(places.max()) + 1, 0), max(-int(places.min()), 0)
    ends = labels.narrow(dim, 0, before), labels.narrow(dim, labels.shape[dim] - after, after)
    tracer.counted.append((labels.numpy(), torch.cat(ends, dim).numpy(), dim))
    picked = registry.compress(labels[(slice(None),) * dim + (places,)])
    tracer.shaped.append((tracer.module(node), picked, None))
    return picked


@registry.rule("gather")
def gather(tracer: Tracer, node: fx.Node) -> Any:
    """Picks along one axis, each row for itself: other axes pass, if the picked ones are all of theirs."""
    source, dim = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    labels, shape = tracer.labels(source), list(shape_of(source))
    place = dim % max(labels.ndim, 1)
    same = all(a == b for d, (a, b) in enumerate(zip(shape, shape_of(node), strict=True)) if d != place)
    if not same or labels.shape[place] > 1:
        return registry.freeze_all(tracer, node, "picks along an axis that would be cut")
    tracer.sized.append(distinct(labels))
    return labels


@registry.rule("embedding")
def embedding(tracer: Tracer, node: fx.Node) -> Any:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return _looked_up(tracer, node, source, 0)


def _looked_up(tracer: Tracer, node: fx.Node, source: fx.Node, dim: int) -> Any:
    """Labels of a result in which axis `dim` of the source is replaced by the axes of the positions looked up."""
    shape, more = shape_of(source), node.meta["val"].ndim - len(shape_of(source)) + 1
    name = tracer.parameter(source)
    long = [d for d, size in enumerate(shape) if size > 1 and d != dim]
    if name is not None and len(long) == 1:
        labels = registry.labels_on_axis(tracer.axis(name, long[0]), len(shape), long[0])
    else:
        labels = tracer.labels(source)
    if labels.shape[dim] > 1:
        return registry.freeze_all(tracer, node, "looks up along an axis that would be cut")
    return labels.reshape(*labels.shape[:dim], *(1,) * more, *labels.shape[dim + 1 :])

"""Weights that a layer does not use as they are stored: parts and transposes of a parameter, and computed ones.

`find_views` goes through a graph once, before any rule runs; `RuleContext.weight_view` tells rules what it found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx

from hap.graph.index import GraphIndex
from hap.graph.nodes import arguments, is_pointwise, shape_of, short_name
from hap.graph.operator_families import CONVOLUTIONS, PRODUCTS, TRANSPOSED, Trait, having
from hap.groups.types import Ints
from hap.tracing.labels import LabelStore, labels_on_axis, long_axes

UNCHANGED = having(Trait.UNCHANGED)
MOVING = UNCHANGED | having(Trait.TAKES_PARTS)
WEIGHT_ARGUMENT = {"linear": 1, "addmm": 2} | dict.fromkeys(CONVOLUTIONS | TRANSPOSED | PRODUCTS, 1)
"""Which argument of an operator is the weight."""


@dataclass(frozen=True)
class View:
    """A parameter as a layer sees it: axis i holds the indices `index[i]` of the parameter's axis `dims[i]`.

    `spans` says that the values of a row depend on all of that row, as in a standardised weight.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    index: tuple[Ints, ...]
    spans: bool = False

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], spans: bool = False) -> View:
        """All of a parameter, as it is stored."""
        return cls(name, shape, tuple(range(len(shape))), tuple(np.arange(size) for size in shape), spans)

    @property
    def whole(self) -> bool:
        """Whether this is the parameter as it is stored."""
        straight = self.dims == tuple(range(len(self.shape)))
        return straight and all(np.array_equal(x, np.arange(n)) for x, n in zip(self.index, self.shape, strict=True))


def find_views(index: GraphIndex, store: LabelStore) -> dict[fx.Node, Any]:
    """Views by the nodes that make them, for all nodes whose every use is as a layer's weight or on the way to one: a
    list for several results, None for nodes that are no views of one parameter."""
    graph = index.program.graph
    pure = set(index.parameters)
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr") and pure.issuperset(node.all_input_nodes):
            pure.add(node)
    weighing: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        used = node.op == "call_function" and node in pure and node.users
        if used and all(user in weighing or _is_weight(user, node) for user in node.users):
            weighing.add(node)
    views: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in weighing:
            views[node] = _moved(index, node, views)
            layers = [user for user in node.users if user not in weighing]
            if layers and not isinstance(views[node], View):
                views[node] = _computed(index, store, node, layers)
    return views


def _is_weight(layer: fx.Node, node: fx.Node) -> bool:
    """Whether the layer uses the node as its weight, and as nothing else."""
    at = WEIGHT_ARGUMENT.get(short_name(layer)) if layer.op == "call_function" else None
    return at is not None and [i for i, a in enumerate(layer.args) if a is node] == [at]


def _moved(index: GraphIndex, node: fx.Node, views: dict[fx.Node, Any]) -> Any:
    """The view (or list of views) that an operator makes which only moves elements; None if it does more."""
    name, source = short_name(node), next(iter(node.all_input_nodes), None)
    parameter = index.parameter(source)
    view = views.get(source) if parameter is None else View.of(parameter, index.shapes[parameter])  # type: ignore[arg-type]
    if name == "getitem":
        return view[int(node.args[1])] if isinstance(view, list) else None  # type: ignore[arg-type]
    if not isinstance(view, View) or name not in MOVING:
        return None
    if name in UNCHANGED:
        return view
    shape = tuple(len(x) for x in view.index)
    places = [labels_on_axis(x, len(shape), d).expand(shape) for d, x in enumerate(view.index)]
    results = [node.target(place, *node.args[1:], **node.kwargs) for place in places]  # type: ignore[operator]
    if isinstance(results[0], list | tuple):
        return [_read(view, parts) for parts in zip(*results, strict=True)]
    return _read(view, results)


def _read(view: View, places: Sequence[Tensor]) -> View | None:
    """The view that has these places in the one it was made from: a stride of zero tells where they do not vary."""
    found: dict[int, tuple[int, Ints]] = {}
    ndim = places[0].ndim
    for dim, place in zip(view.dims, places, strict=True):
        for axis in (i for i in range(ndim) if place.stride(i) and place.shape[i] > 1):
            if axis in found:
                return None
            found[axis] = (dim, place[tuple(slice(None) if i == axis else 0 for i in range(ndim))].numpy())
    if len(found) != ndim:  # an axis of length one belongs to no axis of the parameter for certain
        return None
    axes = [found[i] for i in range(ndim)]
    return View(view.name, view.shape, tuple(dim for dim, _ in axes), tuple(index for _, index in axes))


def _computed(index: GraphIndex, store: LabelStore, node: fx.Node, layers: list[fx.Node]) -> View | None:
    """A weight computed from one parameter of its shape, row by row, and from vectors with a value for each row. Or
    element by element, with buffers of its shape too, such as a mask. Rows are what the layers compute."""
    turned = {short_name(layer) in PRODUCTS | TRANSPOSED | {"addmm"} for layer in layers}
    if not isinstance(node.meta.get("val"), Tensor) or len(turned) > 1:
        return None
    if turned == {True} and not all(map(_is_simple, layers)):
        return None
    out, shape, steps = int(turned.pop()), shape_of(node), [node]
    for step in steps:  # which grow on the way
        steps += [a for a in step.all_input_nodes if a not in index.parameters]
    single = all(map(is_pointwise, steps))
    roots = {index.parameters[a] for step in steps for a in step.all_input_nodes if a in index.parameters}
    alike = [n for n in roots if index.shapes[n] == shape]
    masks = [n for n in alike if n not in index.trainable] if single and len(alike) > 1 else []
    vectors = {n: long_axes(index.shapes[n]) for n in roots.difference(alike)}
    lengths = [[index.shapes[n][d] for d in dims] for n, dims in vectors.items()]
    if len(alike) - len(masks) != 1 or any(length not in ([], [shape[out]]) for length in lengths):
        return None
    (weight,) = set(alike).difference(masks)
    rows = store.axis(weight, out, "out")
    for name in masks:
        store.tie(name, out, rows, "free")
        store.tie(name, 1 - out, store.axis(weight, 1 - out, "in"), "free")
    for name, dims in vectors.items():
        for d in dims:
            store.tie(name, d, rows, "free")
    return View.of(weight, shape, spans=not single)


def _is_simple(layer: fx.Node) -> bool:
    """Whether a product is one of matrices, and a transposed convolution has no groups."""
    if short_name(layer) in TRANSPOSED:
        return int(arguments(layer)["groups"]) == 1
    return len(shape_of(layer.args[2 if short_name(layer) == "addmm" else 1])) == 2  # type: ignore[arg-type]

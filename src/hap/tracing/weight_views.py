"""Weights that a layer does not use as they are stored: parts and transposes of a parameter, and computed ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from hap.graph.nodes import arguments, ends_branch, is_pointwise, shape_of, short_name
from hap.graph.operator_families import CONVOLUTIONS, MOVING, PRODUCTS, TRANSPOSED, UNCHANGED
from hap.groups.components import distinct
from hap.groups.types import Ints

if TYPE_CHECKING:
    from hap.tracing.trace import Tracer


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


def view_of(tracer: Tracer, node: Any) -> View | None:
    """What a layer's weight is made from, or None where that is an activation."""
    if not isinstance(node, fx.Node):
        return None
    if (name := tracer.parameter(node)) is not None:
        return View.of(name, tracer.index.shapes[name])
    return tracer.views.get(node)


def outputs(tracer: Tracer, view: View, axis: int) -> Ints:
    """The labels of what the weight computes along this axis of the view."""
    return tracer.axis(view.name, view.dims[axis], "out")[view.index[axis]]


def tie_inputs(tracer: Tracer, view: View, axis: int, labels: Ints) -> None:
    """What the weight reads along this axis of the view has these labels."""
    dim = view.dims[axis]
    if view.whole:
        tracer.tie(view.name, dim, labels, "in")
    else:
        tracer.join(tracer.axis(view.name, dim, "in")[view.index[axis]], labels)
    if view.spans:
        tracer.spanned.append(distinct(labels))


def tie_free(tracer: Tracer, view: View, axis: int, labels: Ints) -> None:
    """What the weight has along this axis of the view shares the fate of these labels."""
    tracer.join(tracer.axis(view.name, view.dims[axis])[view.index[axis]], labels)


def find_views(tracer: Tracer, graph: fx.Graph) -> dict[fx.Node, Any]:
    """Views by the nodes that make them, for all nodes whose every use is as a layer's weight or on the way to one.

    Nodes on the way that are no views of one parameter stand for None, and several results for a list.
    """
    pure: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            pure[node] = node in tracer.index.parameters
        else:
            pure[node] = node.op in ("call_function", "get_attr") and all(pure[a] for a in node.all_input_nodes)
    weighing: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        used = node.op == "call_function" and pure[node] and node.users
        if used and all(user in weighing or _is_weight(user, node) for user in node.users):
            weighing.add(node)
    views: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in weighing:
            views[node] = _moved(tracer, node, views)
            layers = [user for user in node.users if user not in weighing]
            if layers and not isinstance(views[node], View):
                views[node] = _computed(tracer, node, layers)
            if layers and not _usable(views[node], layers):
                _forget(views, node)
    return views


def _usable(view: View | None, layers: list[fx.Node]) -> bool:
    """Convolutions take their weights as they are stored, or computed element by element.

    Products take one weight, or one for each of several, none of which is stretched over others.
    """
    if view is None:
        return False
    several = [len(index) for index in view.index][:-2]
    read = [layer.args[0] for layer in layers if several and short_name(layer) in PRODUCTS]
    alike = all(list(shape_of(x)[:-2]) == several for x in read)  # type: ignore[arg-type]
    return alike and (view.whole or not any(ends_branch(layer) for layer in layers))


def _forget(views: dict[fx.Node, Any], node: fx.Node) -> None:
    """Leave a node and what it is made from to the rules, which freeze it."""
    if node in views:
        del views[node]
        for a in node.all_input_nodes:
            _forget(views, a)


def _is_weight(layer: fx.Node, node: fx.Node) -> bool:
    """Whether the layer uses the node as its weight, and as nothing else."""
    place = {"linear": 1, "addmm": 2} | dict.fromkeys(CONVOLUTIONS | TRANSPOSED | PRODUCTS, 1)
    at = place.get(short_name(layer)) if layer.op == "call_function" else None
    return at is not None and [i for i, a in enumerate(layer.args) if a is node] == [at]


def _moved(tracer: Tracer, node: fx.Node, views: dict[fx.Node, Any]) -> Any:
    """The view (or list of views) that an operator makes which only moves elements; None if it does more."""
    name, (source, *_) = short_name(node), node.args or (None,)
    view = views[source] if isinstance(source, fx.Node) and source in views else view_of(tracer, source)
    if name == "getitem":
        return view[int(node.args[1])] if isinstance(view, list) else None  # type: ignore[arg-type]
    if not isinstance(view, View) or name not in MOVING | UNCHANGED:
        return None
    if name in UNCHANGED:
        return view
    shape = tuple(len(x) for x in view.index)
    places = [torch.from_numpy(x).view([-1 if i == d else 1 for i in range(len(shape))]).expand(shape)
              for d, x in enumerate(view.index)]  # fmt: skip
    _, *rest = node.args
    results = [node.target(place, *rest, **node.kwargs) for place in places]  # type: ignore[operator]
    if isinstance(results[0], list | tuple):
        return [_read(view, parts) for parts in zip(*results, strict=True)]
    return _read(view, results)


def _read(view: View, places: Iterable[Tensor]) -> View | None:
    """The view that has these places in the one it was made from: a stride of zero tells where they do not vary."""
    found: dict[int, tuple[int, Ints]] = {}
    ndim = 0
    for dim, place in zip(view.dims, places, strict=True):
        ndim = place.ndim
        for axis in (i for i in range(place.ndim) if place.stride(i) and place.shape[i] > 1):
            if axis in found:
                return None
            found[axis] = (dim, place[tuple(slice(None) if i == axis else 0 for i in range(place.ndim))].numpy())
    if len(found) != ndim:  # an axis of length one belongs to no axis of the parameter for certain
        return None
    axes = [found[i] for i in range(ndim)]
    return View(view.name, view.shape, tuple(dim for dim, _ in axes), tuple(index for _, index in axes))


def _computed(tracer: Tracer, node: fx.Node, layers: list[fx.Node]) -> View | None:
    """A weight computed from one parameter of its shape, row by row, and from vectors with a value for each row.

    Or element by element, with buffers of its shape too, such as a mask. Rows are outputs of the layers, which have
    them along the same axis.
    """
    value, roots, seen, single = node.meta.get("val"), set(), [node], True
    turned = {short_name(layer) in PRODUCTS | TRANSPOSED | {"addmm"} for layer in layers}
    if not isinstance(value, Tensor) or len(turned) > 1 or (turned == {True} and not all(map(_is_simple, layers))):
        return None
    out = int(turned.pop())
    while seen:
        made = seen.pop()
        single = single and is_pointwise(made)
        for a in made.all_input_nodes:
            if a in tracer.index.parameters:
                roots.add(tracer.index.parameters[a])
            else:
                seen.append(a)
    shape = shape_of(node)
    alike = [n for n in roots if tracer.index.shapes[n] == shape]
    masks = [n for n in alike if n not in tracer.index.trainable] if single and len(alike) > 1 else []
    vectors = [n for n in roots if n not in alike]
    long = {n: [d for d, size in enumerate(tracer.index.shapes[n]) if size > 1] for n in vectors}
    if len(alike) - len(masks) != 1 or any(
        len(d) > 1 or [tracer.index.shapes[n][i] for i in d] not in ([], [shape[out]]) for n, d in long.items()
    ):
        return None
    (weight,) = (n for n in alike if n not in masks)
    rows = tracer.axis(weight, out, "out")
    for name in masks:
        tracer.tie(name, out, rows, "free")
        tracer.tie(name, 1 - out, tracer.axis(weight, 1 - out, "in"), "free")
    for name in vectors:
        for d in long[name]:
            tracer.tie(name, d, rows, "free")
    return View.of(weight, shape, spans=not single)


def _is_simple(layer: fx.Node) -> bool:
    """Whether a product is one of matrices, and a transposed convolution has no groups."""
    if short_name(layer) in TRANSPOSED:
        return int(arguments(layer)["groups"]) == 1
    return len(shape_of(layer.args[2 if short_name(layer) == "addmm" else 1])) == 2  # type: ignore[arg-type]

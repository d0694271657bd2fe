"""Rules for operators that move, look up or pick elements without computing: most run on the labels themselves.

Whether units of a reshaped tensor go in whole rows, as groups of a channel shuffle do, is decided when all rules have
run: in `tracing/label_classes.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from hap.graph.broadcast_axes import varying_shape
from hap.graph.nodes import arguments, shape_of, short_name
from hap.graph.operator_families import Trait, having
from hap.tracing.context import RuleContext, labels_of_axis
from hap.tracing.labels import Undecided, compress, unlabelled, varies
from hap.tracing.rules.elementwise import constrains
from hap.tracing.rules.registry import freeze_all, rule

SIZED, SPLITTING = having(Trait.SIZED), having(Trait.SPLITS)
RESHAPES = {"_unsafe_view", "flatten", "reshape", "unflatten", "view"}
"""Operators that give the same elements, in the same order, another shape; or the same bits another type."""


@rule("structural")
def structural(context: RuleContext, node: fx.Node) -> Any:
    """Run the operator itself on the labels."""
    if not any(varies(x) for x in context.entering(node)):
        return unlabelled(node.meta["val"])
    if short_name(node) == "channel_shuffle":  # channels go so that all groups stay equally long
        given = arguments(node)
        channels = torch.from_numpy(labels_of_axis(context, given["self"], 1))
        context.keep_rectangular(node, channels.view(given["groups"], -1))
    try:
        row = side_by_side(context, node)
        result = _on_labels(context, node) if row is None else row
    except (RuntimeError, TypeError, NotImplementedError):
        return freeze_all(context, node, "an operator that cannot run on labels")
    several = isinstance(result, list | tuple)
    parts = [compress(part) for part in (result if several else [result])]
    if short_name(node) in SIZED and not _takes_the_rest(node, parts):
        context.sized(*context.entering(node))
    if short_name(node) == "slice" and shape_of(node) != shape_of(source := node.all_input_nodes[0]):
        dim = int(arguments(node).get("dim", 0)) % len(shape_of(source))
        context.wiring.sliced.append((context.labels(source).numpy(), dim))
    if short_name(node) in SPLITTING and len({tuple(val.shape) for val in node.meta["val"]}) == 1:
        for part in parts:  # a forward that asks for equal parts goes on getting the same ones
            context.join(part.numpy(), parts[0].numpy())
    for number, part in enumerate(parts):
        context.keep_rectangular(node, part, number if several else None)
    return parts if several else parts[0]


def side_by_side(context: RuleContext, node: fx.Node) -> Tensor | None:
    """Labels of tensors that are concatenated along an axis that is never cut, such as tokens: joined index by index.

    Tensors without labels, such as a key of zeros, change nothing. None: the tensors differ in another way.
    """
    if short_name(node) not in ("cat", "concat"):
        return None
    given = arguments(node)
    labels = {a: context.labels(a) for a in given["tensors"]}
    cut = [x for x in labels.values() if varies(x)]
    if len({x.shape for x in cut}) != 1 or cut[0].numel() == 1 or cut[0].shape[given["dim"]] > 1:
        return None
    others = [varying_shape(a) for a, x in labels.items() if not varies(x)]
    if any(len(e) != cut[0].ndim or constrains(cut[0], e) for e in others):
        return None
    for x in cut[1:]:
        context.join(cut[0].numpy(), x.numpy())
    return cut[0]


def _takes_the_rest(node: fx.Node, parts: list[Tensor]) -> bool:
    """Whether the one axis along which a reshaped tensor varies has the size -1, which follows whatever goes."""
    if short_name(node) not in ("reshape", "view"):
        return False
    sizes = arguments(node).get("shape") or arguments(node).get("size") or ()  # none: another type of the same bits
    return len(sizes) > 0 and all(n == -1 for n, long in zip(sizes, parts[0].shape, strict=True) if long > 1)


def _on_labels(context: RuleContext, node: fx.Node) -> Any:
    """What the operator makes of labels in place of values. They are expanded, not written out, wherever that will do.

    A concatenation writes out its result, so other axes than its own stay short where no operand varies along them. So
    do those along which elements are rolled.
    """
    name, value = short_name(node), node.meta["val"]
    labels = {a: x for a in context.labelled(node) if isinstance(x := context.labels(a), Tensor)}
    shapes, first = {a: list(shape_of(a)) for a in labels}, next(iter(labels))
    if name in RESHAPES and first.meta["val"].dtype == value.dtype and value.numel():
        return _reshaped(labels[first], shapes[first], list(shape_of(node)))
    if name in ("cat", "concat", "flip", "roll", "stack") and len(set(map(len, shapes.values()))) == 1:
        along = arguments(node)["dim"] % len(shapes[first]) if name in ("cat", "concat") else None
        for d in range(len(shapes[first])):
            if d != along and all(x.shape[d] == 1 for x in labels.values()):
                for shape in shapes.values():
                    shape[d] = min(shape[d], 1)

    def call(prepare: Callable[[Tensor], Tensor]) -> Any:
        wide = {a: prepare(x.expand(shapes[a])) for a, x in labels.items()}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: wide[a] if a in wide else a.meta.get("val"))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    try:
        return call(lambda expanded: expanded)
    except RuntimeError:  # such as a view across axes of which one is expanded
        return call(Tensor.contiguous)


def _reshaped(labels: Tensor, before: list[int], after: list[int]) -> Tensor:
    """Axes that stay as they are, at either end, are not written out where labels do not vary along them."""
    for ends in (range(len(after)), range(-1, -1 - len(after), -1)):
        for d in ends:
            if not -len(before) <= d < len(before) or before[d] != after[d]:
                break
            if labels.shape[d] == 1:
                before[d] = after[d] = 1
    return labels.expand(before).reshape(after)


@rule("padding")
def padding(context: RuleContext, node: fx.Node) -> Any:
    """What is added along an axis that is not cut belongs to the same units; along a cut one it is always kept."""
    source, amounts, *_ = arguments(node).values()
    labels, mode = context.labels(source), arguments(node).get("mode", "constant")
    padded = {labels.ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    cut = [d for d in padded if labels.shape[d] > 1]
    if not cut and (labels.numel() > 1 or not varies(labels)):
        return labels
    if mode != "constant" or labels.numel() == 1:
        return freeze_all(context, node, "pads an axis that would be cut")
    context.sized(labels)
    shape = [s if d in padded else labels.shape[d] for d, s in enumerate(shape_of(source))]
    return compress(nn.functional.pad(labels.expand(shape), list(amounts)))


# ---- looking up and picking: fine along axes that are not cut --------------------------------------------------------


@rule("index")
def index(context: RuleContext, node: fx.Node) -> Any:
    """x[..., i, ...] with one tensor of positions: fine along axes that are not cut, such as a table's entries."""
    source, places = arguments(node).values()
    dims = [d for d, place in enumerate(places) if place is not None]
    if len(dims) != 1 or not isinstance(places[dims[0]], fx.Node):
        return freeze_all(context, node)
    if context.parameter(source) is None and (labels := context.labels(source)).shape[dims[0]] > 1:
        return _picked(context, node, labels, dims[0], context.index.constant(places[dims[0]]))
    return _looked_up(context, node, source, dims[0])


def _picked(context: RuleContext, node: fx.Node, labels: Tensor, dim: int, places: Tensor | None) -> Any:
    """x[..., [-2], ...] along an axis that is cut, at places that the code says.

    They stay right if all stays that they are counted past: what comes before them, or after those from the end.
    """
    if places is None or places.dtype != torch.int64 or not places.numel():
        return freeze_all(context, node, "looks up along an axis that would be cut")
    before, after = max(int(places.max()) + 1, 0), max(-int(places.min()), 0)
    ends = labels.narrow(dim, 0, before), labels.narrow(dim, labels.shape[dim] - after, after)
    context.store.constant.append(Undecided(labels.numpy(), torch.cat(ends, dim).numpy(), [dim]))
    picked = compress(labels[(slice(None),) * dim + (places,)])
    context.keep_rectangular(node, picked)
    return picked


@rule("gather", "index_select")
def gather(context: RuleContext, node: fx.Node) -> Any:
    """Picks along one axis, maybe each row for itself: other axes pass, if the picked ones are all of theirs."""
    source, dim, *_ = arguments(node).values()
    labels, place = context.labels(source), dim % max(len(shape_of(source)), 1)
    sizes = enumerate(zip(shape_of(source), shape_of(node), strict=True))
    if labels.shape[place] > 1 or any(before != after for d, (before, after) in sizes if d != place):
        return freeze_all(context, node, "picks along an axis that would be cut")
    if short_name(node) == "gather":  # the places are as many along the other axes
        context.sized(labels)
    return labels


@rule("embedding")
def embedding(context: RuleContext, node: fx.Node) -> Any:
    return _looked_up(context, node, node.all_input_nodes[0], 0)


def _looked_up(context: RuleContext, node: fx.Node, source: fx.Node, dim: int) -> Any:
    """Labels of a result in which axis `dim` of the source is replaced by the axes of the positions looked up."""
    more = len(shape_of(node)) - len(shape_of(source)) + 1
    name = context.parameter(source)
    labels = context.labels(source) if name is None else context.store.of_parameter(name, dim)
    if labels.shape[dim] > 1:
        return freeze_all(context, node, "looks up along an axis that would be cut")
    return labels.reshape(*labels.shape[:dim], *(1,) * more, *labels.shape[dim + 1 :])


@rule("grid_sampler")
def grid_sampler(context: RuleContext, node: fx.Node) -> Any:
    """Picks places, channel by channel, which are never cut themselves."""
    source, places, *_ = arguments(node).values()
    if any(size > 1 for size in context.labels(source).shape[2:]):
        return freeze_all(context, node, "picks along an axis that would be cut")
    context.freeze(context.labels(places), short_name(node), "says where to pick")
    return context.labels(source)

"""Rules for operators that look up or pick: fine along axes that are not cut."""

from typing import Any

import torch
from torch import Tensor, fx

from hap.graph.nodes import arguments, shape_of, short_name
from hap.tracing.context import RuleContext
from hap.tracing.labels import Undecided, compress
from hap.tracing.rules.registry import freeze_all, rule


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
    context.reshaped(node, picked)
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

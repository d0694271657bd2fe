"""Rules for operators that pool over space, reduce an axis or normalise along it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hap.graph.nodes import arguments, schema_name, short_name
from hap.graph.operator_families import Trait, having
from hap.tracing.context import RuleContext, join_along
from hap.tracing.label_tensors import zeros
from hap.tracing.rules.elementwise import pointwise
from hap.tracing.rules.registry import freeze_all, rule

AVERAGING = having(Trait.AVERAGES)


@rule("pooling")
def pooling(context: RuleContext, node: fx.Node) -> Any:
    """Windows over space: channels pass, anything that varies over space may not be cut."""
    labels = context.labels(node.all_input_nodes[0])
    spatial = 1 if "1d" in short_name(node) else 3 if "3d" in short_name(node) else 2
    if any(s > 1 for s in labels.shape[-spatial:]):
        return freeze_all(context, node, "pools over an axis that would be cut")
    return _for_each_result(node, labels)


@rule("reduction")
def reduction(context: RuleContext, node: fx.Node) -> Any:
    """Sums and means: fine along axes that nobody cuts. `max` and `min` of two tensors are pointwise."""
    if len(context.entering(node)) > 1:
        return pointwise(context, node)
    given = arguments(node)
    dims, labels = given.get("dim"), context.labels(node.all_input_nodes[0])
    named = [dims] if isinstance(dims, int) else list(dims or range(labels.ndim))
    reduced = {d % max(labels.ndim, 1) for d in named}
    labels = join_along(context, labels, [d for d in reduced if labels.shape[d] > 1])
    if any(labels.shape[d] > 1 for d in reduced):
        if not _averages(node):
            return freeze_all(context, node, "reduces over an axis that would be cut")
        if node.users:
            context.spans(labels, averaged=True)
        labels = zeros(labels.ndim)
    if pytree.tree_leaves(node.meta["val"])[0].ndim != labels.ndim:
        labels = labels.view([s for d, s in enumerate(labels.shape) if d not in reduced])
    return _for_each_result(node, labels)


def _for_each_result(node: fx.Node, labels: Tensor) -> Any:
    value = node.meta["val"]
    return [labels for _ in value] if isinstance(value, list | tuple) else labels


def _averages(node: fx.Node) -> bool:
    """Whether a reduction is as good over fewer, as that of a norm is. Where the largest one stands is not, nor is the
    spread around a mean that is estimated: there is none of one value."""
    places = any(user.args[1] != 0 and user.users for user in node.users if schema_name(user) == "getitem")
    given, spread = arguments(node), short_name(node) in ("std", "var")
    estimated = spread and given.get("correction", given.get("unbiased", True)) not in (0, False)
    return short_name(node) in AVERAGING and not places and not estimated


@rule("softmax")
def softmax(context: RuleContext, node: fx.Node) -> Any:
    labels, dim = context.labels(node.all_input_nodes[0]), arguments(node)["dim"]
    labels = join_along(context, labels, [dim % labels.ndim] if labels.shape[dim] > 1 else [])
    if labels.shape[dim] > 1:
        return freeze_all(context, node, "normalises over an axis that would be cut")
    return labels

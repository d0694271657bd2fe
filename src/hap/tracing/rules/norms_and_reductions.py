"""Rules for operators that pool over space, reduce an axis or normalise along it.

Normalisations tie the vectors that scale and shift, and some average over what would be cut.
"""

from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from hap.graph.nodes import arguments, schema_name, shape_of, short_name
from hap.graph.operator_families import Trait, having
from hap.groups.components import distinct
from hap.groups.types import SizeAttribute
from hap.tracing.context import RuleContext, join_along, labels_of_axis
from hap.tracing.labels import labels_on_axis, varies, zeros
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


# ---- normalisations -------------------------------------------------------------------------------------------------


@rule("channel_norm")
def channel_norm(context: RuleContext, node: fx.Node) -> Any:
    """Normalises every channel by itself."""
    x, *vectors = arguments(node).values()
    if (scale := context.parameter(vectors[0])) is not None:
        context.norms.scales.append(scale)
    labels = _tie_affine(context, x, vectors[:4], 1)
    _count(context, node, _NormBase, {"num_features": 1}, labels)
    return labels


@rule("layer_norm")
def layer_norm(context: RuleContext, node: fx.Node) -> Any:
    """Normalises over the last axes: they can be cut, but what is left changes with it."""
    x, normalized, *vectors = arguments(node).values()
    labels = context.labels(x)
    if all(size == 1 for size in labels.shape[-len(normalized) :]):
        return labels if not varies(labels) or shape_of(x)[-1] > 1 else freeze_all(context, node, "a norm of one value")
    if len(normalized) > 1:
        return freeze_all(context, node, "normalises over several axes")
    if labels.numel() > labels.shape[-1] and len(distinct(labels)) == labels.numel():
        return join_along(context, labels, [labels.ndim - 1])  # of each head: heads go whole, and the vectors stay
    context.spans(labels, normed=True)
    labels = _tie_affine(context, x, vectors[:2], -1)
    _count(context, node, nn.LayerNorm | nn.RMSNorm, {"normalized_shape": 1}, labels)
    return labels


@rule("group_norm")
def group_norm(context: RuleContext, node: fx.Node) -> Any:
    """Whole groups go, or the same channels of each, whichever is finer; only the former leaves the rest unchanged."""
    x, groups, *vectors = arguments(node).values()
    by_group = labels_of_axis(context, x, 1).reshape(groups, -1)
    whole = groups >= by_group.shape[1]
    context.join(by_group, by_group[:, :1] if whole else by_group[:1])
    if not whole:
        context.spans(by_group)
    labels = _tie_affine(context, x, vectors[:2], 1)
    counted = {"num_channels": 1} | ({"num_groups": by_group.shape[1]} if whole else {})
    _count(context, node, nn.GroupNorm, counted, labels)
    return labels


def _count(context: RuleContext, node: fx.Node, kind: Any, attributes: dict[str, int], labels: Tensor) -> None:
    """Integers of the node's module that count these labels (over a divisor). A function called with sizes is tried."""
    if isinstance(context.index.module_of(node), kind):
        for name, per in attributes.items():
            size = SizeAttribute(context.module(node), name, labels.flatten().numpy(), per)
            context.wiring.attributes.append(size)
    elif kind is not _NormBase:
        context.sized(labels)


@rule("prelu")
def prelu(context: RuleContext, node: fx.Node) -> Any:
    x, weight = arguments(node).values()
    return context.labels(x) if shape_of(weight) == (1,) else _tie_affine(context, x, [weight], 1)


def _tie_affine(context: RuleContext, x: fx.Node, vectors: Any, dim: int) -> Tensor:
    """Vectors that scale or shift axis `dim` of x are cut with it."""
    labels = labels_of_axis(context, x, dim)
    for vector in vectors:
        if isinstance(vector, fx.Node):
            name = context.parameter(vector)
            if name is None:
                context.freeze(labels, short_name(vector), "normalises with computed values")
            else:
                context.tie(name, 0, labels, "free")
    return labels_on_axis(labels, len(shape_of(x)), dim)

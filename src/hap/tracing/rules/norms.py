"""Rules for normalisations: they tie the vectors that scale and shift, and some average over what would be cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from hap.graph.nodes import arguments, shape_of, short_name
from hap.groups.components import distinct
from hap.tracing.context import RuleContext, join_along, labels_of_axis
from hap.tracing.label_tensors import labels_on_axis, varies
from hap.tracing.rules.registry import freeze_all, rule


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
            context.count(context.module(node), name, labels, per)
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

"""Rules for normalisations: they tie the vectors that scale and shift, and some average over what would be cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from hap.graph.nodes import shape_of, short_name
from hap.groups.components import distinct
from hap.groups.types import SizeAttribute
from hap.tracing.rules.registry import freeze_all, joined_along, labels_of_axis, labels_on_axis, rule, varies

if TYPE_CHECKING:
    from hap.tracing.trace import Tracer


@rule("batch_norm", "instance_norm")
def channel_norm(tracer: Tracer, node: fx.Node) -> Any:
    """Normalises every channel by itself."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if (scale := tracer.parameter(node.args[1])) is not None:
        tracer.scales.append(scale)
    labels = _tie_affine(tracer, x, node.args[1:5], 1)
    _follow(tracer, node, _NormBase, {"num_features": 1}, labels)
    return labels


@rule("layer_norm", "rms_norm")
def layer_norm(tracer: Tracer, node: fx.Node) -> Any:
    """Normalises over the last axes: they can be cut, but what is left changes with it."""
    x, normalized = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(normalized, list | tuple)
    labels = tracer.labels(x)
    if all(size == 1 for size in labels.shape[-len(normalized) :]):
        return labels if not varies(labels) or shape_of(x)[-1] > 1 else freeze_all(tracer, node, "a norm of one value")
    if len(normalized) > 1:
        return freeze_all(tracer, node, "normalises over several axes")
    if labels.numel() > labels.shape[-1] and len(distinct(labels)) == labels.numel():
        return joined_along(tracer, labels, [labels.ndim - 1])  # of each head: heads go whole, and the vectors stay
    tracer.spanned.append(distinct(labels))
    tracer.normed.append(distinct(labels))
    labels = _tie_affine(tracer, x, node.args[2:4], -1)
    _follow(tracer, node, nn.LayerNorm | nn.RMSNorm, {"normalized_shape": 1}, labels)
    return labels


@rule("group_norm")
def group_norm(tracer: Tracer, node: fx.Node) -> Any:
    """Whole groups go, or the same channels of each, whichever is finer; only the former leaves the rest unchanged."""
    x, groups = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(groups, int)
    by_group = labels_of_axis(tracer, x, 1).reshape(groups, -1)
    whole = groups >= by_group.shape[1]
    tracer.join(by_group, by_group[:, :1] if whole else by_group[:1])
    if not whole:
        tracer.spanned.append(by_group.ravel())
    labels = _tie_affine(tracer, x, node.args[2:4], 1)
    _follow(
        tracer, node, nn.GroupNorm, {"num_channels": 1} | ({"num_groups": by_group.shape[1]} if whole else {}), labels
    )
    return labels


def _follow(tracer: Tracer, node: fx.Node, kind: Any, attributes: dict[str, int], labels: Tensor) -> None:
    """Integers of the node's module that count these labels (over a divisor). A function called with sizes is tried."""
    module = tracer.module(node)
    if isinstance(tracer.index.modules.get(module), kind):
        tracer.lengths += [
            SizeAttribute(module, name, labels.flatten().numpy(), per) for name, per in attributes.items()
        ]
    elif kind is not _NormBase:
        tracer.sized.append(labels.flatten().numpy())


@rule("prelu")
def prelu(tracer: Tracer, node: fx.Node) -> Any:
    x, weight = node.args
    assert isinstance(x, fx.Node)
    if shape_of(weight) == (1,):  # type: ignore[arg-type]
        return tracer.labels(x)
    return _tie_affine(tracer, x, [weight], 1)


def _tie_affine(tracer: Tracer, x: fx.Node, vectors: Any, dim: int) -> Tensor:
    """Vectors that scale or shift axis `dim` of x are cut with it."""
    labels = labels_of_axis(tracer, x, dim)
    for vector in vectors:
        if isinstance(vector, fx.Node):
            name = tracer.parameter(vector)
            if name is None:
                tracer.freeze(labels, short_name(vector), "normalises with computed values")
            else:
                tracer.tie(name, 0, labels, "free")
    return labels_on_axis(labels, len(shape_of(x)), dim)

"""Rules for linear layers and convolutions: they tie what a weight reads and hand out what it computes."""

import math
from typing import Any

import numpy as np
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from hap.graph.nodes import arguments, shape_of
from hap.groups.types import ConvGeometry, Ints
from hap.tracing.context import RuleContext, join_along, labels_of_axis
from hap.tracing.labels import labels_on_axis
from hap.tracing.rules.registry import COMPUTED, freeze_all, rule
from hap.tracing.weight_views import View


@rule("linear")
def linear(context: RuleContext, node: fx.Node) -> Any:
    """Along the last axis; along one that is not cut, such as tokens, what is cut along others passes."""
    x, weight, bias = arguments(node).values()
    if (view := context.weight_view(weight)) is None:
        return freeze_all(context, node, COMPUTED)
    labels = context.labels(x)
    if labels.numel() > 1 and labels.shape[-1] == 1:
        each = math.prod(shape_of(x)[:-1]) // labels.numel() * math.prod(len(i) for i in view.index)
        return _passed(context, node, labels, view, bias, "works along an axis that is not cut", each)
    return linear_layer(context, node, x, view, 1, bias)


@rule("addmm")
def addmm(context: RuleContext, node: fx.Node) -> Any:
    """bias + x @ W with the weight as a parameter, as in GPT-2's layers."""
    bias, x, weight, *_ = arguments(node).values()
    if (view := context.weight_view(weight)) is None:
        return freeze_all(context, node, COMPUTED)
    return linear_layer(context, node, x, view, 0, bias)


def linear_layer(context: RuleContext, node: fx.Node, x: fx.Node, view: View, reads: int, bias: Any) -> Tensor:
    """A layer along the last axis of x, whose weight reads along axis `reads` and computes along the other."""
    outputs = context.outputs(view, 1 - reads)
    context.tie_inputs(view, reads, labels_of_axis(context, x, -1))
    context.tie_bias(bias, outputs)
    context.contraction(node, view, math.prod(shape_of(x)[:-1]))
    return labels_on_axis(outputs, len(shape_of(node)), -1)


def _passed(
    context: RuleContext, node: fx.Node, labels: Tensor, view: View, bias: Any, why: str, positions: int
) -> Tensor:
    """Labels that pass through a layer whose weight is not cut, for a reason."""
    outputs = context.outputs(view, 0)
    context.tie_inputs(view, 1, np.zeros(len(view.index[1]), dtype=np.int64))
    context.freeze(outputs, context.module(node) or view.name, why)
    context.tie_bias(bias, outputs)
    context.activation_product(labels, positions)
    return labels


@rule("convolution")
def convolution(context: RuleContext, node: fx.Node) -> Any:
    """Weight: outputs x inputs per group x kernel."""
    given = arguments(node)
    x, view, bias, groups = given["input"], context.weight_view(given["weight"]), given["bias"], given["groups"]
    if view is None or not view.whole:
        return freeze_all(context, node, COMPUTED)
    spatial = len(view.shape) - 2
    channel, in_size, out_size = -spatial - 1, shape_of(x)[-spatial:], shape_of(node)[-spatial:]
    samples, labels = math.prod(shape_of(x)[:channel]), context.labels(x)
    if labels.ndim == len(view.shape) and labels.shape[0] > 1:  # heads as a batch go whole, and the weight stays
        labels = join_along(context, labels, [d for d in range(1, labels.ndim) if labels.shape[d] > 1])
        each = math.prod(view.shape) * math.prod(out_size)
        return _passed(context, node, labels, view, bias, "works on heads as on samples", each)
    inputs, outputs = labels_of_axis(context, x, channel), context.outputs(view, 0)
    _tie_groups(context, inputs, outputs, groups, view)
    if groups > 1 and not isinstance(context.index.module_of(node), _ConvNd):
        context.sized(inputs, outputs)
    context.tie_bias(bias, outputs)
    context.contraction(node, view, samples * math.prod(out_size))
    module = context.index.called_once(node)
    own = f"{module}.weight" == view.name and isinstance(context.index.module_of(node), nn.Conv2d)
    plain = groups == 1 and len(shape_of(x)) == 4 and not isinstance(given["padding"], str) and not view.spans
    if module is not None and own and plain:
        stride, padding, dilation = (_pair(given[key]) for key in ("stride", "padding", "dilation"))
        sizes = (_pair(view.shape[2:]), stride, padding, dilation, _pair(in_size), _pair(out_size))
        context.costs.geometries[view.name] = ConvGeometry(module, view.name, *sizes, samples)
    return labels_on_axis(outputs, len(shape_of(node)), channel)


@rule("transposed_convolution")
def transposed_convolution(context: RuleContext, node: fx.Node) -> Any:
    """Weight: inputs x outputs per group x kernel."""
    given = arguments(node)
    x, view, groups = given["input"], context.weight_view(given["weight"]), given["groups"]
    if view is None or not view.whole or view.spans:
        return freeze_all(context, node, COMPUTED)
    channel = 1 - len(view.shape)
    inputs = labels_of_axis(context, x, channel)
    if groups == 1:
        outputs = context.outputs(view, 1)
        context.tie_inputs(view, 0, inputs)
    else:  # whole groups go, input and output channels with them
        outputs = np.repeat(context.fresh(groups), view.shape[1])
        context.join(inputs.reshape(groups, -1), outputs.reshape(groups, -1)[:, :1])
        context.tie(view.name, 0, inputs, "out")
        if not isinstance(context.index.module_of(node), _ConvNd):
            context.sized(inputs, outputs)
    context.tie_bias(given["bias"], outputs)
    context.contraction(node, view, math.prod(shape_of(x)[:channel]) * math.prod(shape_of(x)[channel + 1 :]))
    return labels_on_axis(outputs, len(shape_of(node)), channel)


def _tie_groups(context: RuleContext, inputs: Ints, outputs: Ints, groups: int, view: View) -> None:
    """Grouped convolutions keep equal groups: whole groups go, or the same channels of each, whichever is finer."""
    if groups == 1:
        return context.tie_inputs(view, 1, inputs)
    by_group = inputs.reshape(groups, -1)
    if groups >= by_group.shape[1]:
        context.join(by_group, by_group[:, :1])
        return context.join(outputs.reshape(groups, -1), by_group[:, :1])
    context.join(by_group, by_group[:1])
    context.join(outputs.reshape(groups, -1), outputs.reshape(groups, -1)[:1])
    return context.tie_inputs(view, 1, by_group[0])


def _pair(value: Any) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return (values[0], values[-1])

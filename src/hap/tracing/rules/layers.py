"""Rules for linear layers and convolutions: they tie what a weight reads and hand out what it computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from hap.graph.nodes import arguments, shape_of
from hap.groups.types import ConvGeometry, Ints
from hap.tracing.context import RuleContext, join_along, labels_of_axis
from hap.tracing.label_tensors import labels_on_axis
from hap.tracing.rules.registry import COMPUTED, freeze_all, rule
from hap.tracing.weight_views import View


@rule("linear")
def linear(context: RuleContext, node: fx.Node) -> Any:
    x, weight_node, *rest = node.args
    weight = context.weight_view(weight_node)
    assert isinstance(x, fx.Node)
    if weight is None:
        return freeze_all(context, node, COMPUTED)
    labels, out = context.labels(x), context.outputs(weight, 0)
    if labels.numel() > 1 and labels.shape[-1] == 1:
        return _across(context, node, x, weight, labels, rest)
    context.tie_inputs(weight, 1, labels_of_axis(context, x, -1))
    context.tie_bias(next(iter(rest), None), out)
    context.contraction(node, weight, math.prod(shape_of(x)[:-1]))
    return labels_on_axis(out, node.meta["val"].ndim, -1)


@rule("addmm")
def addmm(context: RuleContext, node: fx.Node) -> Any:
    """bias + x @ W with the weight as a parameter, as in GPT-2's layers."""
    bias, x, weight = node.args[:3]
    assert isinstance(x, fx.Node)
    if (view := context.weight_view(weight)) is None:
        return freeze_all(context, node, COMPUTED)
    labels = transposed_linear(context, node, x, view)
    context.tie_bias(bias, labels.flatten().numpy())
    return labels


def transposed_linear(context: RuleContext, node: fx.Node, x: fx.Node, weight: View) -> Tensor:
    """x @ W: a linear layer with its weight transposed."""
    context.tie_inputs(weight, 0, labels_of_axis(context, x, -1))
    context.contraction(node, weight, math.prod(shape_of(x)[:-1]))
    return labels_on_axis(context.outputs(weight, 1), node.meta["val"].ndim, -1)


def _across(context: RuleContext, node: fx.Node, x: fx.Node, weight: View, labels: Tensor, rest: list[Any]) -> Tensor:
    """A layer along an axis that is not cut, such as tokens, of something that is cut along others: these pass."""
    outputs = context.outputs(weight, 0)
    context.tie_inputs(weight, 1, np.zeros(shape_of(x)[-1], dtype=np.int64))
    context.freeze(outputs, context.module(node) or weight.name, "works along an axis that is not cut")
    context.tie_bias(next(iter(rest), None), outputs)
    others = math.prod(shape_of(x)[:-1]) // labels.numel()
    context.activation_product(labels, others * math.prod(len(i) for i in weight.index))
    return labels


@rule("convolution")
def convolution(context: RuleContext, node: fx.Node) -> Any:
    """Weight: outputs x inputs per group x kernel."""
    given = arguments(node)
    x, view = given["input"], context.weight_view(given["weight"])
    if view is None or not view.whole:
        return freeze_all(context, node, COMPUTED)
    weight, shape, groups = view.name, context.index.shapes[view.name], given["groups"]
    spatial = len(shape) - 2
    if len(shape_of(x)) == len(shape) and context.labels(x).shape[0] > 1:
        return _sample_by_sample(context, node, x, view, given["bias"])
    inputs, outputs = labels_of_axis(context, x, -spatial - 1), context.outputs(view, 0)
    _tie_groups(context, inputs, outputs, groups, view)
    if groups > 1 and not isinstance(context.index.module_of(node), _ConvNd):
        context.sized(inputs, outputs)
    context.tie_bias(given["bias"], outputs)
    out_size = shape_of(node)[-spatial:]
    batch = math.prod(shape_of(x)[: -spatial - 1])
    context.contraction(node, view, batch * math.prod(out_size))
    module = context.index.called_once(node)
    plain = groups == 1 and spatial == 2 and len(shape_of(x)) == 4 and not isinstance(given["padding"], str)
    own = module == weight.removesuffix(".weight") and not view.spans
    if plain and own and module is not None and isinstance(context.index.modules[module], nn.Conv2d):
        stride, padding, dilation = (_pair(given[key]) for key in ("stride", "padding", "dilation"))
        sizes = (_pair(shape[2:]), stride, padding, dilation, _pair(shape_of(x)[-2:]), _pair(out_size))
        context.convolution(ConvGeometry(module, weight, *sizes, batch))
    return labels_on_axis(outputs, node.meta["val"].ndim, -spatial - 1)


def _sample_by_sample(context: RuleContext, node: fx.Node, x: fx.Node, view: View, bias: Any) -> Tensor:
    """A convolution of what is cut along the first axis, such as heads as a batch: these go whole, its weight stays."""
    labels, outputs = context.labels(x), context.outputs(view, 0)
    labels = join_along(context, labels, [d for d in range(1, labels.ndim) if labels.shape[d] > 1])
    context.tie_inputs(view, 1, np.zeros(len(view.index[1]), dtype=np.int64))
    context.freeze(outputs, context.module(node) or view.name, "works on heads as on samples")
    context.tie_bias(bias, outputs)
    each = math.prod(view.shape) * math.prod(shape_of(node)[2:])
    context.activation_product(labels, each * len(x.meta["val"]) // labels.numel())
    return labels


@rule("transposed_convolution")
def transposed_convolution(context: RuleContext, node: fx.Node) -> Any:
    """Weight: inputs x outputs per group x kernel."""
    given = arguments(node)
    x, view = given["input"], context.weight_view(given["weight"])
    if view is None or not view.whole or view.spans:
        return freeze_all(context, node, COMPUTED)
    weight, shape, groups = view.name, context.index.shapes[view.name], given["groups"]
    spatial = len(shape) - 2
    inputs = labels_of_axis(context, x, -spatial - 1)
    if groups == 1:
        outputs = context.axis(weight, 1, "out")
        context.tie(weight, 0, inputs, "in")
    else:  # whole groups go, input and output channels with them
        outputs = np.repeat(context.fresh(groups), shape[1])
        context.join(inputs.reshape(groups, -1), outputs.reshape(groups, -1)[:, :1])
        context.tie(weight, 0, inputs, "out")
        if not isinstance(context.index.module_of(node), _ConvNd):
            context.sized(inputs, outputs)
    context.tie_bias(given["bias"], outputs)
    context.contraction(node, view, math.prod(shape_of(x)[: -spatial - 1]) * math.prod(shape_of(x)[-spatial:]))
    return labels_on_axis(outputs, node.meta["val"].ndim, -spatial - 1)


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

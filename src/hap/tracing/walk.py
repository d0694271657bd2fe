"""The walk: labels go through the operators of a graph, one rule after the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, fx
from torch.export.graph_signature import OutputKind
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from hap.graph.index import GraphIndex
from hap.graph.nodes import ends_branch, is_sum, keeps_zero
from hap.groups.types import OutputScatter
from hap.tracing.context import RuleContext
from hap.tracing.label_tensors import zeros
from hap.tracing.rules.registry import apply
from hap.tracing.settle import classes_of_labels
from hap.tracing.training_branches import ALONE, TrainingOnly
from hap.tracing.unprunable import OUTPUT


def walk(context: RuleContext, coupling: str) -> RuleContext:
    """Give every result in the graph its labels. In "union" `coupling`, branches lose their own channels."""
    index = context.index
    anchors = _anchors(index) if coupling == "union" else {}
    for node in index.program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node not in index.parameters and isinstance(value, Tensor):
            context.values[node] = zeros(value.ndim)
        elif node.op == "call_function" and node not in context.views:  # a layer asks for views when it gets there
            context.reader = node
            context.values[node] = apply(context, node)
            if node in context.flow.layers:
                context.flow.layers[node] = context.values[node]
            if node in anchors:
                context.values[node] = _promote(context, anchors[node], context.values[node])
    _freeze_outputs(context)
    context.flow.operands += context.flow.read_from_products()
    return context


def walk_training_branches(context: RuleContext, branches: TrainingOnly, coupling: str) -> None:
    """Cut what runs in training alone with what it reads. What it computes for itself stays.

    Labels go through the graph of training as they went through the other one, and meet in the same parameters. What
    that graph costs, and what it shows of heads and norms, does not count: the model is evaluated by the other.
    """
    if (captured := branches.captured()) is None:
        return
    store = context.store
    other = walk(RuleContext(GraphIndex(branches.model, captured.program, captured.called), store), coupling)
    known = {x.module for x in context.sizes.attributes}
    context.sizes.attributes += [x for x in other.sizes.attributes if x.module not in known]
    own = [key for key in store.axes if key[0] in branches.parameters]
    store.roles.update({key: "free" for key in own if store.roles[key] == "out"})
    root = classes_of_labels(store)
    made = np.concatenate([np.zeros(1, np.int64), *(root[x] for x in store.computed())])
    for key in own:
        store.freeze(store.axes[key][~np.isin(root[store.axes[key]], made)], branches.branch(key[0]), ALONE)


def _freeze_outputs(context: RuleContext) -> None:
    program = context.index.program
    by_name = {n.name: n for n in program.graph.nodes}
    for spec in program.graph_signature.output_specs:
        node = by_name.get(getattr(spec.arg, "name", ""))
        if spec.kind is OutputKind.USER_OUTPUT and node is not None and isinstance(context.values.get(node), Tensor):
            context.freeze(context.values[node], context.module(node) or node.name, OUTPUT)


def _anchors(index: GraphIndex) -> dict[fx.Node, str]:
    """Where `union` coupling can widen a branch: the module before a sum, past operators that keep zero zero."""
    found = {}
    for node in index.program.graph.nodes:
        if node.op == "call_function" and is_sum(node):
            for operand in node.args[:2]:
                while isinstance(operand, fx.Node) and keeps_zero(operand):
                    operand = operand.args[0]
                module = index.called_once(operand) if isinstance(operand, fx.Node) else None
                if module and ends_branch(operand) and isinstance(index.modules[module], _ConvNd | _NormBase):
                    found[operand] = module
    return found


def _promote(context: RuleContext, module: str, labels: Tensor) -> Tensor:
    """The labels of a stream in place of those of a branch, whose channels are scattered into it."""
    narrow = labels.flatten().numpy()
    if labels.shape[1:2] != labels.flatten().shape:  # channels must sit on axis 1, one label each
        return labels
    known = next((s for s in context.store.streams if s.module == module), None)  # from another graph of this model
    if known is not None:
        context.join(narrow, known.narrow)
    else:
        known = OutputScatter(module, narrow, context.fresh(len(narrow)))
        context.store.streams.append(known)
    return torch.from_numpy(known.wide).view(labels.shape)

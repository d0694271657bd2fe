"""Rules for operators that work element by element: operands share labels position by position.

Which operators these are, and what else is known of them, is in the table of `graph/operator_families.py`.
"""

from typing import Any

import torch
from torch import Tensor, fx

from hap.graph.broadcast_axes import varying_shape
from hap.graph.nodes import arguments, short_name
from hap.groups.components import distinct
from hap.tracing.context import RuleContext
from hap.tracing.labels import compress, long_axes, unlabelled, varies, zeros
from hap.tracing.rules.registry import freeze_all, rule

Operand = tuple[Tensor, tuple[int, ...]]
"""The labels of a tensor, and its shape with 1 along axes where it is merely expanded."""


def operand(context: RuleContext, node: fx.Node, ndim: int) -> Operand:
    """A node's result as an operand with `ndim` axes."""
    labels, shape = context.labels(node), varying_shape(node)
    missing = (1,) * (ndim - len(shape))
    return labels.reshape(missing + tuple(labels.shape)), missing + shape


@rule("pointwise")
def pointwise(context: RuleContext, node: fx.Node) -> Tensor:
    """Operands share labels position by position; an operand of size 1 along an axis has no say there."""
    if not isinstance(node.meta["val"], Tensor):
        return freeze_all(context, node, "has several results")
    ndim = node.meta["val"].ndim
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    matrices = [a for a in tensors if (p := context.parameter(a)) and sum(s > 1 for s in context.index.shapes[p]) > 1]
    operands = [a for a in tensors if a not in matrices]
    if not operands:
        return freeze_all(context, node, "parameters combined with each other")
    sides = [operand(context, a, ndim) for a in operands]
    result, _ = merge(context, short_name(node), sides)
    if sum(varies(labels) for labels, _ in sides) > 1 and context.flow.adds_branches(node):
        context.norms.summed.append(distinct(result))
    for matrix in matrices:
        _tie_matrix(context, context.index.parameters[matrix], result)
    return result


def merge(context: RuleContext, name: str, sides: list[Operand]) -> Operand:
    """Operands broadcast against each other, with the same number of axes, as one; what varies in both is joined."""
    result, known = sides[0]
    for labels, shape in sides[1:]:
        if constrains(result, shape) and constrains(labels, known):
            wide, narrow, seen = result, labels, shape
            if not _lacks_axis(shape, result) and _lacks_axis(known, labels):
                wide, narrow, seen = labels, result, known
            if not _lacks_axis(seen, wide) and varies(wide) == varies(narrow):
                context.join(wide.numpy(), narrow.numpy())
                result = min(result, labels, key=Tensor.numel)  # joined, either speaks for both
            else:
                if _lacks_axis(seen, wide):
                    context.lacks_axes(wide, narrow, long_axes(seen))
                else:
                    context.hold(wide if varies(wide) else narrow, name, "meets something that is never cut")
                result = compress(torch.where(wide != 0, wide, narrow))  # what knows more axes speaks for both
        else:  # one operand is stretched over the other's cut axis: it cannot be cut itself
            result, stretched = (labels, result) if constrains(result, shape) else (result, labels)
            context.freeze(stretched, name, "stretched over an axis that is cut")
        known = tuple(map(max, known, shape))
    return result, known


def _lacks_axis(shape: tuple[int, ...], labels: Tensor) -> bool:
    """Whether a tensor of this shape is stretched along an axis where the labels of the other one vary."""
    return any(size == 1 and varying > 1 for size, varying in zip(shape, labels.shape, strict=True))


def constrains(labels: Tensor, other_shape: tuple[int, ...]) -> bool:
    """Whether pruning a tensor of `other_shape` would also have to prune `labels`, along some axis where those vary."""
    return labels.numel() == 1 or any(s > 1 and o > 1 for s, o in zip(labels.shape, other_shape, strict=True))


def _tie_matrix(context: RuleContext, parameter: str, labels: Tensor) -> None:
    """A parameter with several axes, added or multiplied in: cut it along the one axis where the labels vary."""
    shape = context.index.shapes[parameter]
    lead = labels.ndim - len(shape)
    varying = long_axes(labels.shape)
    shared = [d for d in varying if d >= lead and shape[d - lead] > 1]
    if len(varying) == len(shared) == 1:
        context.tie(parameter, shared[0] - lead, labels.flatten().numpy(), "free")
    elif shared and len(varying) > len(shared):  # it lacks an axis: no say, if whole indices of that one go
        context.lacks_axes(labels, zeros(labels.ndim), shared)
    elif shared or (labels.numel() == 1 and varies(labels)):
        context.freeze(labels, parameter, "a parameter that would have to be cut along several axes")


@rule("glu")
def glu(context: RuleContext, node: fx.Node) -> Any:
    """One half of an axis times a gate, the other: what goes, goes from both."""
    given = arguments(node)
    labels = context.labels(given["self"])
    if labels.shape[given["dim"]] == 1:
        return labels
    values, gate = labels.chunk(2, given["dim"])
    context.join(values.numpy(), gate.numpy())
    return compress(values)


@rule("type_as")
def type_as(context: RuleContext, node: fx.Node) -> Tensor:
    """The second tensor lends its type alone, whatever its shape."""
    return context.labels(node.all_input_nodes[0])


@rule("new", "_assert_tensor_metadata")
def new(context: RuleContext, node: fx.Node) -> Any:
    """A tensor of its own, of the type of another one; or nothing, where something is said of a tensor."""
    return unlabelled(node.meta.get("val"))


@rule("getitem")
def getitem(context: RuleContext, node: fx.Node) -> Any:
    several, place = context.result(node.all_input_nodes[0]), node.args[1]
    return several[int(place)] if isinstance(several, list) else unlabelled(node.meta.get("val"))  # type: ignore[arg-type]

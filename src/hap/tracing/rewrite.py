"""rewrite: a model whose forward fixes its sizes, as a graph of operators in which every size is an attribute.

A forward that computes the width of a head from that of its input, or has sizes written into it, cannot lose heads in
place: no attribute of its modules tells it. The graph that torch.export captures can, since the labels of a trace tell
which number in it counts what.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from hap.execution.calling import describe
from hap.graph.capture import capture
from hap.graph.index import GraphIndex
from hap.graph.nodes import shape_of, short_name
from hap.graph.operator_families import CONVOLUTIONS
from hap.groups.groups import Groups
from hap.groups.types import Ints, SizeAttribute
from hap.tracing.build_groups import GroupsBuilder
from hap.tracing.context import RuleContext
from hap.tracing.walk import walk
from hap.trials.run_round import Subject
from hap.trials.search import find_unprunable


@dataclass(frozen=True)
class Size:
    """A number among a node's arguments that counts rows of labels: at `place`, or at `entry` of the list there."""

    node: str
    place: int
    entry: int | None
    labels: Ints
    per: int = 1

    def classes(self, root: Ints) -> Ints | None:
        """The class of each row, or None where rows do not have one: then all of them stay while anything does."""
        classes = root[self.labels]
        return classes[:, 0] if (classes == classes[:, :1]).all() else None


def rewrite(
    model: nn.Module, example: Any, ignore: Sequence[str] = (), stream: bool = False
) -> tuple[nn.Module, Groups]:
    """A copy of the model as a graph whose sizes can change, and its groups: plan with these, and apply to the copy.

        graph, groups = hap.rewrite(model, example)
        plan = hap.plan(groups, hap.score(model, groups, None, None, "magnitude"), hap.Budget(flops=0.5))
        hap.apply_(graph, plan, example)

    Use it where `hap.trace` says that a forward counts on its sizes. The graph has the parameters of the model under
    the same names, runs in eval mode (dropout and batch statistics are left out) and with the example's batch size.
    """
    program = capture(model, example).program
    context = walk(RuleContext(GraphIndex(model, program, {})), "joint")
    builder = GroupsBuilder(context, "joint", describe(example), stream)
    sizes = list(_sizes(context))
    graph = _graph(program, sizes)

    def sized(found: Groups) -> Groups:
        counts = [(_name(i), size.classes(builder.root), size.per) for i, size in enumerate(sizes)]
        lengths = tuple(SizeAttribute("", name, classes, per) for name, classes, per in counts if classes is not None)
        rewiring = replace(found.rewiring, size_attributes=lengths)
        return replace(found, rewiring=rewiring, conv_geometry={}, used_once=frozenset())

    found = sized(builder.settle(ignore))
    misfits = find_unprunable(Subject(graph, example, found, builder.sized_classes())).unprunable
    counted = dict.fromkeys(misfits, "the graph of the model counts on its size")
    return graph, sized(builder.build_without(found, counted)) if misfits else found


def _name(number: int) -> str:
    return f"size_{number}"


def _graph(program: torch.export.ExportedProgram, sizes: list[Size]) -> nn.Module:
    """The program as a module, with an attribute in place of each of these sizes."""
    module = program.module()
    graph = module.graph
    by_name = {node.name: node for node in graph.nodes}
    for node in [n for n in graph.nodes if n.op == "call_module"]:  # what refuses other inputs than the example
        graph.erase_node(node)
    for number, size in enumerate(sizes):
        node = by_name[size.node]
        old = node.args[size.place] if size.entry is None else node.args[size.place][size.entry]
        setattr(module, _name(number), old)
        with graph.inserting_before(node):
            new: Any = graph.create_node("get_attr", _name(number), name=_name(number))
        if size.entry is not None:
            new = [new if i == size.entry else x for i, x in enumerate(node.args[size.place])]
        node.update_arg(size.place, new)
    return copy.deepcopy(fx.GraphModule(module, graph)).eval()


def _sizes(context: RuleContext) -> Iterator[Size]:
    for node in context.index.program.graph.nodes:
        if node.op == "call_function" and node not in context.views:
            context.reader = node
            yield from _sizes_of(context, node)


def _sizes_of(context: RuleContext, node: fx.Node) -> Iterator[Size]:
    name, args = short_name(node), node.args
    result = context.values.get(node)
    if name in ("view", "reshape", "_unsafe_view", "expand"):
        yield from _listed(node, 1, 0, result)
    elif name in ("zeros", "new_zeros"):
        yield from _listed(node, int(name == "new_zeros"), 0, result)
    elif name == "unflatten":
        yield from _listed(node, 2, args[1] % len(shape_of(args[0])), result)  # type: ignore[operator, arg-type]
    elif name in ("layer_norm", "rms_norm"):
        yield from _listed(node, 1, -len(args[1]), result)  # type: ignore[arg-type]
    elif name in ("split", "split_with_sizes") and isinstance(result, list):
        dim: Any = args[2] if len(args) > 2 else 0
        parts = [_counted(part, dim) for part in result]
        if isinstance(args[1], int):
            yield from (Size(node.name, 1, None, labels) for labels in parts[:1] if labels is not None)
        else:
            yield from (Size(node.name, 1, i, labels) for i, labels in enumerate(parts) if labels is not None)
    elif name == "slice" and len(args) > 2:
        labels = _counted(context.labels(args[0]), args[1])  # type: ignore[arg-type]
        for place, value in ((2, args[2]), (3, args[3] if len(args) > 3 else None)):
            if labels is not None and isinstance(value, int) and 0 < value < len(labels):
                yield Size(node.name, place, None, labels[:value])
    elif name in CONVOLUTIONS and len(args) > 6 and isinstance(args[6], int) and args[6] > 1:
        labels, width = _counted(context.labels(args[0]), 1), shape_of(args[0])[1]  # type: ignore[arg-type]
        per = width // args[6]
        if labels is not None and args[6] >= per:  # whole groups go: rules._tie_groups
            yield Size(node.name, 6, None, labels, per)


def _listed(node: fx.Node, place: int, first: int, result: Any) -> Iterator[Size]:
    """Sizes in a list, of the axes of the result from `first` on."""
    for i, size in enumerate(node.args[place]):  # type: ignore[arg-type]
        labels = _counted(result, first + i) if isinstance(result, Tensor) else None
        if labels is not None and isinstance(size, int) and size == len(labels):
            yield Size(node.name, place, i, labels)


def _counted(labels: Tensor, dim: int) -> Ints | None:
    """A row of labels for each index of an axis, if they vary along it."""
    if not labels.numel() or labels.shape[dim] < 2:
        return None
    return np.ascontiguousarray(labels.movedim(dim, 0).reshape(labels.shape[dim], -1).numpy())

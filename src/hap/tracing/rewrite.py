"""rewrite: a model whose forward fixes its sizes, as a graph of operators in which every size is an attribute.

A forward that computes the width of a head from that of its input, or has sizes written into it, cannot lose heads in
place: no attribute of its modules tells it. The graph that torch.export captures can, since the labels of a trace tell
which number in it counts what.
"""

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
from hap.tracing.trace import walk
from hap.trials.find_unprunable import find_unprunable
from hap.trials.run_round import Subject

LISTING = dict.fromkeys(("_unsafe_view", "expand", "layer_norm", "new_zeros", "reshape", "rms_norm", "view"), 1)
LISTING |= {"unflatten": 2, "zeros": 0}
"""Operators with a list of sizes, which are those of the last axes of the result or of those unfolded, and where."""

NAME = "size_{}".format


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
    context = walk(GraphIndex(model, program, {}), "joint")
    builder = GroupsBuilder(context, "joint", describe(example), stream)
    called = [n for n in program.graph.nodes if n.op == "call_function" and n in context.values]
    sizes = [size for node in called for size in _sizes_of(context, node)]
    graph = _graph(program, sizes)

    def sized(found: Groups) -> Groups:
        counts = [(NAME(i), size.classes(builder.root), size.per) for i, size in enumerate(sizes)]
        lengths = tuple(SizeAttribute("", name, classes, per) for name, classes, per in counts if classes is not None)
        rewiring = replace(found.rewiring, size_attributes=lengths)
        return replace(found, rewiring=rewiring, conv_geometry={}, used_once=frozenset())

    found = sized(builder.settle(ignore))
    misfits = find_unprunable(Subject(graph, example, found, builder.sized_classes())).unprunable
    counted = dict.fromkeys(misfits, "the graph of the model counts on its size")
    return graph, sized(builder.build_without(found, counted)) if misfits else found


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
        setattr(module, NAME(number), old)
        with graph.inserting_before(node):
            new: Any = graph.create_node("get_attr", NAME(number), name=NAME(number))
        if size.entry is not None:
            new = [new if i == size.entry else x for i, x in enumerate(node.args[size.place])]
        node.update_arg(size.place, new)
    return copy.deepcopy(fx.GraphModule(module, graph)).eval()


def _sizes_of(context: RuleContext, node: fx.Node) -> Iterator[Size]:
    context.reader, name, result = node, short_name(node), context.values[node]
    args: Any = node.args
    if name in LISTING and isinstance(result, Tensor):
        sizes = args[LISTING[name]]
        first = args[1] % len(shape_of(args[0])) if name == "unflatten" else -len(sizes)
        for entry, size in enumerate(sizes):
            labels = _rows(result, first + entry)
            if isinstance(size, int) and size == len(labels) > 0:
                yield Size(node.name, LISTING[name], entry, labels)
    elif name in ("split", "split_with_sizes") and isinstance(result, list):
        entries: Sequence[int | None] = [None] if isinstance(args[1], int) else range(len(result))
        for place, part in zip(entries, result, strict=False):  # a single size is that of the first part
            if len(labels := _rows(part, args[2] if len(args) > 2 else 0)):
                yield Size(node.name, 1, place, labels)
    elif name == "slice" and len(args) > 2:
        labels = _rows(context.labels(args[0]), args[1])
        for place, end in enumerate(args[2:4], 2):
            if isinstance(end, int) and 0 < end < len(labels):
                yield Size(node.name, place, None, labels[:end])
    elif name in CONVOLUTIONS and len(args) > 6 and isinstance(args[6], int) and args[6] > 1:
        labels, per = _rows(context.labels(args[0]), 1), shape_of(args[0])[1] // args[6]
        if len(labels) and args[6] >= per:  # whole groups go: rules.layers._tie_groups
            yield Size(node.name, 6, None, labels, per)


def _rows(labels: Tensor, dim: int) -> Ints:
    """A row of labels for each index of an axis; none, if they do not vary along it."""
    if not labels.numel() or labels.shape[dim] < 2:
        return np.zeros((0, 1), np.int64)
    return np.ascontiguousarray(labels.movedim(dim, 0).reshape(labels.shape[dim], -1).numpy())

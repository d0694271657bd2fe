"""The values that a captured graph computes on calibration inputs, one node after another."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from hap.execution.calling import call_arguments
from hap.graph.capture import capture
from hap.graph.index import GraphIndex
from hap.graph.nodes import schema_name
from hap.utils.module_tree import named_tensors


class Graph:
    """A model's graph, in which no operator writes to what it reads, beside the tensors that it reads.

    `parameters` names the parameter or buffer that a node stands for, `tensors` holds them by name.
    """

    def __init__(self, model: nn.Module, example: Any):
        captured = capture(model, example)
        program = _writing_nothing(captured.program)
        self.tensors = named_tensors(model)
        self.parameters = GraphIndex(model, program, captured.called).parameters
        self.graph, self.output = program.graph, program.graph.output_node()
        self.constants: dict[fx.Node, Any] = {}
        self.inputs: list[fx.Node] = []
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        values = {**program.state_dict, **program.constants}
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.constants[node] = getattr(program.graph_module, str(node.target))
            elif node.op == "placeholder" and specs[node.name].kind is InputKind.USER_INPUT:
                self.inputs.append(node)
            elif node.op == "placeholder" and node not in self.parameters:
                self.constants[node] = values[str(specs[node.name].target)]

    def fixed(self, node: Any) -> Tensor | None:
        """The tensor of the model, or the constant, that a node stands for; None for what is computed."""
        name = self.parameters.get(node)
        return self.constants.get(node) if name is None else self.tensors[name].detach()

    def readers(self, parameter: str) -> list[fx.Node]:
        """The nodes that read a parameter."""
        return [user for node, name in self.parameters.items() if name == parameter for user in node.users]


def _writing_nothing(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with operators that return their result in place of those that write to what they read.

    Where one writes to a part of a tensor, torch rewrites all, and splits normalisations into smaller operators.
    """
    graph = program.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    writing = [n for n in place if n.op == "call_function" and getattr(_schema(n), "is_mutable", False)]
    returning = [_returning(node) for node in writing]
    if None in returning:
        return program.run_decompositions({})
    for node, operator in zip(writing, returning, strict=True):
        node.target = operator
        written = node.args[0]
        for user in [u for u in written.users if place[u] > place[node]]:
            user.replace_input_with(written, node)
    return program


def _returning(node: fx.Node) -> Any:
    """The operator that computes the same without writing; None where the tensor may be a part of another."""
    written, name = node.args[0], schema_name(node).removeprefix("aten::").removesuffix("_")
    if not isinstance(written, fx.Node) or written.op != "call_function" or _is_view(written):
        return None
    return getattr(getattr(torch.ops.aten, name, None), _schema(node).overload_name or "default", None)


def _is_view(node: fx.Node) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in getattr(_schema(node), "returns", ()))


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


class GraphRun:
    """The values of a graph's nodes for several inputs, computed when asked for and forgotten when no longer needed.

    `wanted` are the nodes whose values will be let go by `release`, each as often as it stands there. Tensors of the
    model are read when a node is computed: later nodes see what has changed by then.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Any], wanted: Iterable[fx.Node]):
        self.graph = graph
        asked = Counter(wanted)
        reads = Counter(a for node in _ancestors(asked) for a in node.all_input_nodes) + asked
        self.waiting_readers = [reads.copy() for _ in inputs]
        leaves = [pytree.tree_leaves(call_arguments(x)) for x in inputs]
        self.known = [dict(zip(graph.inputs, values, strict=True)) for values in leaves]

    def value(self, node: fx.Node, number: int) -> Any:
        """What a node computes for the input of this number."""
        known, stack = self.known[number], [node]
        while stack:
            last = stack[-1]
            missing = [a for a in last.all_input_nodes if a not in known and self.graph.fixed(a) is None]
            if last in known or self.graph.fixed(last) is not None:
                stack.pop()
            elif missing:
                stack += missing
            else:
                known[last] = self._computed(last, known)
                for read in last.all_input_nodes:
                    self.release(read, number)
        return known[node] if node in known else self.graph.fixed(node)

    def release(self, node: fx.Node, number: int) -> None:
        """One reader of a value less. After the last one it is forgotten."""
        waiting = self.waiting_readers[number]
        waiting[node] -= 1
        if waiting[node] <= 0 and node.op != "placeholder":
            self.known[number].pop(node, None)

    def _computed(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        def look_up(read: fx.Node) -> Any:
            return known[read] if read in known else self.graph.fixed(read)

        args, kwargs = fx.map_arg((node.args, node.kwargs), look_up)
        if node.op == "output":
            return args[0]
        return cast(Any, node.target)(*args, **kwargs)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they depend on."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found

"""GraphIndex: a model beside its captured graph, and the questions that rules and trials ask of the two."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from hap.graph.broadcast_axes import note_given
from hap.graph.capture import CalledArguments
from hap.graph.nodes import shape_of, short_name
from hap.graph.operator_families import Trait, having
from hap.utils.module_tree import named_tensors

MOVED = having(Trait.UNCHANGED) | {"lift_fresh_copy"}
MULTIPLYING, FILLING = having(Trait.MULTIPLIES), having(Trait.FILLS)


@dataclass(frozen=True)
class TableUse:
    """A tensor goes into a module as its argument `argument`."""

    module: str
    argument: int | str


class GraphIndex:
    """What is known of a model and its graph before any label is given out. Nothing here changes later.

    `parameters` names the parameter or buffer that a node stands for. A tensor or module with several names goes by
    the first of them: `canonical` maps the names of tensors, `names` those of modules. `shapes` are those of all
    tensors, `trainable` the parameters among them. `tables` are tensors that several modules are handed, such as one
    relative position bias for all layers of a transformer: each of those modules may lose its own heads if it picks
    its own part of the table as it enters. `table_uses` says by (table, user) where.
    """

    def __init__(self, model: nn.Module, program: torch.export.ExportedProgram, called: CalledArguments):
        self.program = program
        self.called = called
        self.table_uses = _find_table_uses(program, called)
        self.tables = {table for table, _ in self.table_uses}
        tensors = named_tensors(model)
        self.canonical = _first_names(tensors)
        self.shapes = {name: tuple(tensors[name].shape) for name in dict.fromkeys(self.canonical.values())}
        self.trainable = frozenset(n for n in self.shapes if isinstance(tensors[n], nn.Parameter))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.names = _first_names(self.modules)
        self.inputs = {s.arg.name: s for s in program.graph_signature.input_specs}
        self.parameters = {
            node: self.canonical[spec.target]
            for node in program.graph.nodes
            if node.op == "placeholder"
            and (spec := self.inputs[node.name]).kind in (InputKind.PARAMETER, InputKind.BUFFER)
            and spec.target in self.canonical
        }
        self.calls = Counter(self.module(n) for n in program.graph.nodes if n.op == "call_function")
        for node in program.graph.nodes:
            note_given(node, node not in self.parameters if node.op == "placeholder" else None)

    def parameter(self, node: Any) -> str | None:
        """The name of the parameter or buffer that a node stands for; None for anything else."""
        return self.parameters.get(node) if isinstance(node, fx.Node) else None

    def module(self, node: fx.Node) -> str:
        """The innermost module that ran this node, by the first of its names."""
        *_, name = ("", *_stack(node))
        return self.names.get(name, name)

    def module_of(self, node: fx.Node) -> nn.Module | None:
        """That module itself."""
        return self.modules.get(self.module(node))

    def called_once(self, node: fx.Node) -> str | None:
        """The module whose whole work is this node, if it is called just once: the place for a forward hook."""
        module = self.module(node)
        return module if module and self.calls[module] == 1 else None

    def unread(self) -> frozenset[str]:
        """The parameters that no node reads."""
        return self.trainable - {name for node, name in self.parameters.items() if node.users}

    def constant(self, node: Any) -> Tensor | None:
        """The values of a tensor that is written out in the code; None for any other."""
        while isinstance(node, fx.Node) and short_name(node) in MOVED:
            node = node.args[0]
        spec = self.inputs.get(getattr(node, "name", ""))
        if spec is None or spec.kind is not InputKind.CONSTANT_TENSOR:
            return None
        value = self.program.constants.get(str(spec.target))
        return value if isinstance(value, Tensor) else None


def _first_names(named: Mapping[str, Any]) -> dict[str, str]:
    """For each name, the first name of the same object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(item), name) for name, item in named.items()}


# ---- tables that modules share ------------------------------------------------------------------------------


def _find_table_uses(program: Any, arguments: CalledArguments) -> dict[tuple[fx.Node, fx.Node], TableUse]:
    """Where a table that no layer computes enters the modules that use it, if these are several: what one module has to
    itself is cut where it is stored."""
    entries: dict[tuple[fx.Node, fx.Node], TableUse] = {}
    for table in _tables(program):
        outside = _stack(table)
        found = {u: e for u in table.users if (e := _entry(_stack(u), outside, shape_of(table), arguments))}
        if len({e.module for e in found.values()}) + (len(found) < len(table.users)) > 1:
            entries |= {(table, user): entry for user, entry in found.items()}
    return entries


def _entry(stack: list[str], outside: list[str], shape: tuple[int, ...], arguments: CalledArguments) -> TableUse | None:
    """The innermost module on the stack that is called once, with one argument of this shape."""
    for module in reversed([m for m in stack if m not in outside]):
        calls = arguments.get(module, [])
        places = [key for key, size in calls[0].items() if size == shape] if len(calls) == 1 else []
        if len(places) == 1:
            return TableUse(module, places[0])
    return None


def _stack(node: fx.Node) -> list[str]:
    """The modules that were running, outer ones first."""
    return [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _tables(program: Any) -> Iterator[fx.Node]:
    """Results with several axes that come from parameters and masks, and not from what a layer computes or looks up."""
    inputs = {s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT}
    given: set[fx.Node] = set()
    computed: set[fx.Node] = set()
    for node in program.graph.nodes:
        name = short_name(node) if node.op == "call_function" else ""
        if node.name in inputs or any(a in given for a in node.all_input_nodes):
            given.add(node)
        looked_up = name == "embedding" and node in given
        if name in MULTIPLYING or looked_up or any(a in computed for a in node.all_input_nodes):
            computed.add(node)
        value = node.meta.get("val")
        several = isinstance(value, Tensor) and value.ndim > 2 and len(node.users) > 1
        if name and several and node not in computed and name not in FILLING:
            yield node

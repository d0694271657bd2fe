"""Tables that several modules are handed, such as one relative position bias for all layers of a transformer.

Each of those modules may lose its own heads if it picks its own part of the table as it enters.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from hap.graph.nodes import shape_of, short_name
from hap.graph.operator_families import Trait, having
from hap.utils.module_tree import takes_hooks

CalledArguments = dict[str, list[dict[int | str, tuple[int, ...]]]]
"""By module, for each of its calls, the shapes of the tensors that it is called with."""

MULTIPLYING, FILLING = having(Trait.MULTIPLIES), having(Trait.FILLS)


@dataclass(frozen=True)
class TableUse:
    """A tensor goes into a module as its argument `argument`."""

    module: str
    argument: int | str


@contextmanager
def recording_calls(model: nn.Module) -> Iterator[tuple[CalledArguments, dict[str, int]]]:
    """Notes what modules are called with. Of those with submodules it counts the calls that return one tensor just like
    their first argument; -1: some other call."""
    called: CalledArguments = {}
    alike: dict[str, int] = {}

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        called.setdefault(name, []).append({k: tuple(v.shape) for k, v in given if isinstance(v, Tensor)})

    def leave(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        same = bool(args) and all(isinstance(x, Tensor) for x in (args[0], output))
        same = same and (args[0].shape, args[0].dtype) == (output.shape, output.dtype)
        alike[name] = alike.get(name, 0) + 1 if same and alike.get(name, 0) >= 0 else -1

    with ExitStack() as stack:
        for name, module in ((n, m) for n, m in model.named_modules() if takes_hooks(m)):
            stack.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            if name and [*module.children()]:
                stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        yield called, alike


def find_entries(program: Any, arguments: CalledArguments) -> dict[tuple[fx.Node, fx.Node], TableUse]:
    """By (table, user): where a table that no layer computes enters the module in which it is used.

    Only tables that are used in several places: what one module has to itself is cut where it is stored.
    """
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

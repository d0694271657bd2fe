"""Recurrent layers: how units pass through LSTM, GRU and RNN layers and their cells, and what follows when some go.

A hidden unit owns a row of every gate in the weights and biases of a layer, the column of the recurrent weight that
reads it, and a feature of the outputs and states. All layers and directions of a module have one hidden size, so that
unit j goes from all of them. With its parameters at zero a unit starts at zero and stays there.
"""

import math
from typing import Any

import numpy as np
from torch import fx

from hap.graph.nodes import arguments, shape_of, short_name
from hap.graph.operator_families import GATES, STRUCTURAL, Trait, having
from hap.groups.types import Ints
from hap.tracing.context import RuleContext, labels_of_axis
from hap.tracing.labels import labels_on_axis, varies
from hap.tracing.rules.registry import COMPUTED, freeze_all, rule
from hap.tracing.weight_views import View

UNCHANGED = having(Trait.UNCHANGED)
STRETCHING = UNCHANGED | having(Trait.EXPANDS) | having(Trait.SAME_ORDER) | {"repeat"}


@rule("recurrent", "cell")
def recurrent(context: RuleContext, node: fx.Node) -> Any:
    """Outputs (batch and steps, in either order, x features) and the states after the last step.

    A cell is one step of one layer, from one state to the next; it returns its states alone.
    """
    given = arguments(node)
    if "batch_sizes" in given:
        return freeze_all(context, node, "reads a packed sequence")
    is_cell = "w_ih" in given
    if is_cell:
        weights = [given[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh") if given[name] is not None]
        per, sides = len(weights), 1
    else:
        weights, per, sides = given["params"], 4 if given["has_biases"] else 2, 2 if given["bidirectional"] else 1
        if len(weights) != per * sides * given["num_layers"]:
            return freeze_all(context, node, "projects its states (proj_size)")
    names = [name for weight in weights if (name := context.parameter(weight)) is not None]
    if len(names) < len(weights):
        return freeze_all(context, node, COMPUTED)
    units = _units(context, node, given["input"], [names[i : i + per] for i in range(0, len(names), per)], sides)
    states = [*given["hx"]] if isinstance(given["hx"], list | tuple) else [given["hx"]]
    _start(context, node, states, units)
    last = [labels_on_axis(units, 2 if is_cell else 3, -1) for _ in states]
    if is_cell:
        return last if isinstance(node.meta["val"], list | tuple) else last[0]
    return [labels_on_axis(np.tile(units, sides), 3, -1), *last]


def _units(context: RuleContext, node: fx.Node, x: fx.Node, directions: list[list[str]], sides: int) -> Ints:
    """The labels of the hidden units, once all that computes and reads them is tied. `directions` have the names of the
    weight of the inputs, of that of the states, and of the biases, for each direction of each layer."""
    gates = GATES[short_name(node).removesuffix("_cell")]
    hidden = context.index.shapes[directions[0][1]][1]
    units = context.axis(directions[0][0], 0, "out")[:hidden]
    for place, (of_inputs, of_states, *biases) in enumerate(directions):
        read = _features(context, node, x) if place < sides else np.tile(units, sides)
        for weight, labels in ((of_inputs, read), (of_states, units)):
            context.join(context.axis(weight, 0, "out").reshape(gates, hidden), units)
            context.tie(weight, 1, labels, "in")
            context.contraction(node, View.of(weight, context.index.shapes[weight]), math.prod(shape_of(x)[:-1]))
        for bias in biases:
            context.tie(bias, 0, np.tile(units, gates), "free")
    return units


def _features(context: RuleContext, node: fx.Node, x: fx.Node) -> Ints:
    """The labels of what a layer reads or starts from, along the last axis."""
    labels = context.labels(x)
    if labels.numel() > 1 and labels.shape[-1] == 1:
        context.freeze(labels, short_name(node), "runs along an axis that would be cut")
        return np.zeros(shape_of(x)[-1], dtype=np.int64)
    return labels_of_axis(context, x, -1)


# ---- initial states -----------------------------------------------------------------------------------------------


def _start(context: RuleContext, node: fx.Node, states: list[fx.Node], units: Ints) -> None:
    """States to start from share the fate of the units. Zeros are made as long as the units that are left."""
    for state in states:
        zeros = _zeros(state)
        if zeros is not None and not varies(context.values[zeros]):
            if shape_of(zeros)[-1] == len(units):
                context.values[zeros] = labels_on_axis(units, len(shape_of(zeros)), -1)
            if context.module(zeros) != context.module(node):  # a forward that makes them has their size from somewhere
                context.sized(units)
                context.keep_rectangular(zeros, context.values[zeros])
            continue
        labels = _features(context, node, state if zeros is None else zeros)
        what = context.module(node) or short_name(node)
        context.freeze(units[labels == 0], what, "it starts from a state that is never cut")
        context.join(labels[labels != 0], units[labels != 0])


def _zeros(node: fx.Node) -> fx.Node | None:
    """The node that makes zeros which nobody writes to, if these are seen here, as they are or in another shape."""
    while node.op == "call_function" and short_name(node) in STRETCHING:
        node = node.all_input_nodes[0]
    made = node.op == "call_function" and short_name(node) in ("zeros", "new_zeros")
    return node if made and not _written_to(node) else None


def _written_to(node: fx.Node) -> bool:
    """Whether a tensor, or a view of it, is written to."""
    users = [user for user in node.users if user.op == "call_function"]
    written = any(short_name(user).endswith("_") for user in users)
    return written or any(_written_to(user) for user in users if short_name(user) in STRUCTURAL | UNCHANGED)

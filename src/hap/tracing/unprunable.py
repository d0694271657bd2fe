"""What stays whole that a user would expect to shrink, and why.

Not counted are what a model gives out, such as the classes of a classifier; the residual stream, unless it was asked
for; what is left alone as asked; and what the example does not reach, or training alone does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from hap.graph.nodes import is_pointwise, schema_name, short_name
from hap.groups.components import components
from hap.groups.types import Bools, Frozen, Ints
from hap.groups.unprunable_summary import layer_of
from hap.tracing.rules import registry
from hap.tracing.training_branches import ALONE

if TYPE_CHECKING:
    from hap.tracing.trace import Tracer

OUTPUT = "an output of the model"
STREAM = "the residual stream; ask for it with stream=True"
ASKED = "left alone as asked"
EXPECTED = frozenset((OUTPUT, STREAM, ASKED, ALONE))
"""Why something stays that nobody expects to go."""
NEVER_CUT = "meets something that is never cut"
NOT_KNOWN = "uses a weight in a way that is not understood"


def find_untouched(tracer: Tracer, axes: dict[tuple[str, int], Ints], count: int) -> dict[str, Frozen]:
    """The parameters that no class of `axes` cuts though one could expect it, each with a reason.

    What is frozen is one class. So labels, of which there are `count`, are joined here once more without that class.
    """
    none = np.zeros(0, np.int64)
    a, b = (np.concatenate([none, *(bond[i] for bond in tracer.bonds)]) for i in range(2))
    root = components(count, a, b)
    tracer.bonds[:] = [(np.arange(count), root)]  # says the same in fewer words
    reason = np.full(len(root), -1)
    for i, (labels, _) in reversed([*enumerate(tracer.causes)]):
        reason[root[labels]] = i
    expected = _expected(tracer, root)
    cut = {name for (name, _), classes in axes.items() if classes.any()}
    readers = _readers(tracer)
    found = {}
    for name in sorted(tracer.index.trainable & readers.keys() - cut):
        dims = [d for d, size in enumerate(tracer.index.shapes[name]) if size > 1]
        seen = [(name, d) for d in dims if (name, d) in tracer.axes and tracer.axes[name, d].any()]
        stays = {key: x[~expected[x]] for key in seen if not expected[x := root[tracer.axes[key]]].all()}
        reasons = reason[np.concatenate([none, *stays.values()])]
        if (reasons >= 0).any():
            found[name] = tracer.causes[reasons[reasons >= 0].min()][1]
        elif any(tracer.roles[key] == "out" for key in stays):
            found[name] = Frozen(layer_of(name), NEVER_CUT)
        elif dims and not seen and all(tracer.roles.get((name, d), "free") == "free" for d in dims):
            found[name] = _unknown_use(readers[name])
    return found


def _expected(tracer: Tracer, root: Ints) -> Bools:
    """Which components hold something that stays for a reason that one expects."""
    expected = np.zeros(len(root), dtype=bool)
    for labels in (labels for labels, cause in tracer.causes if cause.why in EXPECTED):
        expected[root[labels]] = True
    if not tracer.stream:
        none = np.zeros(0, np.int64)
        summed, normed = (root[np.concatenate([none, *x])] for x in (tracer.summed, tracer.normed))
        expected[np.intersect1d(summed, normed)] = True
    expected[0] = True
    return expected


def _readers(tracer: Tracer) -> dict[str, list[fx.Node]]:
    """The operators that read each parameter, where some do."""
    found: dict[str, list[fx.Node]] = {}
    for node, name in tracer.index.parameters.items():
        if node.users:
            found.setdefault(name, []).extend(node.users)
    return found


def _unknown_use(readers: list[fx.Node]) -> Frozen:
    """The first operator that computes with a weight and has no rule, or else the first."""
    readers = [_past_moves(node) for node in readers]
    unknown = [n for n in readers if schema_name(n) not in registry.RULES and not is_pointwise(n)]
    node = (unknown or readers)[0]
    return Frozen(short_name(node), registry.NO_RULE if unknown else NOT_KNOWN)


def _past_moves(node: fx.Node) -> fx.Node:
    """The first that reads what this one only moves, such as by a transpose."""
    while registry.RULES.get(schema_name(node)) is registry.structural and node.users:
        node = next(iter(node.users))
    return node

"""trace: model -> groups, by pushing labels through the operator graph that torch.export captures.

`walk` gives labels to the results of all operators, `GroupsBuilder` makes groups of them, and trials (`hap.trials`)
find out what no graph tells: which groups a forward can do without, and which attributes of modules have to follow.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hap.errors import Argument, HapError
from hap.execution.calling import describe
from hap.graph.capture import Captured, capture, check_runs
from hap.graph.index import GraphIndex
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import heads
from hap.tracing.build_groups import GroupsBuilder
from hap.tracing.context import RuleContext
from hap.tracing.training_branches import training_only, warn_of_idle
from hap.tracing.walk import walk, walk_training_branches
from hap.trials.repeated_blocks import find_repeats
from hap.trials.run_round import Subject
from hap.trials.search import find_unprunable
from hap.utils.gc_pause import gc_paused
from hap.verification.informative_values import informative_example

COUPLINGS = ("joint", "union")
INDISTINGUISHABLE = "the example does not show how it is split into heads; trace with several different tokens"


@gc_paused()
def trace(
    model: nn.Module, example: Any, coupling: str = "joint", ignore: Sequence[str] = (), stream: bool = False
) -> Groups:
    """Find what can be removed from a model, and what must go together. The model is not changed.

    Arguments:
        model: any module that torch.export can capture; see `hap.parts` for others.
        example: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
        coupling: what happens where branches add up. "joint": a channel goes from all branches or none. "union": each
            branch loses its own channels and the sum keeps the union (the paper's way).
        ignore: names or shell patterns of groups to leave alone.
        stream: whether the residual stream of a transformer, which a norm spans, can be cut too.

    Returns:
        The groups of units by name; `print` shows them, and what is frozen, with the reason.

    >>> import hap, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> hap.trace(model, torch.randn(1, 4)).units
    8
    """
    if coupling not in COUPLINGS:
        seen = Argument("coupling", coupling, text="coupling")
        raise HapError(seen, f" is {coupling!r}; expected one of {', '.join(map(repr, COUPLINGS))}")
    return trace_captured(capture(model, example), model, example, coupling, ignore, stream)


@gc_paused()
def trace_captured(
    captured: Captured, model: nn.Module, example: Any, coupling: str, ignore: Sequence[str], stream: bool
) -> Groups:
    """Trace a model whose operator graph is already captured. Arguments as in `trace`."""
    shapes = captured.shapes
    index = GraphIndex(model, captured.program, captured.called)
    context = walk(RuleContext(index), coupling)
    branches, unread = training_only(model, example, index.unread())
    if branches is not None:
        walk_training_branches(context, branches, coupling)
    builder = GroupsBuilder(context, coupling, describe(example), stream)
    groups = builder.settle(ignore)
    counting = builder.counting_attributes()
    repeats = find_repeats(index, builder.classes_of, groups, counting, shapes)
    telling = informative_example(model, example)
    sized, sliced = builder.sized_classes(), builder.sliced_classes()
    result = find_unprunable(Subject(model, telling, groups, sized, sliced, counting, repeats))
    if result.unprunable and not result.ran:  # is it the size, or does nothing run at all?
        check_runs(model, example)
    if result.indistinguishable:
        _warn_of(result.indistinguishable)
    context.sizes.attributes += result.followers
    reasons = result.unprunable | dict.fromkeys(result.indistinguishable, INDISTINGUISHABLE)
    if reasons or (result.followers and groups.traits.zero_padded):
        groups = _without(builder, groups, reasons, model, telling, shapes)
    elif result.followers:
        groups = groups.with_rewiring(size_attributes=result.followers)
    if branches is not None and (unfit := branches.misfits(groups)):
        groups = builder.build_without(groups, unfit)
    warn_of_idle(model, groups, unread)
    return groups


def _without(
    builder: GroupsBuilder,
    groups: Groups,
    misfits: Mapping[str, str],
    model: nn.Module,
    example: Any,
    shapes: Mapping[str, int],
) -> Groups:
    """The groups without those that a forward does not do without, each for a reason.

    Of heads, zeros stand in for those that go.
    """
    held = [n for n in misfits if n in heads(groups) and not groups.pads(n)]
    for name in held:
        builder.store.hold(groups[name].classes, name, misfits[name])
    found = builder.build_without(groups, {name: why for name, why in misfits.items() if name not in held})
    if among := [n for n in held if n in found]:
        repeats = find_repeats(builder.context.index, builder.classes_of, found, [], shapes)
        sized, sliced = builder.sized_classes(), builder.sliced_classes()
        wrong = find_unprunable(Subject(model, example, found, sized, sliced, repeats=repeats), among).unprunable
        found = builder.build_without(found, wrong) if wrong else found
    return found


def _warn_of(names: Sequence[str]) -> None:
    those = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    warnings.warn(
        f"the example does not show how {those} {'is' if len(names) == 1 else 'are'} split into heads: any "
        "split would do on one token, or on tokens that are all alike. So zeros stand in for the heads that go, or "
        "none go. Trace with several different tokens to remove them whole",
        stacklevel=6,
    )

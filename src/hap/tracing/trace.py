"""trace: model -> groups, by pushing labels through the operator graph that torch.export captures.

`walk` gives labels to the results of all operators, `GroupsBuilder` makes groups of them, and trials (`hap.trials`)
find out what no graph tells: which groups a forward can do without, and which attributes of modules have to follow.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from hap.errors import Argument, HapError
from hap.execution.calling import describe
from hap.graph.capture import Captured, capture, check_runs
from hap.graph.index import GraphIndex
from hap.graph.nodes import ends_branch, is_sum, keeps_zero
from hap.groups.components import occurring
from hap.groups.groups import Groups
from hap.groups.types import OutputScatter, SizeAttribute
from hap.tracing.build_groups import OUTPUT, GroupsBuilder
from hap.tracing.context import RuleContext
from hap.tracing.label_classes import classes_of_labels
from hap.tracing.labels import LabelStore, zeros
from hap.tracing.rules.registry import apply
from hap.tracing.training_branches import ALONE, TrainingOnly, branch_of, training_only, warn_of_idle
from hap.trials.find_unprunable import find_unprunable
from hap.trials.repeated_blocks import find_repeats
from hap.trials.run_round import Subject
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
    index = GraphIndex(model, captured.program, captured.called)
    context = walk(index, coupling)
    branches, unread = training_only(model, example, index.unread())
    if branches is not None:
        walk_training_branches(context, branches, coupling)
    builder = GroupsBuilder(context, coupling, describe(example), stream)
    groups = builder.settle(ignore)
    telling = informative_example(model, example)

    def subject(groups: Groups, counting: list[SizeAttribute]) -> Subject:
        repeats = find_repeats(index, builder.classes_of, groups, counting, captured.shapes)
        sized, sliced = builder.sized_classes(), builder.sliced_classes()
        return Subject(model, telling, groups, sized, sliced, counting, repeats)

    result = find_unprunable(subject(groups, builder.counting_attributes()))
    if result.unprunable and not result.ran:  # is it the size, or does nothing run at all?
        check_runs(model, example)
    if result.indistinguishable:
        _warn_of(result.indistinguishable)
    context.wiring.attributes += result.followers
    reasons = result.unprunable | dict.fromkeys(result.indistinguishable, INDISTINGUISHABLE)
    if reasons or (result.followers and groups.traits.zero_padded):
        groups, among = builder.build_with_padding(groups, reasons)
        wrong = find_unprunable(subject(groups, []), among).unprunable if among else {}
        groups = builder.build_without(groups, wrong) if wrong else groups
    elif result.followers:
        groups = groups.with_rewiring(size_attributes=result.followers)
    if branches is not None and (unfit := branches.misfits(groups)):
        groups = builder.build_without(groups, unfit)
    warn_of_idle(model, groups, unread)
    return groups


def _warn_of(names: Sequence[str]) -> None:
    those = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    warnings.warn(
        f"the example does not show how {those} {'is' if len(names) == 1 else 'are'} split into heads: any "
        "split would do on one token, or on tokens that are all alike. So zeros stand in for the heads that go, or "
        "none go. Trace with several different tokens to remove them whole",
        stacklevel=6,
    )


# ---- labels go through a graph ------------------------------------------------------------------------------------


def walk(index: GraphIndex, coupling: str, store: LabelStore | None = None) -> RuleContext:
    """Give every result in the graph its labels. In "union" `coupling`, branches lose their own channels."""
    context = RuleContext(index, store, apply)
    anchors = _anchors(index) if coupling == "union" else {}
    for node in index.program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node not in index.parameters and isinstance(value, Tensor):
            context.values[node] = zeros(value.ndim)
        elif node.op == "call_function" and node not in context.views:  # a layer asks for views when it gets there
            context.values[node] = apply(context, node)
            if node in anchors:
                context.values[node] = _promote(context, anchors[node], context.values[node])
    by_name = {node.name: (node, x) for node, x in context.values.items() if isinstance(x, Tensor)}
    for node, labels in (by_name[x] for x in index.program.graph_signature.user_outputs if x in by_name):
        context.freeze(labels, context.module(node) or node.name, OUTPUT)
    return context


def walk_training_branches(context: RuleContext, branches: TrainingOnly, coupling: str) -> None:
    """Cut what runs in training alone with what it reads: labels of both graphs meet in the same parameters.

    What it computes for itself stays. What the graph of training costs, and shows of heads and norms, does not count.
    """
    if (captured := branches.captured()) is None:
        return
    store = context.store
    other = walk(GraphIndex(branches.model, captured.program, captured.called), coupling, store)
    known = {x.module for x in context.wiring.attributes}
    context.wiring.attributes += [x for x in other.wiring.attributes if x.module not in known]
    own = [key for key in store.axes if key[0] in branches.parameters]
    store.roles.update({key: "free" for key in own if store.roles[key] == "out"})
    root = classes_of_labels(store)
    made = occurring(store.count, (root[x] for x in store.computed()))
    made[0] = True
    for key in own:
        branch = branch_of(branches.model, branches.parameters, key[0])
        store.freeze(store.axes[key][~made[root[store.axes[key]]]], branch, ALONE)


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
    if known is None:
        known = OutputScatter(module, narrow, context.fresh(len(narrow)))
        context.store.streams.append(known)
    context.join(narrow, known.narrow)
    return torch.from_numpy(known.wide).view(labels.shape)

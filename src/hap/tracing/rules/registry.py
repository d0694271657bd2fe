"""The table of rules: how labels pass through each kind of operator, and which of them it joins.

A rule takes the context and a graph node and returns the labels of the result: an int64 tensor with as many axes as
the result, of size 1 along every axis where labels do not vary (a list of such tensors for several results).
Operators without a rule freeze what they touch. To teach HAP a new operator: `hap.rules.RULES["myops::op"] = rule`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from hap.graph.nodes import arguments, is_pointwise, schema_name, short_name
from hap.graph.operator_families import Trait, family, having
from hap.planning.mac_counter import Counter
from hap.tracing.context import RuleContext
from hap.tracing.labels import unlabelled

Rule = Callable[[RuleContext, fx.Node], Any]
COMPUTED = "its weight is computed from activations, or in a way that is not understood"
NO_RULE = "no rule for this operator"
LINEAR, MULTIPLYING, RECURRENT = having(Trait.PIECEWISE_LINEAR), having(Trait.MULTIPLIES), family("recurrent", "cell")
RULES: dict[str, Rule] = {}
"""By the full name of an operator, such as `aten::conv2d`."""
OF_FAMILIES: dict[str, Rule] = {}
"""Rules by the name of a family of operators: see `operator_families`."""


def rule(*families: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of all operators that are declared in these families: see `operator_families`."""

    def register(function: Rule) -> Rule:
        for name in families:
            if not (names := family(name)):
                raise ValueError(f"no operator is declared in the family {name!r}; declare it in operator_families")
            OF_FAMILIES[name] = function
            RULES.update({n if n == "getitem" else f"aten::{n}": function for n in names})
        return function

    return register


def apply(context: RuleContext, node: fx.Node) -> Any:
    """The labels of a node's result, by its rule, or frozen if there is none."""
    outer, context.reader = context.reader, node
    handler = RULES.get(schema_name(node)) or (OF_FAMILIES["pointwise"] if is_pointwise(node) else None)
    labels = handler(context, node) if handler is not None else freeze_all(context, node, _unknown(node))
    context.reader = outer
    if context.costs.curved is None and not keeps_linear(context, node):
        context.costs.curved = short_name(node)
    context.flow.follow(node, labels)
    return labels


def _unknown(node: fx.Node) -> str:
    """Why an operator without a rule freezes what it touches. Recurrent ones draw in training alone."""
    may_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return "the forward draws at random" if may_draw and arguments(node).get("train", True) else NO_RULE


def keeps_linear(context: RuleContext, node: fx.Node) -> bool:
    """Whether the result is piecewise linear in the activations that enter."""
    name = short_name(node)
    own_statistics = name == "batch_norm" and node.args[5]  # of the batch
    computed = name in LINEAR & MULTIPLYING and context.parameter(node.args[1]) is None
    if own_statistics or computed or name in RECURRENT:  # recurrent layers use their weights at every step
        return False
    if name in LINEAR or name == "getitem" or not isinstance(node.meta.get("val"), Tensor):
        return True
    active = [isinstance(a, fx.Node) and a not in context.index.parameters for a in node.args]
    if name in ("mul", "mul_"):  # scaling by a number or a parameter is linear, a product of two activations is not
        return sum(active) < 2
    if name in ("div", "div_"):
        return active[:2] == [True, False]
    return not any(active)


def freeze_all(context: RuleContext, node: fx.Node, why: str = NO_RULE) -> Any:
    """Give up on an operator: all that enters stays, for a reason, and it costs what it costs."""
    macs, uncounted = _counted(node)
    context.costs.fixed += macs
    context.costs.uncounted |= uncounted
    for labels in context.entering(node):
        context.freeze(labels, short_name(node), why)
    return unlabelled(node.meta.get("val"))


def _counted(node: fx.Node) -> tuple[int, set[str]]:
    """The multiply-adds of an operator as it stands, counted on tensors without data, and what may hide more."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: a.meta.get("val"))
    fakes = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, FakeTensor)]
    if not fakes or not isinstance(node.target, torch._ops.OpOverload):
        return 0, set()
    try:
        with fakes[0].fake_mode, Counter() as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            node.target(*args, **kwargs)
    except RuntimeError:  # such as in torch.vmap, whose tensors mean nothing outside
        return 0, {short_name(node)}
    return counter.get_total_flops() // 2, counter.unknown

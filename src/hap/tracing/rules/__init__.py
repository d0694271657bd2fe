"""The rules of operators: how labels pass through each kind of operator, and which of them it joins.

This package is `hap.rules`. A rule is a function of a `RuleContext` and a node of the captured graph that returns the
labels of the node's result: docs/extending.md shows how to write one. What `__all__` lists is for rules of your own:
the table `RULES`, rules that exist already, and what a rule needs beside the methods of its context.

Each other module has the rules of some families of operators and registers them when it is imported, which happens
here. Which operators belong to a family, and what else holds for them, is declared in `hap.graph.operator_families`.
Start with `elementwise`.
"""

from hap.graph.nodes import arguments, shape_of
from hap.tracing.context import RuleContext, join_along, labels_of_axis
from hap.tracing.labels import labels_on_axis
from hap.tracing.rules import layers, products, recurrent
from hap.tracing.rules.elementwise import pointwise
from hap.tracing.rules.norms_and_reductions import pooling, reduction
from hap.tracing.rules.registry import RULES, freeze_all, rule
from hap.tracing.rules.structural import structural

__all__ = [
    "RULES", "RuleContext", "arguments", "freeze_all", "join_along", "labels_of_axis", "labels_on_axis", "layers",
    "pointwise", "pooling", "products", "recurrent", "reduction", "rule", "shape_of", "structural",
]  # fmt: skip

"""The rules of operators: how labels pass through each kind of operator, and which of them it joins.

`registry` holds the table `RULES` and what is asked of it; each other module has the rules of one family of operators
and registers them when it is imported, which happens here. `hap.rules` is this package: what it exports is what a rule
of your own may use (docs/extending.md). Start with `elementwise`.
"""

from hap.graph.nodes import shape_of
from hap.tracing.rules import norms, products, recurrent
from hap.tracing.rules.registry import (
    RULES,
    freeze_all,
    labels_of_axis,
    labels_on_axis,
    pointwise,
    pooling,
    reduction,
    rule,
    structural,
)

__all__ = [
    "RULES",
    "freeze_all",
    "labels_of_axis",
    "labels_on_axis",
    "norms",
    "pointwise",
    "pooling",
    "products",
    "recurrent",
    "reduction",
    "rule",
    "shape_of",
    "structural",
]  # fmt: skip

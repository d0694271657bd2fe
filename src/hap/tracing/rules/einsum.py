"""Rules for weights that a forward multiplies in itself, by einsum, tensordot or a product batch by batch."""

from __future__ import annotations

import math
from string import ascii_letters

import numpy as np
from torch import Tensor, fx

from hap.graph.nodes import shape_of
from hap.groups.types import Ints
from hap.tracing.context import RuleContext, join_along, labels_of_axis
from hap.tracing.label_tensors import labels_on_axis, zeros
from hap.tracing.rules.registry import freeze_all
from hap.tracing.weight_views import View


def spelled(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """The letters of operands with so many axes each, and of the result: dots written out, the result too."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms, spare = left.split(","), [c for c in ascii_letters if c not in equation]
    hidden = [ndim - len(term) + 3 if "..." in term else 0 for term, ndim in zip(terms, ndims, strict=True)]
    dots = "".join(spare[: max(hidden)])
    terms = [term.replace("...", dots[len(dots) - n :]) for term, n in zip(terms, hidden, strict=True)]
    if not arrow:
        result = "..." + "".join(sorted(c for c in {*left} - {*".,"} if left.count(c) == 1))
    return terms, result.replace("...", dots)


def weighted(context: RuleContext, node: fx.Node, x: fx.Node, axes: str, view: View, term: str, result: str) -> Tensor:
    """Labels of einsum("axes,term->result", x, weight): a layer whose weight may have several axes of either kind.

    Of those that it reads, and of those that it computes, one can be cut: the first.
    """
    own = {c: len(index) for c, index in zip(term, view.index, strict=True)}
    sizes = dict(zip(axes, shape_of(x), strict=True)) | own
    if any(own.get(c, size) != size for c, size in zip(axes, shape_of(x), strict=True)):
        return freeze_all(context, node, "stretches an axis of length one")
    steps = {c: size for c, size in sizes.items() if c in term + result}  # an axis of x alone is summed over first
    cut = [c for c, size in zip(axes, context.labels(x).shape, strict=True) if size > 1]
    inputs = {c: np.zeros(size, dtype=np.int64) for c, size in sizes.items()}
    passing, made = [c for c in cut if c in result], [c for c in result if c not in axes]
    if len(passing) > 1 or any(c not in term + result for c in cut) or any(c not in axes + result for c in term):
        return freeze_all(context, node, "an equation that is not understood")
    if passing:
        inputs[passing[0]] = _passed(context, x, [axes.index(c) for c in cut if c not in passing])
        context.activation_product(inputs[passing[0]], math.prod(steps.values()) // sizes[passing[0]])
    else:
        if cut:
            inputs[cut[0]] = labels_of_axis(context, x, axes.index(cut[0]))
        context.contraction(node, view, math.prod(size for c, size in steps.items() if c not in term))
    for c in (c for c in term if c in axes):
        context.tie_inputs(view, term.index(c), inputs[c])
    outputs = {c: context.outputs(view, term.index(c)) for c in made[:1]}
    if passing:
        for labels in outputs.values():
            context.freeze(labels, view.name, "works along an axis that is not cut")
    for c in made[1:]:
        axis = term.index(c)
        context.join(context.axis(view.name, view.dims[axis])[view.index[axis]], np.zeros(sizes[c], dtype=np.int64))
    way = next(iter(passing or made), None)
    if way is None:
        return zeros(len(result))
    return labels_on_axis((inputs | outputs)[way], len(result), result.index(way))


def _passed(context: RuleContext, x: fx.Node, summed: list[int]) -> Ints:
    """What is cut along an axis that is not summed over, such as heads, passes, whole; the weight's outputs stay."""
    return join_along(context, context.labels(x), summed).flatten().numpy()

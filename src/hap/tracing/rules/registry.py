"""One rule per kind of operator: how labels pass through it and which of them it joins.

A rule takes the tracer and a graph node and returns the labels of the result: an int64 tensor with as many axes as
the result, of size 1 along every axis where labels do not vary (a list of such tensors for several results).
Operators without a rule freeze what they touch. To teach HAP a new operator: `hap.rules.RULES["myops::op"] = rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from hap.graph.broadcast_axes import varying_shape
from hap.graph.nodes import arguments, is_pointwise, schema_name, shape_of, short_name
from hap.graph.operator_families import (
    AVERAGES,
    CONVOLUTIONS,
    PADDING,
    PARTS,
    PIECEWISE_LINEAR,
    POINTWISE,
    POOLING,
    RECURRENT,
    REDUCTIONS,
    SIZED,
    SOFTMAXES,
    STRUCTURAL,
    SUMS,
    TRANSPOSED,
)
from hap.groups.components import distinct
from hap.groups.types import ActivationMacs, ConvGeometry, Ints
from hap.planning.mac_counter import Counter
from hap.tracing import weight_views

if TYPE_CHECKING:
    from hap.tracing.trace import Tracer

Rule = Callable[["Tracer", fx.Node], Any]
COMPUTED = "its weight is computed from activations, or in a way that is not understood"
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys((f"aten::{n}" for n in names), function))
        return function

    return register


def apply(tracer: Tracer, node: fx.Node) -> Any:
    """The labels of a node's result, by its rule, or frozen if there is none."""
    if tracer.curved is None and not keeps_linear(tracer, node):
        tracer.curved = short_name(node)
    handler = RULES.get(schema_name(node)) or (pointwise if is_pointwise(node) else None)
    labels = handler(tracer, node) if handler is not None else freeze_all(tracer, node, _unknown(node))
    tracer.sources[node] = sources(tracer, node)
    return labels


def _unknown(node: fx.Node) -> str:
    """Why an operator without a rule freezes what it touches. Recurrent ones draw in training alone."""
    may_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return "the forward draws at random" if may_draw and arguments(node).get("train", True) else NO_RULE


def sources(tracer: Tracer, node: fx.Node) -> frozenset[fx.Node]:
    """The layers, tables and sums of branches that a result is computed from, with none of these in between."""
    if node in tracer.layers or short_name(node) == "embedding" or _adds_branches(tracer, node):
        return frozenset([node])
    return frozenset().union(*(tracer.sources.get(a, ()) for a in node.all_input_nodes))


def _adds_branches(tracer: Tracer, node: fx.Node) -> bool:
    """Whether it adds what comes from different layers. A norm that adds its input to the same, scaled, does not."""
    operands = {tracer.sources[a] for a in node.all_input_nodes if tracer.sources.get(a)}
    return short_name(node) in SUMS and len(operands) > 1


def keeps_linear(tracer: Tracer, node: fx.Node) -> bool:
    """Whether the result is piecewise linear in the activations that enter."""
    name = short_name(node)
    if name == "batch_norm" and node.args[5]:  # normalises with the batch's own statistics
        return False
    if name in RECURRENT:  # uses its weights at every step, even where it has no curve of its own
        return False
    if name in CONVOLUTIONS | TRANSPOSED | {"linear"} and tracer.parameter(node.args[1]) is None:
        return False
    if name in PIECEWISE_LINEAR or name == "getitem" or not isinstance(node.meta.get("val"), Tensor):
        return True
    active = [isinstance(a, fx.Node) and a not in tracer.index.parameters for a in node.args]
    if name in ("mul", "mul_"):  # scaling by a number or a parameter is linear, a product of two activations is not
        return sum(active) < 2
    if name in ("div", "div_"):
        return active[:2] == [True, False]
    return not any(active)


# ---- helpers ------------------------------------------------------------------------------------------------


def varies(labels: Tensor) -> bool:
    """Whether any label here could still be removed."""
    return bool((labels != 0).any())


def compress(labels: Tensor) -> Tensor:
    """Size 1 along every axis where the labels do not vary. Axes that were merely expanded are told by their stride."""
    if not labels.numel():
        return labels
    for dim in (d for d, size in enumerate(labels.shape) if size > 1 and labels.stride(d) == 0):
        labels = labels.narrow(dim, 0, 1)
    for dim in (d for d, size in enumerate(labels.shape) if size > 1):
        alike = torch.equal(labels.select(dim, 0), labels.select(dim, 1))  # which most often tells
        if alike and bool((labels == labels.narrow(dim, 0, 1)).all()):
            labels = labels.narrow(dim, 0, 1)
    return labels


def labels_of_axis(tracer: Tracer, node: fx.Node, dim: int) -> Ints:
    """One label per index of axis `dim`. Labels that vary along other axes too are joined, index by index."""
    labels, size = tracer.labels(node), shape_of(node)[dim]
    if not labels.numel():
        return np.zeros(size, dtype=np.int64)
    rows = labels.movedim(dim, 0).reshape(labels.shape[dim], -1).numpy()
    if rows.shape[1] > 1:
        tracer.join(rows, rows[:, :1])
    return np.broadcast_to(rows[:, 0], size).copy()


def labels_on_axis(labels: Ints, ndim: int, dim: int) -> Tensor:
    """One label per index of axis `dim` of a tensor with `ndim` axes."""
    return torch.from_numpy(labels).view([-1 if d == dim % ndim else 1 for d in range(ndim)])


NO_RULE = "no rule for this operator"


def freeze_all(tracer: Tracer, node: fx.Node, why: str = NO_RULE) -> Any:
    macs, unknown = _counted(node)
    tracer.fixed_macs += macs
    tracer.uncounted |= unknown
    for labels in _inputs(tracer, node):
        tracer.freeze(labels, short_name(node), why)
    return _plain(node.meta.get("val"))


def _inputs(tracer: Tracer, node: fx.Node) -> list[Tensor]:
    found = []
    for a in node.all_input_nodes:
        value = tracer.labels(a) if a in tracer.index.parameters or a in tracer.values else None
        found += value if isinstance(value, list) else [value]
    return [v for v in found if isinstance(v, Tensor)]


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


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return torch.zeros([1] * value.ndim, dtype=torch.int64) if isinstance(value, Tensor) else None


# ---- the rules ----------------------------------------------------------------------------------------------


def pointwise(tracer: Tracer, node: fx.Node) -> Tensor:
    """Operands share labels position by position; an operand of size 1 along an axis has no say there."""
    if not isinstance(node.meta["val"], Tensor):
        return freeze_all(tracer, node, "has several results")
    ndim = node.meta["val"].ndim
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    matrices = [a for a in tensors if (p := tracer.parameter(a)) and sum(s > 1 for s in tracer.index.shapes[p]) > 1]
    operands = [a for a in tensors if a not in matrices]
    if not operands:
        return freeze_all(tracer, node, "parameters combined with each other")
    sides = [(aligned(tracer.labels(a), ndim), (1,) * (ndim - len(shape_of(a))) + varying_shape(a)) for a in operands]
    result, _ = merge(tracer, short_name(node), sides)
    if sum(varies(labels) for labels, _ in sides) > 1 and _adds_branches(tracer, node):
        tracer.summed.append(distinct(result))
    for matrix in matrices:
        _tie_matrix(tracer, tracer.index.parameters[matrix], result)
    return result


def merge(tracer: Tracer, name: str, sides: list[tuple[Tensor, tuple[int, ...]]]) -> tuple[Tensor, tuple[int, ...]]:
    """Labels and shape of operands (labels, shape) broadcast against each other, with the same number of axes."""
    result, known = sides[0]
    for labels, shape in sides[1:]:
        if _has_say(result, shape) and _has_say(labels, known):
            first, second = torch.broadcast_tensors(result, labels)
            if not _lacks_axis(shape, result) and _lacks_axis(known, labels):
                first, second = second, first  # the one that knows more of the axes speaks for both
            together = compress(torch.where(first != 0, first, second))
            if _lacks_axis(shape, result):
                tracer.partial.append((result.numpy(), labels.numpy(), [d for d, size in enumerate(shape) if size > 1]))
            elif _lacks_axis(known, labels):
                tracer.partial.append((labels.numpy(), result.numpy(), [d for d, size in enumerate(known) if size > 1]))
            elif varies(result) != varies(labels):
                tracer.hold(result if varies(result) else labels, name, "meets something that is never cut")
            else:
                tracer.join(result.numpy(), labels.numpy())
                together = min(result, labels, key=Tensor.numel)  # joined, either speaks for both
            result = together
        else:  # one operand is stretched over the other's cut axis: it cannot be cut itself
            result, stretched = (labels, result) if _has_say(result, shape) else (result, labels)
            tracer.freeze(stretched, name, "stretched over an axis that is cut")
        known = tuple(max(a, b) for a, b in zip(known, shape, strict=True))
    return result, known


def _lacks_axis(shape: tuple[int, ...], labels: Tensor) -> bool:
    """Whether a tensor of this shape is stretched along an axis where the labels of the other one vary."""
    return any(size == 1 and varying > 1 for size, varying in zip(shape, labels.shape, strict=True))


def aligned(labels: Tensor, ndim: int) -> Tensor:
    return labels.reshape((1,) * (ndim - labels.ndim) + tuple(labels.shape))


def _has_say(labels: Tensor, other_shape: tuple[int, ...]) -> bool:
    """Whether a tensor of `other_shape` is as long as `labels` along some axis where those vary."""
    return labels.numel() == 1 or any(s > 1 and o > 1 for s, o in zip(labels.shape, other_shape, strict=True))


def _tie_matrix(tracer: Tracer, parameter: str, labels: Tensor) -> None:
    """A parameter with several axes, added or multiplied in: cut it along the one axis where the labels vary."""
    shape = tracer.index.shapes[parameter]
    lead = labels.ndim - len(shape)
    varying = [d for d, size in enumerate(labels.shape) if size > 1]
    shared = [d for d in varying if d >= lead and shape[d - lead] > 1]
    if len(varying) == len(shared) == 1:
        tracer.tie(parameter, shared[0] - lead, labels.flatten().numpy(), "free")
    elif shared and len(varying) > len(shared):  # it lacks an axis: no say, if whole indices of that one go
        tracer.partial.append((labels.numpy(), np.zeros([1] * labels.ndim, dtype=np.int64), shared))
    elif shared or (labels.numel() == 1 and varies(labels)):
        tracer.freeze(labels, parameter, "a parameter that would have to be cut along several axes")


def structural(tracer: Tracer, node: fx.Node) -> Any:
    """Run the operator itself on the labels."""
    if not any(varies(x) for x in _inputs(tracer, node)):
        return _plain(node.meta["val"])
    if short_name(node) == "channel_shuffle":  # the parts that are shuffled stay equally long
        channels = labels_of_axis(tracer, node.args[0], 1)  # type: ignore[arg-type]
        tracer.shaped.append((tracer.module(node), torch.from_numpy(channels).view(int(node.args[1]), -1), None))  # type: ignore[arg-type]
    try:
        row = side_by_side(tracer, node)
        result = _on_labels(tracer, node) if row is None else row
    except (RuntimeError, TypeError, NotImplementedError):
        return freeze_all(tracer, node, "an operator that cannot run on labels")
    result = [compress(r) for r in result] if isinstance(result, list | tuple) else compress(result)
    if short_name(node) in SIZED and not _takes_the_rest(node, result):
        tracer.sized += [distinct(x) for x in _inputs(tracer, node)]
    if not isinstance(result, list | tuple):
        if short_name(node) == "slice" and shape_of(node) != shape_of(source := node.all_input_nodes[0]):
            tracer.sliced.append((tracer.labels(source).numpy(), int(arguments(node).get("dim", 0))))
        tracer.shaped.append((tracer.module(node), result, None))
        return result
    if short_name(node) in PARTS and len({tuple(val.shape) for val in node.meta["val"]}) == 1:
        for part in result:  # a forward that asks for equal parts goes on getting the same ones
            tracer.join(part.numpy(), result[0].numpy())
    tracer.shaped += [(tracer.module(node), part, i) for i, part in enumerate(result)]
    return result


def side_by_side(tracer: Tracer, node: fx.Node) -> Tensor | None:
    """The labels of tensors in a row along an axis that nobody cuts, such as tokens: they go together, index by index.

    Those that are alike for all that goes, such as a key of zeros, have no say. None: it is not as simple as that.
    """
    if short_name(node) not in ("cat", "concat"):
        return None
    given = arguments(node)
    labels = {a: tracer.labels(a) for a in given["tensors"]}
    cut = [x for x in labels.values() if varies(x)]
    if len({x.shape for x in cut}) != 1 or cut[0].numel() == 1 or cut[0].shape[given["dim"]] > 1:
        return None
    others = [varying_shape(a) for a, x in labels.items() if not varies(x)]
    if any(len(e) != cut[0].ndim or _has_say(cut[0], e) for e in others):
        return None
    for x in cut[1:]:
        tracer.join(cut[0].numpy(), x.numpy())
    return cut[0]


def _takes_the_rest(node: fx.Node, result: Any) -> bool:
    """Whether the one axis along which a reshaped tensor, compressed, varies has the size -1: `view(1, -1, 1, 1)`.

    Such a size follows whatever goes, and no other counts it.
    """
    if short_name(node) not in ("reshape", "view"):
        return False
    sizes = arguments(node).get("shape") or arguments(node).get("size") or ()  # none: another type of the same bits
    return len(sizes) > 0 and all(n == -1 for n, long in zip(sizes, result.shape, strict=True) if long > 1)


def _on_labels(tracer: Tracer, node: fx.Node) -> Any:
    """What the operator makes of labels in place of values. They are expanded, not written out, wherever that will do.

    A concatenation writes out its result, so other axes than its own stay short where no operand varies along them. So
    do those along which elements are rolled.
    """
    known = [
        a for a in node.all_input_nodes if a in tracer.index.parameters or isinstance(tracer.values.get(a), Tensor)
    ]
    labels = {a: tracer.labels(a) for a in known}
    shapes = {a: list(shape_of(a)) for a in known}
    if short_name(node) in RESHAPES and _same_elements(known[0], node):
        return _reshaped(labels[known[0]], shapes[known[0]], list(shape_of(node)))
    if short_name(node) in ("cat", "concat", "flip", "roll", "stack"):
        ndim = len(shapes[known[0]])
        along = arguments(node)["dim"] % ndim if short_name(node) in ("cat", "concat") else None
        for d in (d for d in range(ndim) if d != along):
            if len({len(s) for s in shapes.values()}) == 1 and all(x.shape[d] == 1 for x in labels.values()):
                for shape in shapes.values():
                    shape[d] = min(shape[d], 1)

    def call(written_out: bool) -> Any:
        def value(a: fx.Node) -> Any:
            if a not in labels:
                return a.meta.get("val")
            wide = labels[a].expand(shapes[a])
            return wide.contiguous() if written_out else wide

        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    try:
        return call(written_out=False)
    except RuntimeError:  # such as a view across axes of which one is expanded
        return call(written_out=True)


RESHAPES = {"_unsafe_view", "flatten", "reshape", "unflatten", "view"}
"""Operators that give the same elements, in the same order, another shape; or the same bits another type."""


def _same_elements(before: fx.Node, after: fx.Node) -> bool:
    """Of one type; and there are some."""
    return before.meta["val"].dtype == after.meta["val"].dtype and after.meta["val"].numel() > 0


def _reshaped(labels: Tensor, before: list[int], after: list[int]) -> Tensor:
    """Axes that stay as they are, at either end, are not written out where labels do not vary along them."""
    for ends in (range(len(after)), range(-1, -1 - len(after), -1)):
        for d in ends:
            if not -len(before) <= d < len(before) or before[d] != after[d]:
                break
            if labels.shape[d] == 1:
                before[d] = after[d] = 1
    return labels.expand(before).reshape(after)


def padding(tracer: Tracer, node: fx.Node) -> Any:
    """What is added along an axis that is not cut belongs to the same units; along a cut one it is always kept."""
    source, amounts, mode = node.args[0], node.args[1], arguments(node).get("mode", "constant")
    assert isinstance(source, fx.Node) and isinstance(amounts, list | tuple)
    labels = tracer.labels(source)
    padded = {labels.ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    cut = [d for d in padded if labels.shape[d] > 1]
    if not cut and (labels.numel() > 1 or not varies(labels)):
        return labels
    if mode != "constant" or labels.numel() == 1:
        return freeze_all(tracer, node, "pads an axis that would be cut")
    tracer.sized.append(distinct(labels))
    shape = [s if d in padded else labels.shape[d] for d, s in enumerate(shape_of(source))]
    return compress(nn.functional.pad(labels.expand(shape), list(amounts)))  # type: ignore[arg-type]


def pooling(tracer: Tracer, node: fx.Node) -> Any:
    """Windows over space: channels pass, anything that varies over space may not be cut."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = node.meta["val"]
    several = isinstance(value, list | tuple)
    labels = tracer.labels(source)
    spatial = 1 if "1d" in short_name(node) else 3 if "3d" in short_name(node) else 2
    if any(s > 1 for s in labels.shape[-spatial:]):
        return freeze_all(tracer, node, "pools over an axis that would be cut")
    return [labels for _ in value] if several else labels


def reduction(tracer: Tracer, node: fx.Node) -> Any:
    """Sums and means: fine along axes that nobody cuts. `max` and `min` of two tensors are pointwise."""
    if len(_inputs(tracer, node)) > 1:
        return pointwise(tracer, node)
    given = arguments(node)
    dims, value = given.get("dim"), node.meta["val"]
    labels = next(iter(_inputs(tracer, node)))
    named = [dims] if isinstance(dims, int) else list(dims or range(labels.ndim))
    reduced = {d % max(labels.ndim, 1) for d in named}
    labels = joined_along(tracer, labels, [d for d in reduced if labels.shape[d] > 1])
    if any(labels.shape[d] > 1 for d in reduced):
        if not _averages(node):
            return freeze_all(tracer, node, "reduces over an axis that would be cut")
        if node.users:
            tracer.spanned.append(distinct(labels))
            tracer.normed.append(distinct(labels))
            tracer.averaged.append(distinct(labels))
        labels = torch.zeros([1] * labels.ndim, dtype=torch.int64)
    several = isinstance(value, list | tuple)
    if (value[0] if several else value).ndim != labels.ndim:
        labels = labels.view([s for d, s in enumerate(labels.shape) if d not in reduced])
    return [labels for _ in value] if several else labels


def _averages(node: fx.Node) -> bool:
    """Whether a reduction is as good over fewer, as that of a norm is. Where the largest one stands is not, nor is the
    spread around a mean that is estimated: there is none of one value."""
    places = any(user.args[1] != 0 and user.users for user in node.users if schema_name(user) == "getitem")
    given, spread = arguments(node), short_name(node) in ("std", "var")
    estimated = spread and given.get("correction", given.get("unbiased", True)) not in (0, False)
    return short_name(node) in AVERAGES and not places and not estimated


def softmax(tracer: Tracer, node: fx.Node) -> Any:
    labels, dim = next(iter(_inputs(tracer, node))), arguments(node)["dim"]
    labels = joined_along(tracer, labels, [dim % labels.ndim] if labels.shape[dim] > 1 else [])
    if labels.shape[dim] > 1:
        return freeze_all(tracer, node, "normalises over an axis that would be cut")
    return labels


def joined_along(tracer: Tracer, labels: Tensor, dims: list[int]) -> Tensor:
    """Where labels vary along other axes too, those along `dims` share one fate, and the axes drop out."""
    if not dims or labels.numel() == math.prod(labels.shape[d] for d in dims):
        return labels
    for d in dims:
        tracer.join(labels.numpy(), labels.narrow(d, 0, 1).numpy())
        labels = labels.narrow(d, 0, 1)
    return labels


def getitem(tracer: Tracer, node: fx.Node) -> Any:
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    value = tracer.values[source]
    return value[index] if isinstance(value, list) else _plain(node.meta.get("val"))


@rule("glu")
def glu(tracer: Tracer, node: fx.Node) -> Any:
    """One half of an axis times a gate, the other: what goes, goes from both."""
    given = arguments(node)
    labels = tracer.labels(given["self"])
    if labels.shape[given["dim"]] == 1:
        return labels
    values, gate = labels.chunk(2, given["dim"])
    tracer.join(values.numpy(), gate.numpy())
    return compress(values)


@rule("index_select")
def index_select(tracer: Tracer, node: fx.Node) -> Any:
    """Fine along an axis that is not cut."""
    source, dim = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    if tracer.labels(source).shape[dim] > 1:
        return freeze_all(tracer, node, "picks along an axis that would be cut")
    return tracer.labels(source)


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(tracer: Tracer, node: fx.Node) -> Any:
    """Picks places, channel by channel, which are never cut themselves."""
    source, places = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(places, fx.Node)
    if any(size > 1 for size in tracer.labels(source).shape[2:]):
        return freeze_all(tracer, node, "picks along an axis that would be cut")
    tracer.freeze(tracer.labels(places), short_name(node), "says where to pick")
    return tracer.labels(source)


@rule("type_as")
def type_as(tracer: Tracer, node: fx.Node) -> Tensor:
    """The second tensor lends its type alone, whatever its shape."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return tracer.labels(source)


@rule("new_empty", "new_full", "new_ones", "new_zeros")
def new(tracer: Tracer, node: fx.Node) -> Any:
    """A tensor of its own, of the type of another one."""
    return _plain(node.meta["val"])


@rule("linear")
def linear(tracer: Tracer, node: fx.Node) -> Any:
    x, weight_node, *rest = node.args
    weight = weight_views.view_of(tracer, weight_node)
    assert isinstance(x, fx.Node)
    if weight is None:
        return freeze_all(tracer, node, COMPUTED)
    labels, out = tracer.labels(x), weight_views.outputs(tracer, weight, 0)
    if labels.numel() > 1 and labels.shape[-1] == 1:
        return _across(tracer, node, x, weight, labels, rest)
    weight_views.tie_inputs(tracer, weight, 1, labels_of_axis(tracer, x, -1))
    tie_bias(tracer, rest, out)
    tracer.contraction(node, weight, math.prod(shape_of(x)[:-1]))
    return labels_on_axis(out, node.meta["val"].ndim, -1)


def _across(
    tracer: Tracer, node: fx.Node, x: fx.Node, weight: weight_views.View, labels: Tensor, rest: list[Any]
) -> Tensor:
    """A layer along an axis that is not cut, such as tokens, of something that is cut along others: these pass."""
    outputs = weight_views.outputs(tracer, weight, 0)
    weight_views.tie_inputs(tracer, weight, 1, np.zeros(shape_of(x)[-1], dtype=np.int64))
    tracer.freeze(outputs, tracer.module(node) or weight.name, "works along an axis that is not cut")
    tie_bias(tracer, rest, outputs)
    others = math.prod(shape_of(x)[:-1]) // labels.numel()
    tracer.products.append(ActivationMacs(labels.flatten().numpy(), others * math.prod(len(i) for i in weight.index)))
    return labels


@rule(*CONVOLUTIONS)
def convolution(tracer: Tracer, node: fx.Node) -> Any:
    """Weight: outputs x inputs per group x kernel."""
    given = arguments(node)
    x, view = given["input"], weight_views.view_of(tracer, given["weight"])
    if view is None or not view.whole:
        return freeze_all(tracer, node, COMPUTED)
    weight, shape, groups = view.name, tracer.index.shapes[view.name], given["groups"]
    spatial = len(shape) - 2
    if len(shape_of(x)) == len(shape) and tracer.labels(x).shape[0] > 1:
        return _sample_by_sample(tracer, node, x, view, given["bias"])
    inputs, outputs = labels_of_axis(tracer, x, -spatial - 1), weight_views.outputs(tracer, view, 0)
    _tie_groups(tracer, inputs, outputs, groups, view)
    if groups > 1 and not isinstance(tracer.index.modules.get(tracer.module(node)), _ConvNd):
        tracer.sized += [inputs, outputs]
    tie_bias(tracer, [given["bias"]], outputs)
    out_size = shape_of(node)[-spatial:]
    batch = math.prod(shape_of(x)[: -spatial - 1])
    tracer.contraction(node, view, batch * math.prod(out_size))
    module = tracer.index.called_once(node)
    plain = groups == 1 and spatial == 2 and len(shape_of(x)) == 4 and not isinstance(given["padding"], str)
    own = module == weight.removesuffix(".weight") and not view.spans
    if plain and own and module is not None and isinstance(tracer.index.modules[module], nn.Conv2d):
        stride, padding, dilation = (_pair(given[key]) for key in ("stride", "padding", "dilation"))
        sizes = (_pair(shape[2:]), stride, padding, dilation, _pair(shape_of(x)[-2:]), _pair(out_size))
        tracer.sites[weight] = ConvGeometry(module, weight, *sizes, batch)
    return labels_on_axis(outputs, node.meta["val"].ndim, -spatial - 1)


def _sample_by_sample(tracer: Tracer, node: fx.Node, x: fx.Node, view: weight_views.View, bias: Any) -> Tensor:
    """A convolution of what is cut along the first axis, such as heads as a batch: these go whole, its weight stays."""
    labels, outputs = tracer.labels(x), weight_views.outputs(tracer, view, 0)
    labels = joined_along(tracer, labels, [d for d in range(1, labels.ndim) if labels.shape[d] > 1])
    weight_views.tie_inputs(tracer, view, 1, np.zeros(len(view.index[1]), dtype=np.int64))
    tracer.freeze(outputs, tracer.module(node) or view.name, "works on heads as on samples")
    tie_bias(tracer, [bias], outputs)
    each = math.prod(view.shape) * math.prod(shape_of(node)[2:])
    tracer.products.append(ActivationMacs(labels.flatten().numpy(), each * len(x.meta["val"]) // labels.numel()))
    return labels


@rule(*TRANSPOSED)
def transposed_convolution(tracer: Tracer, node: fx.Node) -> Any:
    """Weight: inputs x outputs per group x kernel."""
    given = arguments(node)
    x, view = given["input"], weight_views.view_of(tracer, given["weight"])
    if view is None or not view.whole or view.spans:
        return freeze_all(tracer, node, COMPUTED)
    weight, shape, groups = view.name, tracer.index.shapes[view.name], given["groups"]
    spatial = len(shape) - 2
    inputs = labels_of_axis(tracer, x, -spatial - 1)
    if groups == 1:
        outputs = tracer.axis(weight, 1, "out")
        tracer.tie(weight, 0, inputs, "in")
    else:  # whole groups go, input and output channels with them
        outputs = np.repeat(tracer.fresh(groups), shape[1])
        tracer.join(inputs.reshape(groups, -1), outputs.reshape(groups, -1)[:, :1])
        tracer.tie(weight, 0, inputs, "out")
        if not isinstance(tracer.index.modules.get(tracer.module(node)), _ConvNd):
            tracer.sized += [inputs, outputs]
    tie_bias(tracer, [given["bias"]], outputs)
    tracer.contraction(node, view, math.prod(shape_of(x)[: -spatial - 1]) * math.prod(shape_of(x)[-spatial:]))
    return labels_on_axis(outputs, node.meta["val"].ndim, -spatial - 1)


def _tie_groups(tracer: Tracer, inputs: Ints, outputs: Ints, groups: int, view: weight_views.View) -> None:
    """Grouped convolutions keep equal groups: whole groups go, or the same channels of each, whichever is finer."""
    if groups == 1:
        return weight_views.tie_inputs(tracer, view, 1, inputs)
    by_group = inputs.reshape(groups, -1)
    if groups >= by_group.shape[1]:
        tracer.join(by_group, by_group[:, :1])
        return tracer.join(outputs.reshape(groups, -1), by_group[:, :1])
    tracer.join(by_group, by_group[:1])
    tracer.join(outputs.reshape(groups, -1), outputs.reshape(groups, -1)[:1])
    return weight_views.tie_inputs(tracer, view, 1, by_group[0])


def tie_bias(tracer: Tracer, rest: list[Any], labels: Ints) -> None:
    if rest and isinstance(rest[0], fx.Node):
        name = tracer.parameter(rest[0])
        if name is None:
            tracer.join(labels_of_axis(tracer, rest[0], 0), labels)
        else:
            tracer.tie(name, 0, labels, "free")


def _pair(value: Any) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return (values[0], values[-1])


RULES |= {f"aten::{n}": pointwise for n in POINTWISE}
RULES |= {f"aten::{n}": structural for n in STRUCTURAL}
RULES |= {f"aten::{n}": pooling for n in POOLING | PADDING}
RULES |= {f"aten::{n}": reduction for n in REDUCTIONS}
RULES |= {f"aten::{n}": softmax for n in SOFTMAXES}
RULES |= dict.fromkeys(("aten::pad", "aten::constant_pad_nd"), padding)
RULES["getitem"] = getitem

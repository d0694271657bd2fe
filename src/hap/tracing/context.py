"""RuleContext: what a rule may ask, decide and note while labels go through a graph.

What rules find out beside labels is kept by subject: costs, norms, wiring, and which layer feeds what.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from hap.graph.index import GraphIndex, TableUse
from hap.graph.nodes import shape_of, short_name
from hap.graph.operator_families import Trait, having
from hap.groups.components import distinct
from hap.groups.types import ActivationMacs, ConvGeometry, InputSelection, Ints, SizeAttribute, WeightMacs
from hap.tracing.labels import LabelStore, RectangularTensor, Undecided, concatenated, long_axes, varies
from hap.tracing.weight_views import View, find_views

ADDING = having(Trait.ADDS)


@dataclass
class CostFindings:
    """What becomes `TracedCosts`; `direct` are weights of layers that use them as they are, `curved` is the first
    operator that is not piecewise linear."""

    weights: list[WeightMacs] = field(default_factory=list)
    activations: list[ActivationMacs] = field(default_factory=list)
    fixed: int = 0
    uncounted: set[str] = field(default_factory=set)
    direct: set[str] = field(default_factory=set)
    geometries: dict[str, ConvGeometry] = field(default_factory=dict)
    curved: str | None = None


@dataclass
class NormFindings:
    """Weights of batch normalisations, labels that are `spanned` by a norm or average, those of them under a real norm
    or mean, and sums of branches."""

    scales: list[str] = field(default_factory=list)
    spanned: list[Ints] = field(default_factory=list)
    normed: list[Ints] = field(default_factory=list)
    averaged: list[Ints] = field(default_factory=list)
    summed: list[Ints] = field(default_factory=list)

    def stream(self, root: Ints) -> Ints:
        """The classes of what branches add up to and a norm averages over."""
        return np.setdiff1d(np.intersect1d(root[concatenated(self.summed)], root[concatenated(self.normed)]), [0])


@dataclass
class WiringFindings:
    """What stands around layers and has to fit: `attributes` of modules that count units, labels that pass through a
    view, split or slice, modules that pick a part of a shared table (`selections`), weights that an outer module uses.
    """

    attributes: list[SizeAttribute] = field(default_factory=list)
    sized: list[Ints] = field(default_factory=list)
    sliced: list[tuple[Ints, int]] = field(default_factory=list)
    selections: list[InputSelection] = field(default_factory=list)
    used_inside: dict[str, str] = field(default_factory=dict)


@dataclass
class Dataflow:
    """Which layers feed which operators, and where what they compute is multiplied, as in attention.

    `layers` multiply by weights; `written` are the values that they write. `sources` are the layers, tables and sums of
    branches that a result is computed from; `products` says whether it is computed from a product of two layers'
    results. `operands` are the labels that enter such a product, and those of layers that read one, as attention's
    output layer does. `seen_whole` are labels of factors, with the axes that hold all of one head.
    """

    layers: set[fx.Node] = field(default_factory=set)
    written: list[ActivationMacs] = field(default_factory=list)
    sources: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    products: dict[fx.Node, bool] = field(default_factory=dict)
    operands: list[Ints] = field(default_factory=list)
    seen_whole: list[tuple[Ints, list[int]]] = field(default_factory=list)

    def follow(self, node: fx.Node, labels: Any) -> None:
        """Note what a node with these labels is computed from, once its rule has run."""
        multiplied = any(self.products.get(a, False) for a in node.all_input_nodes)
        if node in self.layers:
            if multiplied and isinstance(labels, Tensor):
                self.operands.append(distinct(labels))
            # a recurrent layer also returns its last states, which are not counted
            output, value = (x[0] if isinstance(x, list | tuple) else x for x in (labels, node.meta["val"]))
            if isinstance(output, Tensor) and output.numel():
                self.written.append(ActivationMacs(output.flatten().numpy(), value.numel() // output.numel()))
        if node in self.layers or short_name(node) == "embedding" or self.adds_branches(node):
            self.sources[node] = frozenset([node])
        else:
            self.sources[node] = frozenset().union(*(self.sources.get(a, ()) for a in node.all_input_nodes))
            self.products.setdefault(node, multiplied)

    def adds_branches(self, node: fx.Node) -> bool:
        """Whether it adds what different layers compute. A norm that adds its input to the same, scaled, does not."""
        operands = {self.sources[a] for a in node.all_input_nodes if self.sources.get(a)}
        return short_name(node) in ADDING and len(operands) > 1


class RuleContext:
    """What a rule works with: `rule(context, node)` returns the labels of the node's result.

    docs/extending.md lists what a rule may call. What single rules find out goes into `costs`, `norms`, `wiring` and
    `flow`.
    """

    def __init__(self, index: GraphIndex, store: LabelStore | None, rule: Callable[..., Any]):
        self.index, self.rule = index, rule
        self.store = store = store or LabelStore(index.shapes, index.trainable)
        self.fresh, self.axis, self.tie = store.fresh, store.axis, store.tie
        self.join, self.freeze, self.hold = store.join, store.freeze, store.hold
        self.parameter, self.module = index.parameter, index.module
        self.costs, self.norms, self.wiring, self.flow = CostFindings(), NormFindings(), WiringFindings(), Dataflow()
        self.values: dict[fx.Node, Any] = {}
        self.views: dict[fx.Node, Any] = find_views(index, store)
        self.reader: fx.Node | None = None
        self.entered: dict[tuple[fx.Node, TableUse | None], Tensor] = {}

    # ---- asking ---------------------------------------------------------------------------------------------

    def labels(self, node: fx.Node) -> Tensor:
        """The labels of a tensor: one integer per position, with size 1 along axes where they do not vary."""
        if node in self.index.parameters:
            return self.store.of_parameter(self.index.parameters[node])
        use = self.index.table_uses.get((node, self.reader)) if self.reader is not None else None
        return self._entered(node, use) if node in self.index.tables else self.result(node)

    def result(self, node: fx.Node) -> Any:
        """The labels of a node's result, or a list of them. A view of a weight has some if it is used otherwise too."""
        if node in self.views and node not in self.values:
            self.values[node] = self.rule(self, node)
        return self.values[node]

    def _entered(self, table: fx.Node, use: TableUse | None) -> Tensor:
        """The labels of a table inside a module that picks its own part of it along the one axis where it varies."""
        if (table, use) not in self.entered:
            labels = self.result(table)
            long = long_axes(labels.shape)
            if len(long) == 1 and varies(labels):
                self.freeze(labels, table.name, "shared by several modules, each of which picks its own part")
                own = self.fresh(labels.numel())
                if use is None:  # it works with all of the table
                    self.hold(own, table.name, "shared by several modules, of which this one makes it")
                else:
                    self.wiring.selections.append(InputSelection(use.module, use.argument, long[0], own))
                labels = torch.from_numpy(own).view(labels.shape)
            self.entered[table, use] = labels
        return self.entered[table, use]

    def entering(self, node: fx.Node) -> list[Tensor]:
        """The labels of all tensors that enter a node."""
        return [x for x in pytree.tree_leaves([self.labels(a) for a in self.labelled(node)]) if isinstance(x, Tensor)]

    def labelled(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that enter a node and have labels."""
        known = (self.index.parameters, self.values, self.views)
        return [a for a in node.all_input_nodes if any(a in some for some in known)]

    def weight_view(self, node: Any) -> View | None:
        """What a layer's weight is made from, also transposed or in part; None if it is an activation."""
        if (name := self.parameter(node)) is not None:
            return View.of(name, self.index.shapes[name])
        return self.views.get(node) if isinstance(node, fx.Node) else None

    # ---- labels of weights ----------------------------------------------------------------------------------

    def outputs(self, view: View, axis: int) -> Ints:
        """The labels of what the weight computes along this axis of the view."""
        return self.axis(view.name, view.dims[axis], "out")[view.index[axis]]

    def tie_inputs(self, view: View, axis: int, labels: Ints) -> None:
        """What the weight reads along this axis of the view has these labels."""
        if view.whole:
            self.tie(view.name, view.dims[axis], labels, "in")
        else:
            self.join(self.axis(view.name, view.dims[axis], "in")[view.index[axis]], labels)
        if view.spans:
            self.spans(labels)

    def tie_bias(self, bias: Any, labels: Ints) -> None:
        """A vector that is added, parameter or not, goes with these labels. None is no bias."""
        if isinstance(bias, fx.Node):
            name = self.parameter(bias)
            if name is None:
                self.join(labels_of_axis(self, bias, 0), labels)
            else:
                self.tie(name, 0, labels, "free")

    def lacks_axes(self, labels: Tensor, operand: Tensor, dims: list[int]) -> None:
        """Labels of an operand vary along `dims` alone. They are joined with `labels`, unless units only go from the
        other axes: a table of positions stays as it is where whole heads go."""
        self.store.partial.append(Undecided(labels.numpy(), operand.numpy(), dims))

    def keep_rectangular(self, node: fx.Node, labels: Tensor, part: int | None = None) -> None:
        """Units of this tensor go along one axis only, and attributes of the node's module may count that axis."""
        self.store.rectangular.append(RectangularTensor(self.module(node), labels, part))

    # ---- what it costs --------------------------------------------------------------------------------------

    def contraction(self, node: fx.Node, view: View, positions: int) -> None:
        """A layer multiplies each element of a weight so many times."""
        weight, module, layer = view.name, self.module(node), self.index.module_of(node)
        as_stored = view.whole and not view.spans and f"{module}.weight" == weight
        if as_stored and isinstance(layer, _ConvNd | nn.Linear):
            self.costs.direct.add(weight)
        owner = weight.rpartition(".")[0]
        inside = owner != module and f"{owner}.".startswith(f"{module}." if module else "")
        if inside and short_name(node) == "linear" and view.whole:  # of a layer that the module does not call
            self.wiring.used_inside[weight] = module
        part = None if view.whole else tuple(zip(view.dims, view.index, strict=True))
        self.costs.weights.append(WeightMacs(weight, positions, part))
        self.flow.layers.add(node)

    def activation_product(self, labels: Tensor | Ints, positions: int) -> None:
        """So many multiply-adds for each of these labels that stays, whatever weights there are."""
        self.costs.activations.append(ActivationMacs(np.asarray(labels).ravel(), positions))

    # ---- what the checks have to know -----------------------------------------------------------------------

    def spans(self, labels: Tensor | Ints, normed: bool = False, averaged: bool = False) -> None:
        """What is left changes if some of these go: the values of a weight's row, a norm, or an average."""
        flat = distinct(labels)
        self.norms.spanned.append(flat)
        if normed or averaged:
            self.norms.normed.append(flat)
        if averaged:
            self.norms.averaged.append(flat)

    def sized(self, *labels: Tensor | Ints) -> None:
        """These pass through an operator with sizes among its arguments, which a forward may have hard-coded."""
        self.wiring.sized += [distinct(x) for x in labels]

    def multiplies(self, node: fx.Node, *operands: fx.Node) -> None:
        """A product of what layers compute, and not of activations with a constant, is what an attention is made of."""
        made = [self.flow.sources.get(x, frozenset()) for x in operands]
        self.flow.products[node] = all(layers and layers <= self.flow.layers for layers in made)
        if all(made):
            self.flow.operands += [distinct(self.labels(x)) for x in operands]


def labels_of_axis(context: RuleContext, node: fx.Node, dim: int) -> Ints:
    """One label per index of axis `dim`. Labels that vary along other axes too are joined, index by index."""
    labels, size = context.labels(node), shape_of(node)[dim]
    if not labels.numel():
        return np.zeros(size, dtype=np.int64)
    rows = labels.movedim(dim, 0).reshape(labels.shape[dim], -1).numpy()
    if rows.shape[1] > 1:
        context.join(rows, rows[:, :1])
    return np.broadcast_to(rows[:, 0], size).copy()


def join_along(context: RuleContext, labels: Tensor, dims: list[int]) -> Tensor:
    """Where labels vary along other axes too, those along `dims` share one fate, and the axes drop out."""
    if not dims or labels.numel() == np.prod([labels.shape[d] for d in dims]):
        return labels
    for d in dims:
        context.join(labels.numpy(), labels.narrow(d, 0, 1).numpy())
        labels = labels.narrow(d, 0, 1)
    return labels

"""What rules find out beside labels, by subject. Rules write here through `RuleContext` alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from hap.graph.nodes import short_name
from hap.graph.operator_families import Trait, having
from hap.groups.components import distinct
from hap.groups.types import ActivationMacs, ConvGeometry, InputSelection, Ints, SizeAttribute, WeightMacs

ADDING = having(Trait.ADDS)


@dataclass
class CostFindings:
    """Multiply-adds: of weights, of activations with each other, and those that nothing changes.

    `uses` counts how often each weight multiplies; `direct` are weights of layers that use them as they are;
    `geometries` are those of two-dimensional convolutions; `curved` is the first operator that is not piecewise linear.
    """

    weights: list[WeightMacs] = field(default_factory=list)
    activations: list[ActivationMacs] = field(default_factory=list)
    fixed: int = 0
    uncounted: set[str] = field(default_factory=set)
    uses: Counter[str] = field(default_factory=Counter)
    direct: set[str] = field(default_factory=set)
    geometries: dict[str, ConvGeometry] = field(default_factory=dict)
    curved: str | None = None


@dataclass
class NormFindings:
    """Labels that are `spanned` by a norm or average, those of them under a real norm or mean, and `summed` branches.

    `scales` are the weights of batch normalisations.
    """

    scales: list[str] = field(default_factory=list)
    spanned: list[Ints] = field(default_factory=list)
    normed: list[Ints] = field(default_factory=list)
    averaged: list[Ints] = field(default_factory=list)
    summed: list[Ints] = field(default_factory=list)


@dataclass
class SizeFindings:
    """Sizes that a forward counts on: attributes of modules, and labels that pass through a view, split or slice."""

    attributes: list[SizeAttribute] = field(default_factory=list)
    sized: list[Ints] = field(default_factory=list)
    sliced: list[tuple[Ints, int]] = field(default_factory=list)


@dataclass
class RewiredFindings:
    """Modules that pick a part of a shared table as they enter, and weights that an outer module's forward uses."""

    selections: list[InputSelection] = field(default_factory=list)
    used_inside: dict[str, str] = field(default_factory=dict)


@dataclass
class Dataflow:
    """Which layers feed which operators, and where what they compute is multiplied, as in attention.

    `layers` has the labels of what each layer computes. `sources` are the layers, tables and sums of branches that a
    result is computed from, with none of these in between. `products` says of each product of activations whether
    layers compute all of it. `operands` are labels that enter one, and `seen_whole` tensors with the axes along
    which one sees all of each thing, such as of a head.
    """

    layers: dict[fx.Node, Any] = field(default_factory=dict)
    sources: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    products: dict[fx.Node, bool] = field(default_factory=dict)
    operands: list[Ints] = field(default_factory=list)
    seen_whole: list[tuple[Ints, list[int]]] = field(default_factory=list)

    def follow(self, node: fx.Node) -> None:
        """Note the sources of a node once its rule has run."""
        if node in self.layers or short_name(node) == "embedding" or self.adds_branches(node):
            self.sources[node] = frozenset([node])
        else:
            self.sources[node] = frozenset().union(*(self.sources.get(a, ()) for a in node.all_input_nodes))

    def adds_branches(self, node: fx.Node) -> bool:
        """Whether it adds what different layers compute. A norm that adds its input to the same, scaled, does not."""
        operands = {self.sources[a] for a in node.all_input_nodes if self.sources.get(a)}
        return short_name(node) in ADDING and len(operands) > 1

    def read_from_products(self) -> Iterator[Ints]:
        """The labels of layers that read a product of what other layers compute, as attention's output layer does."""
        for node, labels in self.layers.items():
            if isinstance(labels, Tensor) and self._reads_product(node):
                yield distinct(labels)

    def _reads_product(self, layer: fx.Node) -> bool:
        """Whether there is such a product before a layer, with no layer, sum of branches or product in between."""
        seen, todo = {layer}, list(layer.all_input_nodes)
        while todo:
            node = todo.pop()
            if self.products.get(node):
                return True
            if node not in seen | self.products.keys() and self.sources.get(node, {node}) not in ({node}, set()):
                todo += node.all_input_nodes
            seen.add(node)
        return False

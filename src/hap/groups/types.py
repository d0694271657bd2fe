"""What a trace finds: which indices of which parameters live and die together.

Every index of every parameter axis belongs to a *class*, an integer. Class 0 is never removed. All indices of a
class share one fate. A class that some convolution or linear layer computes is a *unit*; units on the same axis form
a *group*. In `union` coupling a unit may feed a *stream* class, which lives as long as any unit that feeds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Record = TypeVar("Record", "Group", "ActivationMacs", "SizeAttribute", "InputSelection", "OutputScatter")


def relabelled(record: Record, to: Ints) -> Record:
    """A copy of a record in which class c is class to[c]: the arrays that it holds itself are all of classes."""
    arrays: dict[str, Any] = {name: to[held] for name, held in vars(record).items() if isinstance(held, np.ndarray)}
    return replace(record, **arrays)


@dataclass(frozen=True)
class Producer:
    """A weight that computes units: index i of axis `dim` of `weight` belongs to unit `unit[i]` (-1: to none)."""

    weight: str
    dim: int
    unit: Ints


@dataclass(frozen=True)
class Group:
    """Units that live on one axis. `classes[u]` is the class of unit u; `consumers` are the axes that read them."""

    name: str
    classes: Ints
    producers: tuple[Producer, ...]
    consumers: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def modules(self) -> tuple[str, ...]:
        """The group's name and the modules whose weights compute its units."""
        return (self.name, *(p.weight.rpartition(".")[0] for p in self.producers))


@dataclass(frozen=True)
class WeightMacs:
    """A contraction: `positions` multiply-adds for every element of `weight` (batch x output positions).

    A layer that uses a part of it says which indices of which axes: `part` holds pairs (dim, indices).
    """

    weight: str
    positions: int
    part: tuple[tuple[int, Ints], ...] | None = None


@dataclass(frozen=True)
class ActivationMacs:
    """A product of activations: `positions` multiply-adds for every entry of `classes` that lives."""

    classes: Ints
    positions: int


@dataclass(frozen=True)
class ConvGeometry:
    """A two-dimensional convolution as an implant sees it. Sizes are in elements, `batch` is the example's."""

    module: str
    weight: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    batch: int

    @property
    def area(self) -> int:
        return math.prod(self.kernel)

    @property
    def positions(self) -> int:
        """How many positions of the output there are, over the batch."""
        return self.batch * math.prod(self.out_size)


@dataclass(frozen=True)
class SizeAttribute:
    """An integer of a module that has to follow an axis: as many as live in `classes`, over `per`.

    Where the attribute is a tuple or list of integers, it is the one at `entry`. Where several axes are as long as it,
    this is the one with number `axis`.
    """

    module: str
    attribute: str
    classes: Ints
    per: int = 1
    entry: int = 0
    axis: int = 0


@dataclass(frozen=True)
class OutputScatter:
    """The outputs of `module` along axis `dim` (classes `narrow`) are spread over more of them (`wide`).

    In `union` coupling a branch over a stream; for implants a narrow head over the width of the others. Where the
    module is not called itself, its weight is handed to `functional.linear` in the forward of the module `inside`.
    """

    module: str
    narrow: Ints
    wide: Ints
    dim: int = 1
    inside: str | None = None


@dataclass(frozen=True)
class InputSelection:
    """A module picks what lives of `classes` along axis `dim` of a tensor that it is called with.

    The tensor has all indices, or those that live of the classes `among`. `inside` is as for a `OutputScatter`.
    """

    module: str
    argument: int | str
    dim: int
    classes: Ints
    among: Ints | None = None
    inside: str | None = None


Change = SizeAttribute | InputSelection | OutputScatter


@dataclass(frozen=True)
class HeadSlice:
    """What a head owns of a layer: `width` indices from `start` on, on axis `dim` of `weight` and of its `bias`."""

    weight: str
    dim: int
    start: int
    width: int
    bias: str | None = None

    @property
    def axes(self) -> list[tuple[str, int]]:
        """The axes of tensors that it is a part of."""
        return [(self.weight, self.dim), *([(self.bias, 0)] if self.bias else [])]


@dataclass(frozen=True)
class HeadSpace:
    """What a head computes in between and sums over: between queries and keys, or between values and outputs.

    Only the product of its two sides counts, so any basis will do, and a few directions may be left of it. Under
    grouped queries several slices share one side.
    """

    group: str
    unit: int
    left: tuple[HeadSlice, ...]
    right: tuple[HeadSlice, ...]


@dataclass(frozen=True)
class Frozen:
    """Something that may not be removed, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class TracedCosts:
    """What the traced model costs, as a function of what lives of it.

    `fixed_macs` are multiply-adds that no plan changes; `written_values` are the outputs of layers, in which a value
    counts as a multiply-add does; `uncounted` are operators that may be matrix products and are not counted.
    """

    weight_macs: tuple[WeightMacs, ...] = ()
    activation_macs: tuple[ActivationMacs, ...] = ()
    fixed_macs: int = 0
    written_values: tuple[ActivationMacs, ...] = ()
    uncounted: tuple[str, ...] = ()

    def relabelled(self, to: Ints) -> TracedCosts:
        both = (self.activation_macs, self.written_values)
        macs, values = (tuple(relabelled(x, to) for x in some) for some in both)
        return replace(self, activation_macs=macs, written_values=values)


@dataclass(frozen=True)
class Rewiring:
    """What has to change around the layers when units go."""

    size_attributes: tuple[SizeAttribute, ...] = ()
    input_selections: tuple[InputSelection, ...] = ()
    output_scatters: tuple[OutputScatter, ...] = ()

    def relabelled(self, to: Ints) -> Rewiring:
        return Rewiring(*(tuple(relabelled(x, to) for x in changes) for changes in vars(self).values()))


@dataclass(frozen=True)
class Traits:
    """Sets of classes that need care.

    `spanned`: a normalisation averages over them, so that removing them changes the others. `zero_padded`: zeros stand
    in for them when they go; `padded_in_norms` are those of these that enter a norm too. `in_activation_products`: they
    enter or leave a product of activations. `whole_matrices`: each has a matrix of its own in a product of several.
    """

    spanned: frozenset[int] = frozenset()
    zero_padded: frozenset[int] = frozenset()
    padded_in_norms: frozenset[int] = frozenset()
    in_activation_products: frozenset[int] = frozenset()
    whole_matrices: frozenset[int] = frozenset()

    def relabelled(self, to: Ints) -> Traits:
        return Traits(*(frozenset(to[list(classes)].tolist()) - {0} for classes in vars(self).values()))

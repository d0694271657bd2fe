"""What a trace finds: which indices of which parameters live and die together.

Every index of every parameter axis belongs to a *class*, an integer. Class 0 is never removed. All indices of a
class share one fate. A class that some convolution or linear layer computes is a *unit*; units on the same axis form
a *group*. In `union` coupling a unit may feed a *stream* class, which lives as long as any unit that feeds it.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hap.errors import HapError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


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
class Term:
    """A contraction: `positions` multiply-adds for every element of `weight` (batch x output positions).

    A layer that uses a part of it says which indices of which axes: `part` holds pairs (dim, indices).
    """

    weight: str
    positions: int
    part: tuple[tuple[int, Ints], ...] | None = None


@dataclass(frozen=True)
class Product:
    """A product of activations: `positions` multiply-adds for every entry of `classes` that lives."""

    classes: Ints
    positions: int


@dataclass(frozen=True)
class Site:
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


@dataclass(frozen=True)
class Length:
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
class Scatter:
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
class Narrowing:
    """A module picks what lives of `classes` along axis `dim` of a tensor that it is called with.

    The tensor has all indices, or those that live of the classes `among`. `inside` is as for a `Scatter`.
    """

    module: str
    argument: int | str
    dim: int
    classes: Ints
    among: Ints | None = None
    inside: str | None = None


@dataclass(frozen=True)
class Slice:
    """What a head owns of a layer: `width` indices from `start` on, on axis `dim` of `weight` and of its `bias`."""

    weight: str
    dim: int
    start: int
    width: int
    bias: str | None = None


@dataclass(frozen=True)
class Space:
    """What a head computes in between and sums over: between queries and keys, or between values and outputs.

    Only the product of its two sides counts, so any basis will do, and a few directions may be left of it. Under
    grouped queries several slices share one side.
    """

    group: str
    unit: int
    left: tuple[Slice, ...]
    right: tuple[Slice, ...]


@dataclass(frozen=True)
class Frozen:
    """Something that may not be removed, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Groups(Mapping[str, Group]):
    """The result of `hap.trace`: groups by name, plus all that planning and surgery need to know.

    `axes[(parameter, dim)]` holds one class per index, below `classes`; each row (c, s) of `feeds` says that class c
    feeds the stream class s; `fixed_macs` are multiply-adds that no plan changes; `written` are the outputs of layers,
    a value for what a product counts as a multiply-add; `direct` are the weights that only the layer that owns them
    uses, once; `lengths` are integers of modules that follow an axis; `scales` are the batch normalisations' weights;
    `spanned` are the classes that a normalisation averages over, so that removing them changes the others; zeros stand
    in for those in `padded` when they go, and these enter a norm where they are in `renormed` too; those in `met` enter
    or leave a product of activations, and those in `whole` are one of several things that such a product sees whole.
    `uncounted` are operators that may be matrix products and are not counted. `spaces` says where heads can be
    narrowed, once `hap.narrowable` has looked; each row (c, t) of `tails` says that class t goes when head c does.
    """

    coupling: str
    groups: dict[str, Group]
    axes: dict[tuple[str, int], Ints]
    classes: int
    feeds: Ints
    lengths: tuple[Length, ...]
    shapes: dict[str, tuple[int, ...]]
    trainable: frozenset[str]
    terms: tuple[Term, ...]
    products: tuple[Product, ...]
    fixed_macs: int
    direct: frozenset[str]
    sites: dict[str, Site]
    narrowings: tuple[Narrowing, ...]
    scatters: tuple[Scatter, ...]
    scales: tuple[str, ...]
    spanned: frozenset[int]
    frozen: tuple[Frozen, ...]
    curved: str | None
    """The first operator that makes the network more than piecewise linear in one weight, or None."""
    example: Any = field(default=None, repr=False)
    """A JSON description of the example's tensors, so that a plan can be checked without it."""
    spaces: tuple[Space, ...] = field(default=(), repr=False)
    tails: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64), repr=False)
    padded: frozenset[int] = frozenset()
    renormed: frozenset[int] = frozenset()
    met: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    written: tuple[Product, ...] = field(default=(), repr=False)
    uncounted: tuple[str, ...] = ()
    untouched: Mapping[str, Frozen] = field(default_factory=dict, repr=False)
    """Parameters that stay whole though one would expect them to shrink, each with the reason: see `untouched.py`."""

    def __getitem__(self, name: str) -> Group:
        return self.groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def matching(self, patterns: Sequence[str], option: str) -> list[str]:
        """Groups of which the name, or a module that computes their units, matches a shell pattern."""
        if isinstance(patterns, str):
            raise HapError(
                f"{option} is the string {patterns!r}; expected a tuple of names or patterns, such as ({patterns!r},)"
            )
        found = {
            p: [n for n, g in self.groups.items() if any(fnmatch.fnmatchcase(m, p) for m in g.modules)]
            for p in patterns
        }
        if nothing := [p for p, names in found.items() if not names]:
            raise HapError(f"{option} has {nothing[0]!r}, which matches no group; groups are {', '.join(self.groups)}")
        return list(dict.fromkeys(n for names in found.values() for n in names))

    @property
    def units(self) -> int:
        return sum(len(g) for g in self.groups.values())

    def alive(self, kept: Bools, grafted: Bools | None = None) -> Bools:
        """Which classes live when the units marked in `kept` (bool per class) do, those in `grafted` by an implant."""
        live = kept.copy()
        live[self.feeds[kept[self.feeds[:, 0]], 1]] = True
        whole = kept if grafted is None else kept & ~grafted
        live[self.tails[:, 1]] = whole[self.tails[:, 0]]
        live[0] = True
        return live

    def streams(self, classes: Ints) -> Ints:
        """The stream classes that these classes feed."""
        return np.unique(self.feeds[np.isin(self.feeds[:, 0], classes), 1])

    def sources(self, classes: Ints) -> Ints:
        """The classes that feed any of these streams."""
        return self.feeds[np.isin(self.feeds[:, 1], classes), 0]

    def sustaining(self, units: Ints, classes: Ints) -> Bools:
        """Which of these unit classes keep something in `classes` alive, themselves or through a stream."""
        return np.isin(units, classes) | np.isin(units, self.sources(classes))

    def spans(self) -> Iterator[Ints]:
        """Classes of which some must stay: along an axis of a parameter, or what an attribute counts."""
        yield from self.axes.values()
        yield from (length.classes for length in self.lengths)
        yield from (narrowing.classes for narrowing in self.narrowings)

    def all_kept(self) -> Bools:
        """A marking with every unit kept. Classes without a unit of their own (pure streams) stay unmarked."""
        kept = np.zeros(self.classes, dtype=bool)
        kept[0] = True
        for group in self.groups.values():
            kept[group.classes] = True
        return kept

    def graph(self, path: str | Path) -> None:
        """Draw groups, widths, couplings and what is frozen into an SVG file."""
        from hap.drawing import draw

        draw(self, path)

    def __str__(self) -> str:
        width = max((len(n) for n in self.groups), default=5)
        lines = [f"{self.units} units in {len(self)} groups, {self.coupling} coupling"]
        for g in self.groups.values():
            others = [p.weight for p in g.producers[1:]]
            reads = ", ".join(sorted({c for c, _ in g.consumers}))
            also = f"  with {', '.join(others)}" if others else ""
            zeros = "" if self.padded.isdisjoint(g.classes.tolist()) else ", zeros stand in for what goes"
            zeros += "" if self.renormed.isdisjoint(g.classes.tolist()) else " and enter a norm"
            lines.append(f"  {g.name:<{width}}  {len(g):>5} units{also}  read by {reads or 'nothing'}{zeros}")
        lines += [f"  frozen: {f.what} ({f.why})" for f in self.frozen]
        return "\n".join(lines)


def components(count: int, a: Ints, b: Ints) -> Ints:
    """Connected components of the graph with edges a[i]-b[i]: the smallest member of each node's component.

    Minimum propagation with pointer jumping, vectorised: logarithmically many passes on the graphs that occur.
    """
    root = np.arange(count)
    while True:
        low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
        if np.array_equal(low, high):
            return root
        np.minimum.at(root, high, low)
        while not np.array_equal(root, jumped := root[root]):
            root = jumped


def merged(root: Ints, a: Ints, b: Ints) -> Ints:
    """The components once there are edges a[i]-b[i] between some of their members too: few, beside all members."""
    ends, places = np.unique(np.concatenate([root[a], root[b]]), return_inverse=True)
    towards = np.arange(len(root))
    towards[ends] = ends[components(len(ends), places[: len(a)], places[len(a) :])]
    return towards[root]


def distinct(labels: ArrayLike) -> Ints:
    """The labels that there are, in order. Those of an axis most often are so already, which is quick to see."""
    flat = np.ravel(np.asarray(labels))
    return flat if bool((flat[1:] > flat[:-1]).all()) else np.unique(flat)


def occurring(count: int, labels: Iterable[Ints]) -> NDArray[np.bool_]:
    """Which of the labels below `count` there are."""
    seen = np.zeros(count, dtype=bool)
    for some in labels:
        seen[some] = True
    return seen

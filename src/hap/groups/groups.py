"""The result of `hap.trace`: which indices of which parameters live and die together."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hap.errors import HapError
from hap.groups.drawing import Traced, to_svg
from hap.groups.types import (
    ActivationMacs,
    Bools,
    ConvGeometry,
    Frozen,
    Group,
    HeadSpace,
    InputSelection,
    Ints,
    OutputScatter,
    SizeAttribute,
    WeightMacs,
)
from hap.utils.atomic_files import write_text


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
    lengths: tuple[SizeAttribute, ...]
    shapes: dict[str, tuple[int, ...]]
    trainable: frozenset[str]
    terms: tuple[WeightMacs, ...]
    products: tuple[ActivationMacs, ...]
    fixed_macs: int
    direct: frozenset[str]
    sites: dict[str, ConvGeometry]
    narrowings: tuple[InputSelection, ...]
    scatters: tuple[OutputScatter, ...]
    scales: tuple[str, ...]
    spanned: frozenset[int]
    frozen: tuple[Frozen, ...]
    curved: str | None
    """The first operator that makes the network more than piecewise linear in one weight, or None."""
    example: Any = field(default=None, repr=False)
    """A JSON description of the example's tensors, so that a plan can be checked without it."""
    spaces: tuple[HeadSpace, ...] = field(default=(), repr=False)
    tails: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64), repr=False)
    padded: frozenset[int] = frozenset()
    renormed: frozenset[int] = frozenset()
    met: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    written: tuple[ActivationMacs, ...] = field(default=(), repr=False)
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
        write_text(path, self.to_svg())

    def to_svg(self) -> str:
        """The drawing that `graph` writes."""
        weights = [term.weight for term in self.terms]
        return to_svg(Traced(self.groups, self.coupling, self.shapes, self.frozen, weights))

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

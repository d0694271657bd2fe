"""The result of `hap.trace`: which indices of which parameters live and die together."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hap.errors import Argument, HapError
from hap.groups.drawing import to_svg
from hap.groups.types import (
    Bools,
    Change,
    ConvGeometry,
    Frozen,
    Group,
    HeadSpace,
    Ints,
    Rewiring,
    TracedCosts,
    Traits,
    relabelled,
)
from hap.utils.atomic_files import write_text


@dataclass(frozen=True)
class Groups(Mapping[str, Group]):
    """The result of `hap.trace`: groups by name, plus all that planning and surgery need to know.

    `axes[(parameter, dim)]` holds one class per index, below `classes`; each row (c, s) of `feeds` says that class c
    feeds the stream class s; each row (c, t) of `head_tails` says that class t goes when head c is narrowed or goes.
    `used_once` are the weights that only the layer that owns them uses, once; `curved` is the first operator that makes
    the network more than piecewise linear in one weight; `example` describes the example's tensors in JSON, so that a
    plan can be checked without it. `head_spaces` says where heads can be narrowed, once `hap.narrowable` has looked;
    `unprunable` are parameters that stay whole though one would expect them to shrink, each with the reason.
    """

    coupling: str
    groups: dict[str, Group]
    axes: dict[tuple[str, int], Ints]
    classes: int
    feeds: Ints
    shapes: dict[str, tuple[int, ...]]
    trainable: frozenset[str]
    costs: TracedCosts
    rewiring: Rewiring
    traits: Traits
    used_once: frozenset[str]
    conv_geometry: dict[str, ConvGeometry]
    batchnorm_weights: tuple[str, ...]
    frozen: tuple[Frozen, ...]
    curved: str | None
    example: Any = field(default=None, repr=False)
    unprunable: Mapping[str, Frozen] = field(default_factory=dict, repr=False)
    head_spaces: tuple[HeadSpace, ...] = field(default=(), repr=False)
    head_tails: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64), repr=False)

    def __getitem__(self, name: str) -> Group:
        return self.groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def matching(self, patterns: Sequence[str], option: str | Argument) -> list[str]:
        """Groups of which the name, or a module that computes their units, matches a shell pattern."""
        if isinstance(patterns, str):
            wanted = f"expected a tuple of names or patterns, such as ({patterns!r},)"
            raise HapError(option, f" is the string {patterns!r}; {wanted}")
        found = {
            p: [n for n, g in self.groups.items() if any(fnmatch.fnmatchcase(m, p) for m in g.modules)]
            for p in patterns
        }
        if nothing := [p for p, names in found.items() if not names]:
            raise HapError(option, f" has {nothing[0]!r}, which matches no group; groups are {', '.join(self.groups)}")
        return list(dict.fromkeys(n for names in found.values() for n in names))

    def relabelled(self, to: Ints) -> Groups:
        """A copy in which class c is class to[c]: 0 for what is kept from now on. Groups that are kept are left out."""
        groups = {n: relabelled(g, to) for n, g in self.groups.items() if to[g.classes].all()}
        feeds, tails = (to[pairs] for pairs in (self.feeds, self.head_tails))
        return replace(
            self,
            groups=groups,
            axes={key: to[classes] for key, classes in self.axes.items()},
            feeds=feeds[feeds.all(1)],
            costs=self.costs.relabelled(to),
            rewiring=self.rewiring.relabelled(to),
            traits=self.traits.relabelled(to),
            head_spaces=tuple(s for s in self.head_spaces if s.group in groups),
            head_tails=tails[tails.all(1)],
        )

    def restricted(self, modules: Iterable[str]) -> Groups:
        """A copy without what belongs to these modules, and without the groups inside them."""
        inside = tuple(f"{module}." for module in modules)

        def outside(name: str) -> bool:
            return not f"{name}.".startswith(inside)

        costs = self.costs
        return replace(
            self,
            groups={n: g for n, g in self.groups.items() if outside(n)},
            axes={key: classes for key, classes in self.axes.items() if outside(key[0])},
            shapes={n: shape for n, shape in self.shapes.items() if outside(n)},
            trainable=frozenset(filter(outside, self.trainable)),
            unprunable={n: about for n, about in self.unprunable.items() if outside(n)},
            conv_geometry={n: geometry for n, geometry in self.conv_geometry.items() if outside(n)},
            costs=replace(costs, weight_macs=tuple(x for x in costs.weight_macs if outside(x.weight))),
            rewiring=Rewiring(*(tuple(x for x in some if outside(x.module)) for some in vars(self.rewiring).values())),
        )

    def with_rewiring(self, **more: Iterable[Change]) -> Groups:
        """A copy with more to change around the layers when units go, named by the fields of `Rewiring`."""
        both: dict[str, Any] = {kind: (*getattr(self.rewiring, kind), *changes) for kind, changes in more.items()}
        return replace(self, rewiring=replace(self.rewiring, **both))

    def pads(self, name: str) -> bool:
        """Whether zeros stand in for units of this group when they go."""
        return not self.traits.zero_padded.isdisjoint(self.groups[name].classes.tolist())

    @property
    def units(self) -> int:
        return sum(len(g) for g in self.groups.values())

    def alive(self, kept: Bools, implanted: Bools | None = None) -> Bools:
        """Which classes live when those marked in `kept` do, of which those marked in `implanted` do by an implant."""
        live = kept.copy()
        live[self.feeds[kept[self.feeds[:, 0]], 1]] = True
        whole = kept if implanted is None else kept & ~implanted
        live[self.head_tails[:, 1]] = whole[self.head_tails[:, 0]]
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
        yield from (length.classes for length in self.rewiring.size_attributes)
        yield from (narrowing.classes for narrowing in self.rewiring.input_selections)

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
        return to_svg(self)

    def __str__(self) -> str:
        width = max((len(n) for n in self.groups), default=5)
        lines = [f"{self.units} units in {len(self)} groups, {self.coupling} coupling"]
        for g in self.groups.values():
            others = [p.weight for p in g.producers[1:]]
            reads = ", ".join(sorted({c for c, _ in g.consumers}))
            also = f"  with {', '.join(others)}" if others else ""
            zeros = ", zeros stand in for what goes" if self.pads(g.name) else ""
            zeros += "" if self.traits.padded_in_norms.isdisjoint(g.classes.tolist()) else " and enter a norm"
            lines.append(f"  {g.name:<{width}}  {len(g):>5} units{also}  read by {reads or 'nothing'}{zeros}")
        lines += [f"  frozen: {f.what} ({f.why})" for f in self.frozen]
        return "\n".join(lines)

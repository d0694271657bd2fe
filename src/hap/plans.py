"""Plan: for every unit keep, implant or remove, and what that means for every parameter. JSON in and out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hap.cost import Cost, CostModel
from hap.errors import HapError
from hap.groups import Bools, Group, Groups, Ints, Slice, Space
from hap.implants import ChannelImplant, Implant, implant_from_dict
from hap.untouched import untouched_in_words

Indices = dict[str, list[int]]


@dataclass(frozen=True)
class Cut:
    """Keep these indices, in this order, of axis `dim` (of length `size`) of a parameter or buffer."""

    name: str
    dim: int
    size: int
    keep: tuple[int, ...]


@dataclass(frozen=True)
class Graft:
    """Rows of a convolution's weight that an implant computes instead.

    The module's output is [remaining rows | implanted rows]; `order`, if not None, rearranges that.
    """

    module: str
    weight: str
    rows: tuple[int, ...]
    order: tuple[int, ...] | None


@dataclass(frozen=True)
class Widen:
    """Index i of axis `dim` of the module's output becomes index[i] of `width` indices, the others are zero.

    The output of its weight in the forward of the module `inside`, where that is given.
    """

    module: str
    index: tuple[int, ...]
    width: int
    dim: int = 1
    inside: str | None = None


@dataclass(frozen=True)
class Resize:
    """Set an integer attribute of a module, or one entry of an attribute that is a tuple or list of them."""

    module: str
    attribute: str
    value: int
    entry: int = 0


@dataclass(frozen=True)
class Narrow:
    """Of axis `dim` (of length `size`) of an argument, by place or name, the module gets these indices alone.

    Its weight does, in the forward of the module `inside`, where that is given.
    """

    module: str
    argument: int | str
    dim: int
    size: int
    index: tuple[int, ...]
    inside: str | None = None


@dataclass(frozen=True)
class Plan:
    kept: Indices
    implanted: Indices
    removed: Indices
    coupling: str
    cuts: tuple[Cut, ...]
    grafts: tuple[Graft, ...]
    widenings: tuple[Widen, ...]
    resizes: tuple[Resize, ...]
    implant: Implant | None
    before: Cost
    after: Cost
    exact: bool
    """Whether the pruned model must equal the dense one with zeros in place of what went (no norm spans it)."""
    example: Any
    narrowings: tuple[Narrow, ...] = ()
    turns: tuple[Space, ...] = ()
    """Where heads are narrowed: both sides go over to their singular vectors, the strongest first, before the cuts."""
    masks: bool = True
    """Whether it also equals the dense model in which layers read zeros in place of what went: no norm sees them."""
    untouched: str = ""
    """What no plan could have touched, in one sentence; empty where that is not worth a word."""

    def kept_inputs(self) -> dict[str, tuple[int, ...]]:
        """The input channels that stay, of each convolution or linear weight that loses some."""
        return {cut.name: cut.keep for cut in self.cuts if cut.dim == 1}

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("cuts", "grafts", "widenings", "resizes", "narrowings", "turns"):
            values[name] = [dataclasses.asdict(item) for item in values[name]]
        values["implant"] = self.implant.to_dict() if self.implant else None
        values["before"], values["after"] = dataclasses.asdict(self.before), dataclasses.asdict(self.after)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        try:
            values = {"narrowings": [], "turns": [], "masks": bool(values["exact"]), "untouched": "", **values}
            known = {f.name for f in dataclasses.fields(cls)}
            if set(values) != known:
                raise HapError(f"fields {sorted(set(values) ^ known)} are missing or unknown")
            items = {"cuts": Cut, "grafts": Graft, "widenings": Widen, "resizes": Resize, "narrowings": Narrow}
            made: dict[str, Any] = {k: tuple(t(**_tuples(v)) for v in values[k]) for k, t in items.items()}
            made["turns"] = tuple(_space(**v) for v in values["turns"])
            implant = implant_from_dict(values["implant"]) if values["implant"] else None
            costs = {k: Cost(**values[k]) for k in ("before", "after")}
            return cls(**{**values, **made, **costs, "implant": implant})
        except (TypeError, KeyError, AttributeError, HapError) as error:
            raise HapError(f"this is not a plan that this version of HAP wrote: {error}") from error

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise HapError(f"the plan is not valid JSON: {error}") from error

    def __str__(self) -> str:
        head = ("layer", "before", "kept", "implanted", "removed")
        rows = [
            (n, *map(str, (sum(map(len, parts)), *map(len, parts))))
            for n in self.kept
            for parts in [(self.kept[n], self.implanted[n], self.removed[n])]
        ]
        totals = [sum(int(r[i]) for r in rows) for i in range(1, 5)]
        rows.append(("total", *map(str, totals)))
        widths = [max(len(r[i]) for r in [head, *rows]) for i in range(5)]
        lines = [
            "  ".join([r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))])
            for r in [head, *rows]
        ]
        return "\n".join(
            [
                *lines,
                f"params {_change(self.before.params, self.after.params)}",
                f"MACs   {_change(self.before.macs, self.after.macs)}",
                f"values written by layers {_change(self.before.activations, self.after.activations)}",
                *([] if self.masks else [NORMED]),
                *([self.untouched] if self.untouched else []),
            ]
        )


NORMED = "a norm spans what goes, so what stays changes: the result is not that of masking it"


def _change(before: int, after: int) -> str:
    return f"{before:,} -> {after:,} ({after / before:.1%} left)" if before else "0"


def _space(left: list[Any], right: list[Any], **rest: Any) -> Space:
    return Space(left=tuple(Slice(**s) for s in left), right=tuple(Slice(**s) for s in right), **rest)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def draft(groups: Groups, removed: Mapping[str, Iterable[int]], implanted: Mapping[str, Iterable[int]] | None = None,
          implant: Implant | None = None, cost: CostModel | None = None) -> Plan:  # fmt: skip
    """The plan that removes and implants these units and keeps all others. No budget, no limits.

    Who makes many of them passes the `cost` of the groups.
    """
    groups = groups if implant is None else implant.prepared(groups)
    go = {n: _indices(groups, n, units) for n, units in removed.items()}
    turn = {n: _indices(groups, n, units) for n, units in (implanted or {}).items()}
    for name, units in turn.items():
        if both := set(go.get(name, [])) & set(units):
            raise HapError(f"unit {min(both)} of {name!r} is to be removed and implanted; expected one of the two")
        if units and implant is None:
            raise HapError("units are to be implanted, but implant is None; pass one such as hap.Pointwise()")
    kept, grafted = groups.all_kept(), np.zeros(groups.classes, dtype=bool)
    for name, units in go.items():
        kept[groups[name].classes[units]] = False
    for name, units in turn.items():
        grafted[groups[name].classes[units]] = True
        able = implant.eligible(groups)[groups[name].classes[units]] if implant is not None else np.ones(0, bool)
        if not able.all():
            raise HapError(f"unit {units[int(np.argmin(able))]} of {name!r} cannot be replaced by {implant}")
    return assemble(groups, kept, grafted, implant, cost)


def _indices(groups: Groups, name: str, units: Iterable[int]) -> list[int]:
    if name not in groups:
        raise HapError(f"there is no group {name!r}; expected one of {', '.join(groups)}")
    listed, size = [int(u) for u in units], len(groups[name])
    if listed and not (min(listed) >= 0 and max(listed) < size):
        wrong = next(u for u in listed if not 0 <= u < size)
        raise HapError(f"unit {wrong} of {name!r} does not exist; units go from 0 to {size - 1}")
    return listed


def assemble(
    groups: Groups, kept: Bools, grafted: Bools, implant: Implant | None, cost: CostModel | None = None
) -> Plan:
    """Turn a marking of classes (kept, and of these implanted) into a plan."""
    live = groups.alive(kept, grafted)
    marks = {
        n: (live[g.classes] & ~grafted[g.classes], grafted[g.classes], ~live[g.classes]) for n, g in groups.items()
    }
    lists: list[Indices] = [{n: np.flatnonzero(m[i]).tolist() for n, m in marks.items()} for i in range(3)]
    sorting = _Sorting(groups, grafted if isinstance(implant, ChannelImplant) else np.zeros_like(grafted))
    order = {key: sorting.order(classes, live) for key, classes in groups.axes.items()}
    grafts, rows_left = _grafts(groups, grafted, order)
    cuts = []
    for key, classes in groups.axes.items():
        keep = rows_left.get(key[0], order[key]) if key[1] == 0 else order[key]
        if not np.array_equal(keep, np.arange(len(classes))):
            cuts.append(Cut(key[0], key[1], len(classes), tuple(keep.tolist())))
    cost = cost or CostModel(groups, implant)
    nothing = np.zeros_like(kept)
    gone = set(np.flatnonzero(~live).tolist())
    turns = tuple(s for s in groups.spaces if grafted[groups[s.group].classes[s.unit]])
    return Plan(
        kept=lists[0], implanted=lists[1], removed=lists[2], coupling=groups.coupling,
        cuts=tuple(cuts), grafts=tuple(grafts),
        widenings=tuple(_widenings(groups, live, sorting)), resizes=tuple(_resizes(groups, live)),
        implant=implant if grafts or turns else None,
        before=cost(groups.all_kept(), nothing), after=cost(kept, grafted),
        exact=not (groups.spanned & gone), example=groups.example, narrowings=tuple(_narrowings(groups, live)),
        turns=turns, masks=not ((groups.spanned | groups.renormed) & gone), untouched=untouched_in_words(groups),
    )  # fmt: skip


class _Sorting:
    """In which order the surviving indices of an axis stand.

    A group with implants comes as [kept | implanted] wherever each axis holds its units whole and in order, so that
    no gather is needed at run time; all others keep their natural order.
    """

    def __init__(self, groups: Groups, grafted: Bools):
        self.grafted = grafted
        self.movable = np.zeros(len(grafted), dtype=bool)
        self.block = np.zeros(len(grafted), dtype=np.int64)
        for number, group in enumerate(groups.values(), 1):
            self.block[group.classes] = number
        axes: dict[int, list[Ints]] = {}
        for classes in groups.axes.values() if grafted.any() else ():
            for number in np.unique(self.block[classes]).tolist():
                axes.setdefault(number, []).append(classes)
        for number, group in enumerate(groups.values(), 1):
            if grafted[group.classes].any() and all(_in_blocks(group, classes) for classes in axes[number]):
                self.movable[group.classes] = True
        self.natural = not self.movable.any()

    def order(self, classes: Ints, live: Bools) -> Ints:
        if self.natural:
            return np.flatnonzero(live[classes])
        block = self.block[classes]
        run = np.cumsum(np.concatenate([[0], block[1:] != block[:-1]]))
        late = self.grafted[classes] & self.movable[classes]
        positions = np.lexsort((np.arange(len(classes)), late, run))
        return positions[live[classes[positions]]]


def _in_blocks(group: Group, classes: Ints) -> bool:
    """Whether the units stand here in whole blocks, u0..uN in order, evenly repeated (as in flattened maps)."""
    inside = np.isin(classes, group.classes)
    if not inside.any():
        return True
    starts = np.flatnonzero(np.diff(np.concatenate([[False], inside])) & inside)
    ends = np.flatnonzero(np.diff(np.concatenate([inside, [False]])) & inside) + 1
    for start, end in zip(starts, ends, strict=True):
        repeat, rest = divmod(end - start, len(group.classes))
        if rest or not np.array_equal(classes[start:end], np.repeat(group.classes, repeat)):
            return False
    return True


def _grafts(groups: Groups, grafted: Bools, order: dict[tuple[str, int], Ints]) -> tuple[list[Graft], dict[str, Ints]]:
    """The implants, and the rows that stay in each weight and bias that gets one."""
    grafts, rows_left = [], {}
    for weight, site in groups.sites.items():
        rows = order[weight, 0]
        late = grafted[groups.axes[weight, 0][rows]]
        if late.any() and site.area > 1:
            mixed = np.argsort(np.argsort(late, kind="stable"), kind="stable")  # where each output channel went
            natural = None if np.array_equal(mixed, np.arange(len(rows))) else tuple(mixed.tolist())
            grafts.append(Graft(site.module, weight, tuple(rows[late].tolist()), natural))
            rows_left[weight] = rows[~late]
            rows_left[f"{site.module}.bias" if site.module else "bias"] = rows[~late]
    return grafts, rows_left


def _resizes(groups: Groups, live: Bools) -> Iterable[Resize]:
    for length in groups.lengths:
        if (count := int(live[length.classes].sum())) < len(length.classes):
            yield Resize(length.module, length.attribute, count // length.per, length.entry)


def _narrowings(groups: Groups, live: Bools) -> Iterable[Narrow]:
    for item in groups.narrowings:
        given = item.classes if item.among is None else item.classes[live[item.among]]
        index = np.flatnonzero(live[given])
        if len(index) < len(given):
            yield Narrow(item.module, item.argument, item.dim, len(given), tuple(index.tolist()), item.inside)


def _widenings(groups: Groups, live: Bools, sorting: _Sorting) -> Iterable[Widen]:
    for scatter in groups.scatters:
        narrow, wide = sorting.order(scatter.narrow, live), sorting.order(scatter.wide, live)
        place = {int(position): i for i, position in enumerate(wide)}
        index = tuple(place[int(p)] for p in narrow)
        if index != tuple(range(len(wide))):
            yield Widen(scatter.module, index, len(wide), scatter.dim, scatter.inside)

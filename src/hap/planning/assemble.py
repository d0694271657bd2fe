"""From units to keep and to implant to a plan: the cuts, implants and sizes that follow."""

from collections.abc import Iterable, Mapping

import numpy as np

from hap.errors import HapError
from hap.groups.groups import Groups
from hap.groups.types import Bools, ConvGeometry, Group, Ints
from hap.groups.unprunable_summary import unprunable_in_words
from hap.implants import Implant
from hap.planning.cost import CostModel
from hap.planning.plan import Cut, ImplantStep, Indices, InputSelectionStep, OutputScatterStep, Plan, SetSizeStep


def draft(
    groups: Groups,
    removed: Mapping[str, Iterable[int]],
    implanted: Mapping[str, Iterable[int]] | None = None,
    implant: Implant | None = None,
    cost: CostModel | None = None,
) -> Plan:
    """Write the plan that removes and implants these units and keeps all others, without budget or limits.

    >>> groups = hap.trace(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(2, 4))
    >>> hap.draft(groups, {"0": [3, 7]}).cuts[0].name
    '0.weight'

    Arguments: `removed` and `implanted` list units by group, `implant` is what replaces the latter. Who drafts many
    plans passes the `CostModel` of the groups.
    Returns: the plan. HapError if there are no such units.
    """
    groups = groups if implant is None else implant.prepared(groups)
    gone = {n: _indices(groups, n, units) for n, units in removed.items()}
    replaced = {n: _indices(groups, n, units) for n, units in (implanted or {}).items()}
    kept, marked = groups.all_kept(), np.zeros(groups.classes, dtype=bool)
    for name, units in gone.items():
        kept[groups[name].classes[units]] = False
    for name, units in ((n, u) for n, u in replaced.items() if u):
        if both := set(gone.get(name, [])) & set(units):
            raise HapError(f"unit {min(both)} of {name!r} is to be removed and implanted; expected one of the two")
        if implant is None:
            raise HapError("units are to be implanted, but implant is None; pass one such as hap.Pointwise()")
        classes = groups[name].classes[units]
        able = implant.eligible(groups)[classes]
        if not able.all():
            raise HapError(f"unit {units[int(np.argmin(able))]} of {name!r} cannot be replaced by {implant}")
        marked[classes] = True
    return assemble(groups, kept, marked, implant, cost)


def _indices(groups: Groups, name: str, units: Iterable[int]) -> list[int]:
    if name not in groups:
        raise HapError(f"there is no group {name!r}; expected one of {', '.join(groups)}")
    listed, size = [int(u) for u in units], len(groups[name])
    if wrong := [u for u in listed if not 0 <= u < size]:
        raise HapError(f"unit {wrong[0]} of {name!r} does not exist; units go from 0 to {size - 1}")
    return listed


def assemble(
    groups: Groups, kept: Bools, implanted: Bools, implant: Implant | None, cost: CostModel | None = None
) -> Plan:
    """Turn a marking of classes (kept, and of these implanted) into a plan."""
    live = groups.alive(kept, implanted)

    def units(marked: Bools) -> Indices:
        return {name: np.flatnonzero(marked[group.classes]).tolist() for name, group in groups.items()}

    layers = {} if implant is None else implant.layers(groups)
    sorting = _Sorting(groups, live, implanted & bool(layers))
    order = {key: sorting.order(classes) for key, classes in groups.axes.items()}
    grafts = _take_implants(groups, layers, implanted, order)
    cuts = (
        Cut(*key, len(groups.axes[key]), tuple(keep.tolist()))
        for key, keep in order.items()
        if not np.array_equal(keep, np.arange(len(groups.axes[key])))
    )
    cost = cost or CostModel(groups, implant)
    gone = set(np.flatnonzero(~live).tolist())
    turns = tuple(s for s in groups.head_spaces if implanted[groups[s.group].classes[s.unit]])
    return Plan(
        kept=units(live & ~implanted),
        implanted=units(implanted),
        removed=units(~live),
        coupling=groups.coupling,
        cuts=tuple(cuts),
        grafts=tuple(grafts),
        widenings=tuple(_output_scatters(groups, sorting)),
        resizes=tuple(_sizes(groups, live)),
        implant=implant if grafts or turns else None,
        before=cost(groups.all_kept(), np.zeros_like(kept)),
        after=cost(kept, implanted),
        exact=not groups.traits.spanned & gone,
        example=groups.example,
        narrowings=tuple(_input_selections(groups, live)),
        turns=turns,
        masks=not (groups.traits.spanned | groups.traits.padded_in_norms) & gone,
        untouched=unprunable_in_words(groups),
    )


class _Sorting:
    """In which order the surviving indices of an axis stand.

    A group with implants comes as [kept | implanted] wherever each axis holds its units whole and in order, so that
    no gather is needed at run time; all others keep their natural order.
    """

    def __init__(self, groups: Groups, live: Bools, implanted: Bools):
        self.live, self.late = live, np.zeros_like(live)
        self.block = np.zeros(len(live), dtype=np.int64)
        if not implanted.any():
            return
        for number, group in enumerate(groups.values(), 1):
            self.block[group.classes] = number
        for group in groups.values():
            if implanted[group.classes].any() and all(self._in_blocks(group, axis) for axis in groups.axes.values()):
                self.late[group.classes] = implanted[group.classes]

    def _in_blocks(self, group: Group, classes: Ints) -> bool:
        """Whether the units stand here in whole blocks, u0..uN in order, evenly repeated (as in flattened maps)."""
        places = np.flatnonzero(self.block[classes] == self.block[group.classes[0]])
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            repeat, rest = divmod(len(run), len(group))
            if rest or not np.array_equal(classes[run], np.repeat(group.classes, repeat)):
                return False
        return True

    def order(self, classes: Ints) -> Ints:
        if not self.late[classes].any():
            return np.flatnonzero(self.live[classes])
        block = self.block[classes]
        run = np.cumsum(block != np.roll(block, 1))
        positions = np.lexsort((self.late[classes], run))
        return positions[self.live[classes[positions]]]


def _take_implants(
    groups: Groups, layers: Mapping[str, ConvGeometry], implanted: Bools, order: dict[tuple[str, int], Ints]
) -> list[ImplantStep]:
    """The implants. What they compute is taken out of the rows that stay of weights and biases."""
    grafts = []
    for weight, geometry in layers.items():
        rows = order[weight, 0]
        late = implanted[groups.axes[weight, 0][rows]]
        if late.any():
            mixed = np.argsort(np.argsort(late, kind="stable"), kind="stable")  # where each output channel went
            natural = None if np.array_equal(mixed, np.arange(len(rows))) else tuple(mixed.tolist())
            grafts.append(ImplantStep(geometry.module, weight, tuple(rows[late].tolist()), natural))
            for name in (weight, f"{geometry.module}.bias".lstrip(".")):
                if (name, 0) in order:
                    order[name, 0] = rows[~late]
    return grafts


def _sizes(groups: Groups, live: Bools) -> Iterable[SetSizeStep]:
    for size in groups.rewiring.size_attributes:
        if (count := int(live[size.classes].sum())) < len(size.classes):
            yield SetSizeStep(size.module, size.attribute, count // size.per, size.entry)


def _input_selections(groups: Groups, live: Bools) -> Iterable[InputSelectionStep]:
    for item in groups.rewiring.input_selections:
        entering = item.classes if item.among is None else item.classes[live[item.among]]
        index = np.flatnonzero(live[entering])
        if len(index) < len(entering):
            yield InputSelectionStep(
                item.module, item.argument, item.dim, len(entering), tuple(index.tolist()), item.inside
            )


def _output_scatters(groups: Groups, sorting: _Sorting) -> Iterable[OutputScatterStep]:
    for scatter in groups.rewiring.output_scatters:
        narrow, wide = sorting.order(scatter.narrow), sorting.order(scatter.wide)
        place = {int(position): i for i, position in enumerate(wide)}
        index = tuple(place[int(p)] for p in narrow)
        if index != tuple(range(len(wide))):
            yield OutputScatterStep(scatter.module, index, len(wide), scatter.dim, scatter.inside)

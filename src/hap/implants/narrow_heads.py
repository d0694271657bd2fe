"""A narrower attention head in place of a whole one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from hap.errors import HapError
from hap.groups.groups import Groups
from hap.groups.types import Bools, HeadSpace, InputSelection, Ints, OutputScatter
from hap.implants.base import Implant


@dataclass(frozen=True)
class NarrowHeads(Implant):
    """A head keeps the share `rank` of its width: the leading singular directions of what its queries and keys are
    multiplied to, and of what its values and outputs are.

    Heads of one layer may differ. The layers that compute a narrow head are smaller; behind them zeros fill it up to
    the width of the others, and what reads it skips these. So the attention in between, and the factor that it scales
    scores by, stay what they were. `hap.narrowable` finds the heads that this can be done to.
    """

    rank: float = 0.5

    needs_head_spaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rank <= 1:
            raise HapError(f"rank is {self.rank}; expected the share of a head's width that is LEFT, such as 0.5")

    def width(self, space: HeadSpace) -> int:
        """What is left of a head's width."""
        return max(1, round(self.rank * space.left[0].width))

    def eligible(self, groups: Groups) -> Bools:
        able = np.zeros(groups.classes, dtype=bool)
        able[[groups[s.group].classes[s.unit] for s in groups.head_spaces]] = True
        return able

    def prepared(self, groups: Groups) -> Groups:
        """The groups with a class of its own for what goes when a head is narrowed."""
        if not groups.head_spaces:
            raise HapError(
                "it is not known which heads can be narrowed; expected groups from hap.narrowable(model, groups, "
                "example), or no head of this model can be"
            )
        heads = np.unique([groups[s.group].classes[s.unit] for s in groups.head_spaces])
        tails = np.stack([heads, groups.classes + np.arange(len(heads))], axis=1)
        axes = {key: classes.copy() for key, classes in groups.axes.items()}
        for space in groups.head_spaces:
            head = groups[space.group].classes[space.unit]
            tail = tails[np.searchsorted(heads, head), 1]
            for part in (*space.left, *space.right):
                for axis in part.axes:
                    axes[axis][part.start + self.width(space) : part.start + part.width] = tail
        layers = list(_narrowed(groups, axes))
        left = {(name, before.tobytes()): now for name, now, before, _ in layers}
        counts = groups.rewiring.size_attributes
        follow = tuple(replace(x, classes=left.get((x.module, x.classes.tobytes()), x.classes)) for x in counts)
        return replace(
            groups,
            axes=axes,
            classes=groups.classes + len(heads),
            head_tails=tails,
            rewiring=replace(groups.rewiring, size_attributes=follow),
        ).with_rewiring(
            output_scatters=(OutputScatter(name, now, before, -1) for name, now, before, reads in layers if not reads),
            input_selections=(InputSelection(name, 0, -1, now, before) for name, now, before, reads in layers if reads),
        )


def _narrowed(groups: Groups, axes: dict[tuple[str, int], Ints]) -> Iterator[tuple[str, Ints, Ints, bool]]:
    """The layers that are changed, each with the classes of its heads now and before, and whether it reads them."""
    readers = {key for s in groups.head_spaces for key in groups[s.group].consumers}
    for axis in dict.fromkeys((p.weight, p.dim) for s in groups.head_spaces for p in (*s.left, *s.right)):
        if not np.array_equal(axes[axis], groups.axes[axis]):
            yield axis[0].rpartition(".")[0], axes[axis], groups.axes[axis], axis in readers

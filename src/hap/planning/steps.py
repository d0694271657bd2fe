"""The steps of a plan: what is done to one tensor or module.

Each has `check(tensors, modules)`, which raises HapError if it does not fit a model with these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hap.errors import HapError
from hap.groups.types import HeadSpace

Tensors = Mapping[str, Tensor]
Modules = Mapping[str, nn.Module]
UNFIT = "the plan does not fit this model"
DAMAGED = "the plan is damaged"


@dataclass(frozen=True)
class Cut:
    """Keep these indices, in this order, of axis `dim` (of length `size`) of a parameter or buffer."""

    name: str
    dim: int
    size: int
    keep: tuple[int, ...]

    def check(self, tensors: Tensors, modules: Modules) -> None:
        shape = tuple(tensors[self.name].shape) if self.name in tensors else None
        if shape is None or not 0 <= self.dim < len(shape) or shape[self.dim] != self.size:
            seen = f"has shape {shape}" if shape else "does not exist"
            raise HapError(
                f"{UNFIT}: {self.name} should have length {self.size} on axis {self.dim}, but {seen}. Was the plan "
                "made for another model, or applied to this one before?"
            )
        if not _distinct_below(self.keep, self.size):
            raise HapError(f"{DAMAGED}: it keeps {list(self.keep)[:5]}... of the {self.size} in {self.name}")


@dataclass(frozen=True)
class ImplantStep:
    """Rows of a convolution's weight that an implant computes instead.

    The module's output is [remaining rows | implanted rows]; `order`, if not None, rearranges that.
    """

    module: str
    weight: str
    rows: tuple[int, ...]
    order: tuple[int, ...] | None

    def check(self, tensors: Tensors, modules: Modules) -> None:
        conv, order = _module(modules, self.module), self.order or ()
        rows_fit = isinstance(conv, nn.Conv2d) and _distinct_below(self.rows, len(conv.weight))
        if not rows_fit or not _distinct_below(order, len(order)):
            raise HapError(f"{UNFIT}: {self.module} cannot take its implant")


@dataclass(frozen=True)
class OutputScatterStep:
    """Index i of axis `dim` of the module's output becomes index[i] of `width` indices, the others are zero.

    The output of its weight in the forward of the module `inside`, where that is given.
    """

    module: str
    index: tuple[int, ...]
    width: int
    dim: int = 1
    inside: str | None = None

    def check(self, tensors: Tensors, modules: Modules) -> None:
        _module(modules, self.module), _module(modules, self.inside or self.module)
        if not _distinct_below(self.index, self.width):
            raise HapError(f"{DAMAGED}: {self.module} cannot be spread over {self.width} channels")


@dataclass(frozen=True)
class SetSizeStep:
    """Set an integer attribute of a module, or one entry of an attribute that is a tuple or list of them."""

    module: str
    attribute: str
    value: int
    entry: int = 0

    def check(self, tensors: Tensors, modules: Modules) -> None:
        old = vars(_module(modules, self.module)).get(self.attribute)
        several = isinstance(old, tuple | list) and 0 <= self.entry < len(old)
        size = old[self.entry] if several else old  # type: ignore[index]
        if type(size) is not int or type(self.value) is not int or not 1 <= self.value <= size:
            where = f"{self.module}.{self.attribute}".lstrip(".")
            raise HapError(
                f"the plan sets {where} to {self.value!r}: expected 1 to {size}. Keep one of the units it counts."
            )


@dataclass(frozen=True)
class InputSelectionStep:
    """Of axis `dim` (of length `size`) of an argument, by place or name, the module gets these indices alone.

    Its weight does, in the forward of the module `inside`, where that is given.
    """

    module: str
    argument: int | str
    dim: int
    size: int
    index: tuple[int, ...]
    inside: str | None = None

    def check(self, tensors: Tensors, modules: Modules) -> None:
        _module(modules, self.module), _module(modules, self.inside or self.module)
        if not self.index or not _distinct_below(self.index, self.size):
            raise HapError(f"{DAMAGED}: {self.module} cannot pick {list(self.index)} of {self.size}")


STEPS: dict[str, type[Any]] = {
    "cuts": Cut,
    "grafts": ImplantStep,
    "resizes": SetSizeStep,
    "widenings": OutputScatterStep,
    "narrowings": InputSelectionStep,
}
"""By the field of a plan that lists them, in its file too."""


def check_head(space: HeadSpace, tensors: Tensors) -> None:
    """Whether the model has the slices of a head that is to be rotated."""
    for part in (*space.left, *space.right):
        for name, dim in part.axes:
            if name not in tensors or not 0 <= part.start <= tensors[name].shape[dim] - part.width:
                raise HapError(f"{UNFIT}: {name} has no head at {part.start}")


def _module(modules: Modules, name: str) -> nn.Module:
    if name not in modules:
        raise HapError(f"{UNFIT}: it has no module {name!r}")
    return modules[name]


def _distinct_below(values: tuple[int, ...], size: int) -> bool:
    """Whether these are different indices of something that has `size` elements."""
    whole = set(map(type, values)) <= {int}
    return whole and len(set(values)) == len(values) and set(values).issubset(range(size))

"""Plan: for every unit keep, implant or remove, and the steps that follow from that. JSON in and out.

A step is what is done to one tensor or module. Each has `check(tensors, modules)`, which raises HapError if it does not
fit a model with these.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hap.errors import HapError
from hap.groups.types import HeadSlice, HeadSpace
from hap.implants import Implant, implant_from_dict
from hap.planning.cost import Cost
from hap.utils.module_tree import named_tensors

Indices = dict[str, list[int]]
Tensors = Mapping[str, Tensor]
Modules = Mapping[str, nn.Module]
UNFIT = "the plan does not fit this model"
DAMAGED = "the plan is damaged"
HEAD = ["layer", "before", "kept", "implanted", "removed"]
NORMED = "a norm spans what goes, so what stays changes: the result is not that of masking it"


@dataclass(frozen=True)
class Plan:
    """What becomes of each unit (`kept`, `implanted`, `removed`), the steps that follow from that, and the cost.

    >>> groups = hap.trace(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(2, 4))
    >>> plan = hap.draft(groups, {"0": [3, 7]})
    >>> hap.Plan.from_json(plan.to_json()) == plan
    True

    `print` shows a table. Where heads are narrowed, `turns` lists the spaces that are rotated before the cuts, so that
    the strongest singular directions come first.
    """

    kept: Indices
    implanted: Indices
    removed: Indices
    coupling: str
    cuts: tuple[Cut, ...]
    grafts: tuple[ImplantStep, ...]
    widenings: tuple[OutputScatterStep, ...]
    resizes: tuple[SetSizeStep, ...]
    implant: Implant | None
    before: Cost
    after: Cost
    exact: bool
    """Whether the pruned model equals the dense one whose weights of removed units are zero: no norm averages them."""
    example: Any
    narrowings: tuple[InputSelectionStep, ...] = ()
    turns: tuple[HeadSpace, ...] = ()
    masks: bool = True
    """Whether it equals the dense one in which layers read zeros for removed units: no norm reads them on the way."""
    untouched: str = ""
    """What no plan could have touched, in one sentence; empty where that is not worth a word."""
    curve: tuple[Tried, ...] = ()
    """What else was tried to meet a tolerated drop (`hap.prune_(..., max_drop=)`), by FLOPs left."""

    def check_fits(self, model: nn.Module) -> None:
        """Refuse a model that the plan was not made for, or on which it was carried out already: HapError says why."""
        tensors, modules = named_tensors(model), dict(model.named_modules())
        for step in (step for name in STEPS for step in getattr(self, name)):
            step.check(tensors, modules)
        for space in self.turns:
            _check_head(space, tensors)
        if self.grafts and self.implant is None:
            raise HapError(f"{DAMAGED}: it has implants but does not say of which kind")

    def kept_inputs(self) -> dict[str, tuple[int, ...]]:
        """The input channels that stay, of each convolution or linear weight that loses some."""
        return {cut.name: cut.keep for cut in self.cuts if cut.dim == 1}

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in (*STEPS, "turns", "curve"):
            values[name] = [dataclasses.asdict(item) for item in values[name]]
        if not self.curve:  # plans without it are as older versions read them
            del values["curve"]
        values["implant"] = self.implant.to_dict() if self.implant else None
        values["before"], values["after"] = dataclasses.asdict(self.before), dataclasses.asdict(self.after)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        try:
            values = {
                "narrowings": [],
                "turns": [],
                "masks": bool(values["exact"]),
                "untouched": "",
                "curve": [],
                **values,
            }
            known = {f.name for f in dataclasses.fields(cls)}
            if set(values) != known:
                raise HapError(f"fields {sorted(set(values) ^ known)} are missing or unknown")
            made: dict[str, Any] = {k: tuple(kind(**_tuples(v)) for v in values[k]) for k, kind in STEPS.items()}
            made["curve"] = tuple(Tried(**v) for v in values["curve"])
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
        parts = (self.kept, self.implanted, self.removed)
        counts = [[len(part[n]) for part in parts] for n in self.kept] + [[sum(map(len, p.values())) for p in parts]]
        named = zip([*self.kept, "total"], counts, strict=True)
        table = [HEAD, *([name, str(sum(row)), *map(str, row)] for name, row in named)]
        first, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
        lines = ["  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in table]
        lines += [
            f"params {_change(self.before.params, self.after.params)}",
            f"MACs   {_change(self.before.macs, self.after.macs)}",
            f"values written by layers {_change(self.before.activations, self.after.activations)}",
        ]
        return "\n".join(lines + [NORMED] * (not self.masks) + [self.untouched] * bool(self.untouched))


def _change(before: int, after: int) -> str:
    return f"{before:,} -> {after:,} ({after / before:.1%} left)" if before else "0"


def _space(left: list[Any], right: list[Any], **rest: Any) -> HeadSpace:
    return HeadSpace(left=tuple(HeadSlice(**s) for s in left), right=tuple(HeadSlice(**s) for s in right), **rest)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


@dataclass(frozen=True)
class Tried:
    """A budget that was tried: shares of FLOPs and parameters left, the drop in quality, and what it is at most."""

    flops: float
    params: float
    drop: float
    bound: float
    within: bool


# ---- steps ---------------------------------------------------------------------------------------------------


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
    """Rows of a convolution's weight that an implant computes instead. The module's output is [remaining rows |
    implanted rows]; `order`, if not None, rearranges that."""

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
    """Index i of axis `dim` of the module's output becomes index[i] of `width` indices, the others are zero. Where
    `inside` is given, that is the output of its weight in the forward of the module `inside`."""

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
    """Of axis `dim` (of length `size`) of an argument, by place or name, the module gets these indices alone; where
    `inside` is given, its weight does, in the forward of the module `inside`."""

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


def _check_head(space: HeadSpace, tensors: Tensors) -> None:
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

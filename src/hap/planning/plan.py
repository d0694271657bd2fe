"""Plan: for every unit keep, implant or remove, and what that means for every parameter. JSON in and out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hap.errors import HapError
from hap.groups.types import HeadSlice, HeadSpace
from hap.implants import Implant, implant_from_dict
from hap.planning.cost import Cost
from hap.planning.steps import (
    DAMAGED,
    STEPS,
    Cut,
    ImplantStep,
    InputSelectionStep,
    OutputScatterStep,
    SetSizeStep,
    check_head,
)
from hap.utils.module_tree import named_tensors

Indices = dict[str, list[int]]


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
    """Whether the pruned model must equal the dense one with zeros in place of what went (no norm spans it)."""
    example: Any
    narrowings: tuple[InputSelectionStep, ...] = ()
    turns: tuple[HeadSpace, ...] = ()
    masks: bool = True
    """Whether it also equals the dense model in which layers read zeros in place of what went: no norm sees them."""
    untouched: str = ""
    """What no plan could have touched, in one sentence; empty where that is not worth a word."""

    def check_fits(self, model: nn.Module) -> None:
        """Refuse a model that the plan was not made for, or on which it was carried out already: HapError says why."""
        tensors, modules = named_tensors(model), dict(model.named_modules())
        for step in (step for name in STEPS for step in getattr(self, name)):
            step.check(tensors, modules)
        for space in self.turns:
            check_head(space, tensors)
        if self.grafts and self.implant is None:
            raise HapError(f"{DAMAGED}: it has implants but does not say of which kind")

    def kept_inputs(self) -> dict[str, tuple[int, ...]]:
        """The input channels that stay, of each convolution or linear weight that loses some."""
        return {cut.name: cut.keep for cut in self.cuts if cut.dim == 1}

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in (*STEPS, "turns"):
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
            made: dict[str, Any] = {k: tuple(kind(**_tuples(v)) for v in values[k]) for k, kind in STEPS.items()}
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
        lines = [
            "  ".join([name.ljust(first), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))])
            for name, *cells in table
        ]
        lines += [
            f"params {_change(self.before.params, self.after.params)}",
            f"MACs   {_change(self.before.macs, self.after.macs)}",
            f"values written by layers {_change(self.before.activations, self.after.activations)}",
        ]
        return "\n".join(lines + [NORMED] * (not self.masks) + [self.untouched] * bool(self.untouched))


HEAD = ["layer", "before", "kept", "implanted", "removed"]
NORMED = "a norm spans what goes, so what stays changes: the result is not that of masking it"


def _change(before: int, after: int) -> str:
    return f"{before:,} -> {after:,} ({after / before:.1%} left)" if before else "0"


def _space(left: list[Any], right: list[Any], **rest: Any) -> HeadSpace:
    return HeadSpace(left=tuple(HeadSlice(**s) for s in left), right=tuple(HeadSlice(**s) for s in right), **rest)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

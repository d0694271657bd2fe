"""Implants: cheaper modules in place of k x k output channels, and narrower attention heads in place of whole ones.

May be imported from here: the kinds, `Implant` and `ChannelImplant` to derive one from, `ImplantModule`, `as_implant`
and `implant_from_dict`. Start reading at `base.py`, which says what a kind has to answer: what it can stand in for,
what it costs, and which module it builds. `pointwise.py` is the paper's implant. A new kind is one file here and one
name in KINDS: see "An implant of your own" in docs/extending.md.
"""

from typing import Any

from hap.errors import Argument, HapError
from hap.implants.base import ChannelImplant, Implant, ImplantModule
from hap.implants.factorised import DepthwiseSeparable, SpatialLowRank
from hap.implants.narrow_heads import NarrowHeads
from hap.implants.pointwise import LowRank, Pointwise

KINDS: dict[str, type[Implant]] = {
    kind.__name__: kind for kind in (Pointwise, LowRank, DepthwiseSeparable, SpatialLowRank, NarrowHeads)
}

__all__ = [
    "KINDS", "ChannelImplant", "DepthwiseSeparable", "Implant", "ImplantModule", "LowRank", "NarrowHeads",
    "Pointwise", "SpatialLowRank", "as_implant", "implant_from_dict",
]  # fmt: skip


def implant_from_dict(values: dict[str, Any]) -> Implant:
    """The inverse of `Implant.to_dict`. Only the kinds listed here can be named."""
    fields = dict(values)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise HapError(
            Argument("implant_kind", kind, text="implant kind"), f" is {kind!r}; expected one of {', '.join(KINDS)}"
        )
    return KINDS[kind](**fields)


def as_implant(value: Implant | float | str | None) -> Implant | None:
    """An implant, a ratio (a `Pointwise` with that ratio), a kind's name, or None."""
    if value is None or isinstance(value, Implant):
        return value
    if isinstance(value, str):
        return implant_from_dict({"kind": value})
    if isinstance(value, int | float):
        return Pointwise(ratio=float(value)) if value else None
    raise HapError(f"implant is {value!r}; expected hap.Pointwise(...), another implant, a ratio such as 0.2, or None")

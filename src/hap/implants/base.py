"""What every implant kind can do. Planning asks what it costs, surgery asks it to build the module."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from hap.errors import HapError
from hap.groups.groups import Groups
from hap.groups.types import Bools, ConvGeometry


class ImplantModule(nn.Module, ABC):
    """Computes some output channels of a convolution from its input, with the same output size."""

    @abstractmethod
    def kernel(self) -> Tensor:
        """The k x k convolution weight (rows, inputs, *kernel) that computes the same thing."""

    @property
    @abstractmethod
    def bias_values(self) -> Tensor | None:
        """One value per row, or None."""


@dataclass(frozen=True)
class Implant(ABC):
    """Which share of the units to be removed is replaced instead, and by what."""

    ratio: float = 0.2

    blind: ClassVar[bool] = False
    """A blind implant is placed without looking at the scores: the paper's control."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise HapError(
                f"implant ratio is {self.ratio}; expected a share of the removed units, above 0 and at most 1"
            )

    @property
    def needs_inputs(self) -> bool:
        """Whether it starts from calibration inputs."""
        return False

    def prepared(self, groups: Groups) -> Groups:
        """The groups as planning with this implant needs them."""
        return groups

    @abstractmethod
    def eligible(self, groups: Groups) -> Bools:
        """Which classes it can stand in for."""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__} | dataclasses.asdict(self)


@dataclass(frozen=True)
class ChannelImplant(Implant):
    """A module beside a k x k convolution that computes some of its channels."""

    init: str = "lstsq"

    inits: ClassVar[tuple[str, ...]] = ("lstsq",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init not in self.inits:
            raise HapError(f"init is {self.init!r}; {type(self).__name__} knows {', '.join(map(repr, self.inits))}")

    def eligible(self, groups: Groups) -> Bools:
        """Classes whose k x k producers can all take an implant, and that have at least one."""
        some, bad = np.zeros(groups.classes, dtype=bool), np.zeros(groups.classes, dtype=bool)
        for group in groups.values():
            for producer in group.producers:
                shape = groups.shapes[producer.weight]
                if math.prod(shape[2:]) > 1:
                    able = producer.weight in groups.conv_geometry
                    (some if able else bad)[groups.axes[producer.weight, producer.dim]] = True
        some[0] = False
        return some & ~bad

    @abstractmethod
    def params(self, site: ConvGeometry, inputs: int, rows: int) -> int:
        """Parameters (without biases) of an implant that computes `rows` channels from `inputs` channels."""

    @abstractmethod
    def macs(self, site: ConvGeometry, inputs: int, rows: int) -> int:
        """Multiply-adds of the same on the traced example."""

    def inner(self, site: ConvGeometry, inputs: int, rows: int) -> int:
        """Values that it writes on the way to its rows, on the traced example."""
        return 0

    @abstractmethod
    def build(self, site: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None) -> ImplantModule:
        """The module for these dense rows. `weight`: (rows, inputs, *kernel); `fit`: (rows, inputs) for `Pointwise`."""


def tap_padding(site: ConvGeometry, taps: tuple[int, int]) -> list[int]:
    """Padding (left, right, top, bottom; negative crops) that lets one tap of the kernel act as a 1x1 convolution."""
    sides = []
    for axis in (1, 0):
        before = site.padding[axis] - site.dilation[axis] * taps[axis]
        after = site.padding[axis] - site.dilation[axis] * (site.kernel[axis] - 1 - taps[axis])
        sides += [before, after]
    return sides


def pad(x: Tensor, sides: list[int]) -> Tensor:
    return F.pad(x, sides) if any(sides) else x

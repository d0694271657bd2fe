"""The paper's implant: a 1x1 convolution in place of a k x k one."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hap.groups.types import ConvGeometry, Floats
from hap.implants.base import ChannelImplant, ImplantModule, convolution


def centre(geometry: ConvGeometry) -> tuple[int, int]:
    return (geometry.kernel[0] - 1) // 2, (geometry.kernel[1] - 1) // 2


def centre_padding(geometry: ConvGeometry) -> list[int]:
    """Padding (left, right, top, bottom; negative crops) that lets the kernel's centre act as a 1x1 convolution."""
    taps, last = centre(geometry), [length - 1 for length in geometry.kernel]
    sides = ((axis, steps) for axis in (1, 0) for steps in (taps[axis], last[axis] - taps[axis]))
    return [geometry.padding[axis] - geometry.dilation[axis] * steps for axis, steps in sides]


class PointwiseImplant(ImplantModule):
    def __init__(self, geometry: ConvGeometry, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.conv = convolution(weight[:, :, None, None], bias, stride=geometry.stride)
        self.size, self.taps, self.sides = geometry.kernel, centre(geometry), centre_padding(geometry)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.sides) if any(self.sides) else x)

    def kernel(self) -> Tensor:
        dense = self.conv.weight.new_zeros(*self.conv.weight.shape[:2], *self.size)
        dense[:, :, self.taps[0], self.taps[1]] = self.conv.weight[:, :, 0, 0].detach()
        return dense


@dataclass(frozen=True)
class Pointwise(ChannelImplant):
    """1x1 for k x k, at a ninth of the cost for 3 x 3.

    `init` sets the start values: "lstsq" fits the replaced channels on calibration inputs (the best 1x1 kernel in
    the least-squares sense), "center" takes the kernel's centre, "zero" starts from nothing as the paper's code does.
    """

    inits: ClassVar[tuple[str, ...]] = ("lstsq", "center", "zero")

    @property
    def needs_inputs(self) -> bool:  # type: ignore[override]
        return self.init == "lstsq"

    def cost(self, geometry: ConvGeometry, inputs: int, rows: int) -> tuple[int, int, int]:
        return rows * inputs, rows * inputs * geometry.positions, 0

    def build(self, geometry: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None) -> ImplantModule:
        rows, columns = centre(geometry)
        values = weight[:, :, rows, columns]
        if fit is not None:
            values = fit.to(weight)
        elif self.init == "zero":
            values = torch.zeros_like(values)
        return PointwiseImplant(geometry, values, bias)


@dataclass(frozen=True)
class LowRank(Pointwise):
    """The paper's control: channels in random order become 1x1 convolutions until the budget is met, none is removed
    as long as that suffices. No score is looked at."""

    ratio: float = 1.0
    init: str = "center"
    seed: int = 0

    blind: ClassVar[bool] = True

    def ranking(self, scores: Floats) -> Floats:
        return np.random.default_rng(self.seed).random(len(scores))

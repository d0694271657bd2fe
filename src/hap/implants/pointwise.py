"""The paper's implant: a 1x1 convolution in place of a k x k one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hap.groups.types import ConvGeometry
from hap.implants.base import ChannelImplant, ImplantModule, pad, tap_padding


def centre(site: ConvGeometry) -> tuple[int, int]:
    return (site.kernel[0] - 1) // 2, (site.kernel[1] - 1) // 2


class PointwiseImplant(ImplantModule):
    def __init__(self, site: ConvGeometry, weight: Tensor, bias: Tensor | None):
        super().__init__()
        rows, inputs = weight.shape
        self.conv = nn.Conv2d(
            inputs,
            rows,
            1,
            stride=site.stride,
            bias=bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.conv.weight.data = weight[:, :, None, None].clone()
        if bias is not None:
            assert self.conv.bias is not None
            self.conv.bias.data = bias.clone()
        self.size, self.taps, self.sides = site.kernel, centre(site), tap_padding(site, centre(site))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(pad(x, self.sides))

    def kernel(self) -> Tensor:
        dense = self.conv.weight.new_zeros(*self.conv.weight.shape[:2], *self.size)
        dense[:, :, self.taps[0], self.taps[1]] = self.conv.weight[:, :, 0, 0].detach()
        return dense

    @property
    def bias_values(self) -> Tensor | None:
        return self.conv.bias


@dataclass(frozen=True)
class Pointwise(ChannelImplant):
    """1x1 for k x k, at a ninth of the cost for 3 x 3.

    `init` sets the start values: "lstsq" fits the replaced channels on calibration inputs (the best 1x1 kernel in
    the least-squares sense), "center" takes the kernel's centre, "zero" starts from nothing as the paper's code does.
    """

    inits: ClassVar[tuple[str, ...]] = ("lstsq", "center", "zero")

    @property
    def needs_inputs(self) -> bool:
        return self.init == "lstsq"

    def params(self, site: ConvGeometry, inputs: int, rows: int) -> int:
        return rows * inputs

    def macs(self, site: ConvGeometry, inputs: int, rows: int) -> int:
        return rows * inputs * site.batch * math.prod(site.out_size)

    def build(self, site: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None) -> ImplantModule:
        rows, columns = centre(site)
        values = weight[:, :, rows, columns]
        if fit is not None:
            values = fit.to(weight)
        elif self.init == "zero":
            values = torch.zeros_like(values)
        return PointwiseImplant(site, values, bias)


@dataclass(frozen=True)
class LowRank(Pointwise):
    """The paper's control: channels in random order become 1x1 convolutions until the budget is met, none is removed
    as long as that suffices. No score is looked at."""

    ratio: float = 1.0
    init: str = "center"
    seed: int = 0

    blind: ClassVar[bool] = True

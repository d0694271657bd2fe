"""A depthwise k x k convolution followed by a 1x1 one, in place of k x k channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hap.groups.types import ConvGeometry
from hap.implants.base import ChannelImplant, ImplantModule, with_values


class SeparableImplant(ImplantModule):
    def __init__(self, geometry: ConvGeometry, depthwise: Tensor, pointwise: Tensor, bias: Tensor | None):
        super().__init__()
        inputs, rows = depthwise.shape[0], pointwise.shape[0]
        self.depthwise = nn.Conv2d(
            inputs,
            inputs,
            geometry.kernel,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            groups=inputs,
            bias=False,
        )
        with_values(self.depthwise, depthwise[:, None].clone())
        pointwise_conv = nn.Conv2d(inputs, rows, 1, bias=bias is not None)
        self.pointwise = with_values(pointwise_conv, pointwise[:, :, None, None].clone(), bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(x))

    def kernel(self) -> Tensor:
        return (self.pointwise.weight * self.depthwise.weight[:, 0]).detach()

    @property
    def bias_values(self) -> Tensor | None:
        return self.pointwise.bias


@dataclass(frozen=True)
class DepthwiseSeparable(ChannelImplant):
    """One spatial filter per input channel, shared by all implanted channels of a layer. Starts at the best such fit
    of the replaced kernels: a rank-1 decomposition per input channel."""

    init: str = "svd"

    inits: ClassVar[tuple[str, ...]] = ("svd",)

    def cost(self, geometry: ConvGeometry, inputs: int, rows: int) -> tuple[int, int, int]:
        params = inputs * geometry.area + rows * inputs
        return params, params * geometry.positions, inputs * geometry.positions

    def build(self, geometry: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None) -> ImplantModule:
        u, s, vh = torch.linalg.svd(weight.flatten(2).transpose(0, 1), full_matrices=False)  # inputs, rows, area
        depthwise = (vh[:, 0] * s[:, :1].sqrt()).view(-1, *geometry.kernel)
        return SeparableImplant(geometry, depthwise, (u[:, :, 0] * s[:, :1].sqrt()).t(), bias)

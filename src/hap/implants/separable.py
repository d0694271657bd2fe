"""A depthwise k x k convolution followed by a 1x1 one, in place of k x k channels."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hap.groups.types import ConvGeometry
from hap.implants.base import ChannelImplant, ImplantModule, convolution


class SeparableImplant(ImplantModule):
    def __init__(self, geometry: ConvGeometry, depthwise: Tensor, pointwise: Tensor, bias: Tensor | None):
        super().__init__()
        how: dict[str, Any] = {"stride": geometry.stride, "padding": geometry.padding, "dilation": geometry.dilation}
        self.depthwise = convolution(depthwise[:, None], groups=len(depthwise), **how)
        self.pointwise = convolution(pointwise[:, :, None, None], bias)

    def kernel(self) -> Tensor:
        return (self.pointwise.weight * self.depthwise.weight[:, 0]).detach()


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

"""Two convolutions in place of k x k channels, made from singular value decompositions of their kernels."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hap.errors import HapError
from hap.groups.types import ConvGeometry
from hap.implants.base import ChannelImplant, ImplantModule, convolution


def _factors(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best two factors of this rank, both with the roots of the singular values."""
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    scale = s[..., :rank].sqrt()
    return u[..., :rank] * scale[..., None, :], scale[..., None] * vh[..., :rank, :]


class SeparableImplant(ImplantModule):
    def __init__(self, geometry: ConvGeometry, depthwise: Tensor, pointwise: Tensor, bias: Tensor | None):
        super().__init__()
        how: dict[str, Any] = {"stride": geometry.stride, "padding": geometry.padding, "dilation": geometry.dilation}
        self.depthwise = convolution(depthwise[:, None], groups=len(depthwise), **how)
        self.pointwise = convolution(pointwise[:, :, None, None], bias)

    def kernel(self) -> Tensor:
        return (self.pointwise.weight * self.depthwise.weight[:, 0]).detach()


class SpatialImplant(ImplantModule):
    def __init__(self, geometry: ConvGeometry, vertical: Tensor, horizontal: Tensor, bias: Tensor | None):
        super().__init__()
        (sh, sw), (ph, pw), (dh, dw) = geometry.stride, geometry.padding, geometry.dilation
        self.vertical = convolution(vertical[..., None], stride=(sh, 1), padding=(ph, 0), dilation=(dh, 1))
        self.horizontal = convolution(horizontal[:, :, None], bias, stride=(1, sw), padding=(0, pw), dilation=(1, dw))

    def kernel(self) -> Tensor:
        vertical, horizontal = self.vertical.weight[..., 0], self.horizontal.weight[:, :, 0]
        return torch.einsum("rik,orl->oikl", vertical, horizontal).detach()


@dataclass(frozen=True)
class DepthwiseSeparable(ChannelImplant):
    """A depthwise k x k convolution followed by a 1x1 one: one spatial filter per input channel, shared by all
    implanted channels of a layer. Starts at the best such fit of the replaced kernels: a rank-1 decomposition per
    input channel."""

    init: str = "svd"

    inits: ClassVar[tuple[str, ...]] = ("svd",)

    def cost(self, geometry: ConvGeometry, inputs: int, rows: int) -> tuple[int, int, int]:
        params = inputs * geometry.area + rows * inputs
        return params, params * geometry.positions, inputs * geometry.positions

    def build(self, geometry: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None) -> ImplantModule:
        pointwise, depthwise = _factors(weight.flatten(2).transpose(0, 1), 1)  # of (inputs, rows, area)
        return SeparableImplant(geometry, depthwise.view(-1, *geometry.kernel), pointwise[:, :, 0].t(), bias)


@dataclass(frozen=True)
class SpatialLowRank(ChannelImplant):
    """A k x 1 convolution to a few channels followed by a 1 x k one: rank `rank` over space, shared by all implanted
    channels of a layer. Starts at the kernels' truncated SVD."""

    init: str = "svd"
    rank: int = 2

    inits: ClassVar[tuple[str, ...]] = ("svd",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise HapError(f"rank is {self.rank}; expected at least 1")

    def cost(self, geometry: ConvGeometry, inputs: int, rows: int) -> tuple[int, int, int]:
        height, width = geometry.kernel
        rank = min(self.rank, inputs * height, rows * width)
        first, second = rank * inputs * height, rows * rank * width
        between = geometry.batch * geometry.out_size[0] * geometry.in_size[1]  # the width shrinks in the second step
        return first + second, first * between + second * geometry.positions, rank * between

    def build(self, geometry: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None) -> ImplantModule:
        rows, inputs, height, width = weight.shape
        matrix = weight.permute(1, 2, 0, 3).reshape(inputs * height, rows * width)
        vertical, horizontal = _factors(matrix, self.rank)
        vertical = vertical.t().reshape(-1, inputs, height)
        return SpatialImplant(geometry, vertical, horizontal.view(-1, rows, width).transpose(0, 1), bias)

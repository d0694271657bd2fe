"""A k x 1 convolution to a few channels followed by a 1 x k one: low rank over space."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hap.errors import HapError
from hap.groups.types import ConvGeometry
from hap.implants.base import ChannelImplant, ImplantModule, convolution


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
class SpatialLowRank(ChannelImplant):
    """Rank `rank` over space, shared by all implanted channels of a layer. Starts at the kernels' truncated SVD."""

    init: str = "svd"
    rank: int = 2

    inits: ClassVar[tuple[str, ...]] = ("svd",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise HapError(f"rank is {self.rank}; expected at least 1")

    def _rank(self, geometry: ConvGeometry, inputs: int, rows: int) -> int:
        return min(self.rank, inputs * geometry.kernel[0], rows * geometry.kernel[1])

    def cost(self, geometry: ConvGeometry, inputs: int, rows: int) -> tuple[int, int, int]:
        rank = self._rank(geometry, inputs, rows)
        first, second = rank * inputs * geometry.kernel[0], rows * rank * geometry.kernel[1]
        between = geometry.batch * geometry.out_size[0] * geometry.in_size[1]  # the width shrinks in the second step
        return first + second, first * between + second * geometry.positions, rank * between

    def build(self, geometry: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None) -> ImplantModule:
        rows, inputs, kh, kw = weight.shape
        u, s, vh = torch.linalg.svd(weight.permute(1, 2, 0, 3).reshape(inputs * kh, rows * kw), full_matrices=False)
        rank = self._rank(geometry, inputs, rows)
        scale = s[:rank].sqrt()
        vertical = (u[:, :rank] * scale).t().reshape(rank, inputs, kh)
        horizontal = (scale[:, None] * vh[:rank]).view(rank, rows, kw).transpose(0, 1)
        return SpatialImplant(geometry, vertical, horizontal, bias)

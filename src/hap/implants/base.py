"""What every implant kind can do. Planning asks what it costs, surgery asks it to build the module."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from hap.errors import Argument, HapError
from hap.groups.groups import Groups
from hap.groups.types import Bools, ConvGeometry, Floats


class ImplantModule(nn.Module, ABC):
    """Computes some output channels of a convolution from its input, with the same output size: by its submodules, one
    after the other, of which the last has the bias."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x

    @abstractmethod
    def kernel(self) -> Tensor:
        """The k x k convolution weight (rows, inputs, *kernel) that computes the same thing."""

    @property
    def bias_values(self) -> Tensor | None:
        """One value per row, or None."""
        *_, last = self.children()
        return last.bias  # type: ignore[return-value]


def convolution(weight: Tensor, bias: Tensor | None = None, groups: int = 1, **settings: Any) -> nn.Conv2d:
    """A convolution with this weight and bias; `settings` as those of nn.Conv2d."""
    outputs, inputs, height, width = weight.shape
    made = nn.Conv2d(inputs * groups, outputs, (height, width), groups=groups, bias=bias is not None, **settings)
    made.weight.data = weight.clone()
    if bias is not None and made.bias is not None:
        made.bias.data = bias.clone()
    return made


@dataclass(frozen=True)
class Implant(ABC):
    """Which share of the units to be removed is replaced instead, and by what.

    A kind that adds a module beside convolutions is a `ChannelImplant`.
    """

    ratio: float = 0.2

    blind: ClassVar[bool] = False
    """Whether units that it can replace are taken first, before any score is looked at: the paper's control."""
    needs_head_spaces: ClassVar[bool] = False
    """Whether planning has to know where heads can be narrowed, which `hap.narrowable` finds out."""
    needs_inputs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            wanted = "expected a share of the removed units, above 0 and at most 1"
            raise HapError(Argument("implant", self.ratio, text="implant ratio"), f" is {self.ratio}; {wanted}")

    def prepared(self, groups: Groups) -> Groups:
        """The groups as planning with this implant needs them."""
        return groups

    @abstractmethod
    def eligible(self, groups: Groups) -> Bools:
        """Which classes it can stand in for."""

    def ranking(self, scores: Floats) -> Floats:
        """What the units are ranked by: those with the lowest values go, or are replaced."""
        return scores

    def layers(self, groups: Groups) -> dict[str, ConvGeometry]:
        """The convolutions that it can stand beside, by weight."""
        return {}

    def cost(self, geometry: ConvGeometry, inputs: int, rows: int) -> tuple[int, int, int]:
        """What `rows` channels from `inputs` channels cost: parameters (without biases), multiply-adds on the traced
        example, and values written on the way to these rows."""
        return 0, 0, 0

    def build(self, geometry: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None) -> ImplantModule:
        """The module for these dense rows, of shape (rows, inputs, *kernel). `fit`: (rows, inputs), for `Pointwise`."""
        raise HapError(f"{type(self).__name__} adds no module to a convolution")

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
            known = f"{type(self).__name__} knows {', '.join(map(repr, self.inits))}"
            raise HapError(Argument("implant_init", self.init, text="init"), f" is {self.init!r}; {known}")

    def layers(self, groups: Groups) -> dict[str, ConvGeometry]:
        return {weight: geometry for weight, geometry in groups.conv_geometry.items() if geometry.area > 1}

    def eligible(self, groups: Groups) -> Bools:
        """Classes whose k x k producers can all take an implant, and that have at least one."""
        some, bad = np.zeros(groups.classes, dtype=bool), np.zeros(groups.classes, dtype=bool)
        able = self.layers(groups)
        for producer in (p for group in groups.values() for p in group.producers):
            if math.prod(groups.shapes[producer.weight][2:]) > 1:
                (some if producer.weight in able else bad)[groups.axes[producer.weight, producer.dim]] = True
        some[0] = False
        return some & ~bad

    @abstractmethod
    def cost(self, geometry: ConvGeometry, inputs: int, rows: int) -> tuple[int, int, int]: ...

    @abstractmethod
    def build(
        self, geometry: ConvGeometry, weight: Tensor, bias: Tensor | None, fit: Tensor | None
    ) -> ImplantModule: ...

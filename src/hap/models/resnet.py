"""ResNet-18, 34 and 50 for ImageNet, with the parameter names that torchvision's weight files use."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from hap.models.init import kaiming_


class _Options(NamedTuple):
    stride_in_1x1: bool
    bn_eps: float


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, options: _Options) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width, eps=options.bn_eps)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, eps=options.bn_eps)
        self.relu = nn.ReLU()
        self.downsample = _downsample(inputs, width, stride, options.bn_eps)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last four times as wide, beside a shortcut.

    The stride sits in the 3x3 convolution, as in torchvision; `stride_in_1x1` moves it to the first 1x1, as
    in the original paper and in weights converted from it.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, options: _Options) -> None:
        super().__init__()
        first, second = (stride, 1) if options.stride_in_1x1 else (1, stride)
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, stride=first, bias=False)
        self.bn1 = nn.BatchNorm2d(width, eps=options.bn_eps)
        self.conv2 = nn.Conv2d(width, width, 3, stride=second, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, eps=options.bn_eps)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs, eps=options.bn_eps)
        self.relu = nn.ReLU()
        self.downsample = _downsample(inputs, outputs, stride, options.bn_eps)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A 7x7 stem with max pooling, four stages at widths 64, 128, 256, 512, pooling and a linear layer.

    Input (N, 3, H, W), usually 224x224; logits (N, classes). `stride_in_1x1` moves a bottleneck's stride and
    does nothing to basic blocks; `bn_eps` serves weights converted from frameworks with another epsilon.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        classes: int = 1000,
        stride_in_1x1: bool = False,
        bn_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64, eps=bn_eps)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        options = _Options(stride_in_1x1, bn_eps)
        expansion = block.expansion
        self.layer1 = _stage(block, depths[0], 64, 64, 1, options)
        self.layer2 = _stage(block, depths[1], 64 * expansion, 128, 2, options)
        self.layer3 = _stage(block, depths[2], 128 * expansion, 256, 2, options)
        self.layer4 = _stage(block, depths[3], 256 * expansion, 512, 2, options)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(512 * expansion, classes)
        kaiming_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.flatten(self.avgpool(x)))


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    depth: int,
    inputs: int,
    width: int,
    stride: int,
    options: _Options,
) -> nn.Sequential:
    first = block(inputs, width, stride, options)
    rest = (block(width * block.expansion, width, 1, options) for _ in range(depth - 1))
    return nn.Sequential(first, *rest)


def _downsample(inputs: int, outputs: int, stride: int, bn_eps: float) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=bn_eps))

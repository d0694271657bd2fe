"""ResNet-18, 34 and 50 for ImageNet, with the parameter names that torchvision's weight files use."""

from collections.abc import Sequence

from torch import Tensor, nn

from hap.models.init import kaiming_


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample = _downsample(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last four times as wide, beside a shortcut.

    The stride sits in the 3x3 convolution, as in torchvision; `ResNet` can move it to the first 1x1, as in the
    original paper and in weights converted from it.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = _downsample(inputs, outputs, stride)

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
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        expansion = block.expansion
        self.layer1 = _stage(block, depths[0], 64, 64, 1)
        self.layer2 = _stage(block, depths[1], 64 * expansion, 128, 2)
        self.layer3 = _stage(block, depths[2], 128 * expansion, 256, 2)
        self.layer4 = _stage(block, depths[3], 256 * expansion, 512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(512 * expansion, classes)
        kaiming_(self)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = bn_eps
            if isinstance(module, Bottleneck) and stride_in_1x1:
                module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.flatten(self.avgpool(x)))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], depth: int, inputs: int, width: int, stride: int
) -> nn.Sequential:
    rest = (block(width * block.expansion, width, 1) for _ in range(depth - 1))
    return nn.Sequential(block(inputs, width, stride), *rest)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

"""Residual networks of three stages for small images: as in He et al., 2016, section 4.2, and pre-activation ones."""

from collections.abc import Sequence

from torch import Tensor, nn

from hap.models.init import kaiming_


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut: identity, or 1x1 convolution and BatchNorm on a new shape."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.shortcut(x))


class PreActBlock(nn.Module):
    """BatchNorm and ReLU before each of a 1x1, a 3x3 (which carries the stride) and a 1x1 convolution.

    All keep one width. Where the shape changes, the shortcut is a bare 1x1 convolution of the activated input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.conv3 = nn.Conv2d(outputs, outputs, 1, bias=False)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(self.relu(self.bn2(out)))
        out = self.conv3(self.relu(self.bn3(out)))
        return out + shortcut


class CifarResNet(nn.Module):
    """A 3x3 stem, three stages of blocks at strides 1, 2, 2, global average pooling and one linear layer.

    `depths` and `widths` give the blocks and the channels of each stage.
    Input (N, channels, H, W), logits (N, classes).
    """

    def __init__(self, depths: Sequence[int], widths: Sequence[int], *, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        self.layer1 = _stage(Block, depths[0], widths[0], widths[0], 1)
        self.layer2 = _stage(Block, depths[1], widths[0], widths[1], 2)
        self.layer3 = _stage(Block, depths[2], widths[1], widths[2], 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(widths[2], classes)
        kaiming_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.flatten(self.pool(x)))


class PreResNet(nn.Module):
    """A 3x3 stem, three stages at strides 1, 2, 2, then BatchNorm, ReLU, pooling and a linear layer.

    Input (N, 3, H, W), logits (N, classes).
    """

    def __init__(self, depths: Sequence[int], widths: Sequence[int], *, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.layer1 = _stage(PreActBlock, depths[0], widths[0], widths[0], 1)
        self.layer2 = _stage(PreActBlock, depths[1], widths[0], widths[1], 2)
        self.layer3 = _stage(PreActBlock, depths[2], widths[1], widths[2], 2)
        self.bn = nn.BatchNorm2d(widths[2])
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(widths[2], classes)
        kaiming_(self, batchnorm_weight=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        x = self.relu(self.bn(x))
        return self.fc(self.flatten(self.pool(x)))


def _stage(block: type[Block] | type[PreActBlock], depth: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(block(inputs, outputs, stride), *(block(outputs, outputs, 1) for _ in range(depth - 1)))

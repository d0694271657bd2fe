"""Pre-activation residual networks whose 1x1-3x3-1x1 blocks keep one width throughout."""

from collections.abc import Sequence

from torch import Tensor, nn

from hap.models.init import kaiming_


class PreActBlock(nn.Module):
    """BatchNorm and ReLU before each of a 1x1, a 3x3 (which carries the stride) and a 1x1 convolution.

    Where the shape changes, the shortcut is a bare 1x1 convolution of the activated input.
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


class PreResNet(nn.Module):
    """A 3x3 stem, three stages at strides 1, 2, 2, then BatchNorm, ReLU, pooling and a linear layer.

    Input (N, 3, H, W), logits (N, classes).
    """

    def __init__(self, depths: Sequence[int], widths: Sequence[int], *, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.layer1 = _stage(depths[0], widths[0], widths[0], stride=1)
        self.layer2 = _stage(depths[1], widths[0], widths[1], stride=2)
        self.layer3 = _stage(depths[2], widths[1], widths[2], stride=2)
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


def _stage(depth: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    first = PreActBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(PreActBlock(outputs, outputs, 1) for _ in range(depth - 1)))

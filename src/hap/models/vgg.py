"""VGG-16 with BatchNorm for 32x32 images."""

from torch import Tensor, nn

from hap.models.init import kaiming_

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    """Thirteen 3x3 convolutions in five stages, each stage closed by 2x2 max pooling, then one linear layer.

    Input (N, 3, H, W) with H and W at least 32, logits (N, classes).
    """

    def __init__(self, *, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for stage in STAGES:
            for outputs in stage:
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(inputs, classes)
        kaiming_(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.pool(self.features(x))))

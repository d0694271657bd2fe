"""The dense ResNet56 that are pruned: three of ours, and one of others, whose shortcuts have no parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import hap
from hap.data import Data
from hap.errors import HapError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PaddedBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut that takes every second pixel and adds channels of zeros: option A."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + x)


class PaddedResNet(nn.Module):
    """The CIFAR-10 ResNet of He et al. (2016) with shortcuts without parameters; `blocks` in each of three stages."""

    def __init__(self, blocks: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (_stage(*shape, blocks) for shape in ((16, 16), (16, 32), (32, 64)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def _stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
    first = PaddedBlock(inputs, outputs, stride=1 + (inputs != outputs))
    return nn.Sequential(first, *(PaddedBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


@dataclass(frozen=True)
class Dense:
    """A trained network, and its data as it was trained on it."""

    name: str
    file: Path
    build: Callable[[], nn.Module]
    imagenet_statistics: bool = False

    def load(self, data: Data) -> tuple[nn.Module, Data]:
        model = self.build()
        if not self.file.exists():
            raise HapError(f"{self.name}: there is no file {self.file}")
        if self.imagenet_statistics:
            model.load_state_dict(load_file(self.file), strict=False)
            data = replace(data, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        else:
            hap.load(self.file, model)
        return model.eval(), data


def dense_networks(root: Path, others: Path | None) -> list[Dense]:
    """Ours, in a checkout at `root`, and the one in the file `others`."""

    def ours() -> nn.Module:
        return hap.models.build("resnet56", classes=10)

    files = [root / "zoo" / "resnet56-dense-paper-seed0.safetensors"]
    files += [root / "results" / "cifar10" / "networks" / f"resnet56-dense-paper-seed{s}.safetensors" for s in (1, 2)]
    found = [Dense(f"ours-{seed}", file, ours) for seed, file in enumerate(files)]
    return found if others is None else [*found, Dense("akamaster", others, lambda: PaddedResNet(9), True)]

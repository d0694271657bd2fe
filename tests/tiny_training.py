"""A network and data so small that their training takes a moment, and the recipe for it."""

import torch
from torch import Tensor, nn

from hap.data import Data, Split
from hap.training.recipes import Recipe

RECIPE = Recipe(4, batch=16, lr=0.05, warmup=0.1, seed=5)


def tiny_model(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


def bright_quarters() -> Data:
    """Noise of 8x8 pixels with one bright quarter, whose number is the label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (104,), generator=generator)
    images = torch.randint(0, 120, (104, 1, 8, 8), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, label // 2 * 4 :, label % 2 * 4 :][:4, :4] += 60
    split = Split(images.to(torch.uint8), labels)
    return Data(split, split, classes=4, mean=(0.3,), std=(0.2,), name="quarters", pad=1)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([t.flatten().double() for t in model.state_dict().values()])

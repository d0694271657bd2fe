"""A network pruned by Torch-Pruning to a share of its FLOPs, over all layers at once, as its documentation says."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.data import Batch
from hap_reproduction.zoo_sweep.models import import_torchvision

CRITERIA: dict[str, Callable[[Any], Any]] = {
    "magnitude": lambda library: library.importance.GroupMagnitudeImportance(p=2),
    "taylor": lambda library: library.importance.GroupTaylorImportance(),
    "bn-scale": lambda library: library.importance.BNScaleImportance(),
}
HIGHEST = 0.95
"""No layer loses more of its channels."""
STEPS = 10
"""So often the interval of ratios is halved."""


def load_library() -> Any:
    """Torch-Pruning, which imports torchvision."""
    import_torchvision()
    import torch_pruning

    return torch_pruning


def gradients(model: nn.Module, batches: Sequence[Batch], most: int = 16) -> dict[str, Tensor]:
    """The gradient of the mean loss, which the Taylor criterion reads; so many images are computed at once."""
    parts = [(x, y) for images, labels in batches for x, y in zip(images.split(most), labels.split(most), strict=True)]
    count = sum(len(y) for _, y in parts)
    model.zero_grad()
    for x, y in parts:
        (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def cut(dense: nn.Module, example: Tensor, slope: dict[str, Tensor], criterion: str, ratio: float) -> nn.Module:
    """A copy that Torch-Pruning has taken this share of the channels from. `slope`: gradients, if it reads them."""
    library, model = load_library(), copy.deepcopy(dense).eval()
    for name, parameter in model.named_parameters():
        parameter.grad = slope[name].clone() if slope else None
    pruner = library.pruner.BasePruner(
        model,
        example,
        importance=CRITERIA[criterion](library),
        global_pruning=True,
        pruning_ratio=ratio,
        max_pruning_ratio=HIGHEST,
        ignored_layers=[model.fc],
    )
    pruner.step()
    model.zero_grad()
    return model.eval()


def cut_to(dense: nn.Module, example: Tensor, slope: dict[str, Tensor], criterion: str, flops: float) -> nn.Module:
    """The largest network that a bisection over ratios finds among those with at most this share of the FLOPs."""
    most = flops * hap.cost(dense, example).macs
    low, high = 0.0, HIGHEST
    best = cut(dense, example, slope, criterion, high)
    for _ in range(STEPS):
        middle = (low + high) / 2
        made = cut(dense, example, slope, criterion, middle)
        if hap.cost(made, example).macs <= most:
            high, best = middle, made
        else:
            low = middle
    return best

"""What Torch-Pruning would remove from a dense ResNet56 at equal FLOPs, written down for `hap reproduce head-to-head`.

    python benchmarks/torch_pruning_plans.py --data data/cifar10        # needs pip install torch-pruning

Torch-Pruning prunes a copy by its own criteria; the channels that it removes are read off and written as units of HAP's
groups. That the network cut by HAP to that list gives the same outputs is checked before anything is written, so both
sides go on from the same kind of file, by the same counter and the same training.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.data import Batch
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.cifar10.jobs import BORROWED, HEAD_TO_HEAD, dense_name
from hap_reproduction.cifar10.starting import IMAGES
from hap_reproduction.zoo_sweep.models import import_torchvision

import_torchvision()
import torch_pruning as tp  # noqa: E402

Removed = dict[str, list[int]]
CRITERIA: dict[str, Callable[[], Any]] = {
    "magnitude": lambda: tp.importance.GroupMagnitudeImportance(p=2),
    "taylor": tp.importance.GroupTaylorImportance,
    "bn-scale": tp.importance.BNScaleImportance,
}


def gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The gradient of the mean loss, which the Taylor criterion reads."""
    found = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True))


def cut(
    dense: nn.Module, example: Tensor, slope: dict[str, Tensor], criterion: str, ratio: float
) -> tuple[nn.Module, Removed]:
    """A copy pruned by Torch-Pruning over all layers at once, and the output channels that each convolution lost."""
    model = copy.deepcopy(dense).eval()
    names = {module: name for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        parameter.grad = slope[name].clone()
    pruner = tp.pruner.BasePruner(
        model,
        example,
        importance=CRITERIA[criterion](),
        global_pruning=True,
        pruning_ratio=ratio,
        max_pruning_ratio=0.95,
        ignored_layers=[model.fc],
    )
    removed: Removed = {}
    for group in pruner.step(interactive=True):
        for dependency, channels in group:
            module = dependency.target.module
            if isinstance(module, nn.Conv2d) and dependency.handler == tp.prune_conv_out_channels:
                if names[module] in removed:
                    raise RuntimeError(
                        f"{names[module]} is pruned twice, and the second time channels have new numbers"
                    )
                removed[names[module]] = sorted(channels)
        group.prune()
    return model.eval(), removed


def search(
    dense: nn.Module, example: Tensor, slope: dict[str, Tensor], criterion: str, flops: float
) -> tuple[nn.Module, Removed]:
    """The smallest ratio of channels, to one in four thousand, that leaves no more than this share of the FLOPs."""
    before = hap.cost(dense, example).macs
    low, high = 0.0, 0.95
    best = cut(dense, example, slope, criterion, high)
    while high - low > 1 / 4096:
        middle = (low + high) / 2
        made = cut(dense, example, slope, criterion, middle)
        if hap.cost(made[0], example).macs <= flops * before:
            high, best = middle, made
        else:
            low = middle
    return best


def as_units(groups: Any, removed: Removed) -> Removed:
    """Lost output channels as units of groups; a group's units are lost by all its producers at once."""
    units: Removed = {}
    for name, group in groups.items():
        lost = [
            sorted({int(producer.unit[c]) for c in removed.get(producer.weight.removesuffix(".weight"), [])} - {-1})
            for producer in group.producers
        ]
        if any(other != lost[0] for other in lost):
            raise RuntimeError(f"the layers of group {name} lost different channels")
        if lost[0]:
            units[name] = lost[0]
    return units


def check(dense: nn.Module, plan: hap.Plan, theirs: nn.Module, example: Tensor, images: Tensor) -> float:
    """The largest difference between the logits of both pruned networks; refuses one that is not rounding."""
    ours = hap.apply_(copy.deepcopy(dense), plan, example).eval()
    with torch.no_grad():
        difference = float((ours(images) - theirs(images)).abs().max())
    if difference > 1e-4 or hap.cost(ours, example) != hap.cost(theirs, example):
        raise RuntimeError(f"HAP's cut differs from Torch-Pruning's by {difference} in the logits, or in its cost")
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="the folder with CIFAR-10")
    parser.add_argument("--networks", type=Path, default=Path("zoo"))
    parser.add_argument("--out", type=Path, default=Path("results/cifar10/plans"))
    parser.add_argument("--revision", help="the source revision to record, where git cannot tell")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data = hap.data.load(chosen.data)
    name = dense_name("resnet56", "paper", 0)
    dense = hap.load(chosen.networks / f"{name}.safetensors", hap.models.build("resnet56")).eval()
    images, labels = (torch.cat(parts) for parts in zip(*data.calibration(IMAGES, 0), strict=True))
    example, slope = images[:1], gradients(dense, (images, labels))
    groups = hap.trace(dense, example, "joint")
    for label, criterion in BORROWED.items():
        for percent in HEAD_TO_HEAD:
            theirs, removed = search(dense, example, slope, criterion, percent / 100)
            units = as_units(groups, removed)
            plan = hap.draft(groups, units)
            difference = check(dense, plan, theirs, example, images[:64])
            before, after = plan.before, plan.after
            left = {"params_left": after.params / before.params, "macs_left": after.macs / before.macs}
            library = f"torch-pruning {version('torch-pruning')}"
            record = {
                "kind": "hap-borrowed-plan",
                "format": 1,
                "name": f"{label}-{percent}",
                "dense": name,
                "library": library,
                "criterion": criterion,
                "coupling": "joint",
                "images": len(images),
                "largest_difference": difference,
                **left,
                "removed": units,
            }
            write_json(chosen.out / f"{label}-{percent}.json", record | provenance(chosen.revision))
            print(f"{label}-{percent}: {left}, logits differ by {difference:.1e}")


if __name__ == "__main__":
    main()

"""Training throughput of ResNet-56: a plain PyTorch loop against `train` and `train_many`.

    python benchmarks/train_throughput.py results.json

Images are random: speed does not depend on them. On a machine without CUDA it runs in miniature, as a check.
"""

import argparse
import platform
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from hap import models
from hap.data import Data, Split
from hap.files import write_json
from hap.recipes import Recipe
from hap.training import train, train_many


def random_data(images: int) -> Data:
    """Random pixels in the shape of CIFAR-10, with a small test split so that evaluation weighs little."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (images,), generator=generator)
    test = Split(pixels[:100], labels[:100])
    half = (0.5, 0.5, 0.5)
    return Data(Split(pixels, labels), test, 10, mean=half, std=half, name="random", pad=4, flip=True)


def eager_fp32(model: nn.Module, data: Data, recipe: Recipe) -> float:
    """Images a second, over all epochs but the first, of the loop that most scripts have."""
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    model.train()
    count = 0
    begun = time.perf_counter()
    for epoch in range(recipe.epochs):
        if epoch == 1:
            _wait()
            count, begun = 0, time.perf_counter()
        for x, y in data.epoch(recipe.batch, torch.Generator().manual_seed(epoch)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            count += len(y)
    _wait()
    return count / (time.perf_counter() - begun)


def side_by_side(count: int, name: str, data: Data, recipe: Recipe, device: str, graphs: bool = True) -> float:
    """Images a second of `count` models together, in the last epoch: the first pays for the recording."""
    networks = [models.build(name).to(device) for _ in range(count)]
    chosen = [replace(recipe, seed=seed) for seed in range(count)]
    if count == 1:
        histories = [train(networks[0], data, chosen[0], progress=False, graphs=graphs)]
    else:
        histories = train_many(networks, data, chosen, progress=False, graphs=graphs)
    return sum(history.images_per_second[-1] for history in histories)


def measure(device: str) -> dict[str, float]:
    """Images a second by variant."""
    cuda = device == "cuda"
    name = "resnet56" if cuda else "resnet20"
    data = random_data(25_600 if cuda else 64).to(device)
    recipe = Recipe(3 if cuda else 2, batch=128 if cuda else 16, precision="bf16" if cuda else "fp32", eval_every=99)
    speeds = {"plain loop, fp32, eager": eager_fp32(models.build(name).to(device), data, recipe)}
    if cuda:
        speeds["train, bf16, eager"] = side_by_side(1, name, data, recipe, device, graphs=False)
    for count in (1, 4, 8) if cuda else (1, 2):
        label = "train" if count == 1 else f"train_many, {count} models"
        speeds[f"{label}, {recipe.precision}"] = side_by_side(count, name, data, recipe, device)
    return speeds


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="JSON file to write")
    output = parser.parse_args().output
    device = "cuda" if torch.cuda.is_available() else "cpu"
    speeds = measure(device)
    base = next(iter(speeds.values()))
    rows = [{"variant": k, "images_per_second": v, "ratio": v / base} for k, v in speeds.items()]
    for row in rows:
        print(f"{row['variant']:32} {row['images_per_second']:10.0f} images/s {row['ratio']:7.2f}x")
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    write_json(output, {"hardware": hardware, "torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()

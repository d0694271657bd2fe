"""Training throughput: pruned networks side by side as they are and in their dense shape, and plain loops.

    python benchmarks/train_throughput.py OUT.json --data data/cifar10 --revision HASH     # about 2.5 minutes on a GPU
    python benchmarks/train_throughput.py OUT.json --loops --compile                       # more parts, compiler first
    python benchmarks/train_throughput.py OUT.json --small --loops                         # in miniature, as a check

Forms: `dense` is the whole network; `pruned` has what random scores in union coupling leave of it, so that widths are
odd; `masked` is the same network in its dense shape with what went held at zero; `stacked` are such networks as one
with grouped convolutions, eight in a stack; `trimmed` are stacked in the smallest shape that they can share. What is
known is written after every row. Start-up is what the first epoch takes longer than the others: choosing convolution
algorithms and recording the step. Shapes that an earlier row has met are known by then, so the first row of a form and
batch size tells the most.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hap
from hap import models
from hap.data import Data, Split
from hap.training import train
from hap.training.recipes import Recipe
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.cifar10.masking import dense_form
from hap_reproduction.cifar10.stacking import train_stacked
from hap_reproduction.cifar10.trimming import common_widths, trim

Masks = dict[str, Tensor] | None
STACK, STACKED = 8, ("stacked", "trimmed")


@dataclass(frozen=True)
class Scale:
    """How much is measured: `steps` an epoch, of which the first epoch is the start-up."""

    model: str
    batches: tuple[int, ...]
    counts: tuple[int, ...]
    steps: int
    epochs: int
    plans: int


FULL = Scale("resnet56", (64, 128), (8, 16), 50, 5, plans=4)
SMALL = Scale("resnet20", (8,), (2, 1), 2, 2, plans=2)


def random_data(images: int) -> Data:
    """Random pixels in the shape of CIFAR-10, with a small test split so that evaluation weighs little."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (images,), generator=generator)
    half = (0.5, 0.5, 0.5)
    return first(Data(Split(pixels, labels), Split(pixels, labels), 10, half, half, "random", 4, True), images)


def first(data: Data, images: int) -> Data:
    """So many of the training images, and a few of the others."""
    cut = {"train": (data.train, images), "test": (data.test, 100)}
    return replace(data, **{k: Split(s.images[:n], s.labels[:n]) for k, (s, n) in cut.items()})


# ---- forms of a pruned network ------------------------------------------------------------------------------


class Networks:
    """Dense networks, and what some plans leave of them; the plans are made once."""

    def __init__(self, scale: Scale, left: float, device: str) -> None:
        self.dense = models.build(scale.model).to(device).eval()
        self.example = example = torch.zeros(1, 3, 32, 32, device=device)
        self.groups = groups = hap.trace(self.dense, example, "union")
        scores = [hap.score(self.dense, groups, None, None, hap.Random(seed=seed)) for seed in range(scale.plans)]
        self.plans = [hap.plan(groups, one, hap.Budget(flops=left)) for one in scores]
        self.pruned = [hap.apply_(copy.deepcopy(self.dense), plan, example) for plan in self.plans]

    def make(self, form: str, count: int) -> list[tuple[nn.Module, Masks]]:
        """So many networks of a form, with their masks."""
        if form == "dense":
            return [(copy.deepcopy(self.dense), None) for _ in range(count)]
        turns = [i % len(self.plans) for i in range(count)]
        if form == "pruned":
            return [(copy.deepcopy(self.pruned[i]), None) for i in turns]
        whole = [dense_form(self.pruned[i], self.plans[i], self.dense) for i in turns]
        if form != "trimmed":
            return [(model, masks) for model, masks in whole]
        widths = common_widths(self.groups, [masks for _, masks in whole])
        small = [trim(model, masks, self.groups, widths, self.example) for model, masks in whole]
        return [(one.model, one.masks) for one in small]


def row(
    networks: Networks, form: str, count: int, batch: int, data: Data, scale: Scale, bf16: bool, compiled: bool = False
) -> dict[str, Any]:
    """Images a second of `count` networks together over all epochs but the first."""
    begun = time.perf_counter()
    made = networks.make(form, count)
    recipe = Recipe(scale.epochs, batch, lr=0.02, precision="bf16" if bf16 else "fp32", eval_every=scale.epochs)
    recipes = [replace(recipe, seed=seed) for seed in range(count)]
    part = first(data, scale.steps * batch)
    histories = train_stacked(
        [m for m, _ in made],
        part,
        recipes,
        masks=[k for _, k in made],
        stack=STACK if form in STACKED else 1,
        compiled=compiled,
    )
    seconds = histories[0].seconds
    found = {
        "form": form,
        "networks": count,
        "batch": batch,
        "compiled": compiled,
        "images_per_second": count * batch * scale.steps * (scale.epochs - 1) / sum(seconds[1:]),
        "startup_seconds": seconds[0] - statistics.mean(seconds[1:]),
        "steps": scale.steps * (scale.epochs - 1),
        "wall_seconds": time.perf_counter() - begun,
    }
    if compiled:
        found["compiled_graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


def forms(networks: Networks, data: Data, scale: Scale, bf16: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """Every form, count and batch size, the most telling first, as long as there is time."""
    begun = time.perf_counter()
    for batch in scale.batches:
        for count in scale.counts:
            for form in (*STACKED, "dense", "masked", "pruned"):
                if time.perf_counter() - begun > seconds:
                    yield {"form": form, "networks": count, "batch": batch, "skipped": f"after {seconds:.0f} s"}
                    continue
                yield row(networks, form, count, batch, data, scale, bf16)
                _free()


def compiled_forms(networks: Networks, data: Data, scale: Scale, bf16: bool) -> Iterator[dict[str, Any]]:
    """torch.compile inside the recorded step; a failure of the compiler is a result too."""
    for batch in scale.batches:
        try:
            for count in scale.counts:
                for form in STACKED:
                    yield row(networks, form, count, batch, data, scale, bf16, compiled=True)
        except Exception as error:
            yield {"form": form, "batch": batch, "compiled": True, "error": f"{type(error).__name__}: {error}"[:500]}
        _free()


# ---- loops --------------------------------------------------------------------------------------------------


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


def alone(name: str, data: Data, recipe: Recipe, graphs: bool) -> float:
    """Images a second of `train` in the last epoch: the first pays for the recording."""
    model = models.build(name).to(data.train.images.device)
    return train(model, data, recipe, progress=False, graphs=graphs).images_per_second[-1]


def loops(data: Data, scale: Scale, bf16: bool) -> Iterator[dict[str, Any]]:
    """A plain loop against `train`, with its step recorded and without."""
    name, batch, precision = scale.model, scale.batches[-1], "bf16" if bf16 else "fp32"
    data = first(data, 2 * scale.steps * batch)
    recipe = Recipe(3, batch, precision=precision, eval_every=99)
    calls: dict[str, Callable[[], float]] = {
        "plain loop, fp32": lambda: eager_fp32(models.build(name).to(data.train.images.device), data, recipe),
        f"train, {precision}, not recorded": lambda: alone(name, data, recipe, graphs=False),
        f"train, {precision}": lambda: alone(name, data, recipe, graphs=True),
    }
    for label, call in calls.items():
        yield {"loop": label, "batch": batch, "images_per_second": call()}
        _free()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free() -> None:
    """Recorded steps hold memory in cycles of Python objects."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- the command --------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--data", help="the folder with CIFAR-10; without it pixels are random, at the same speed")
    parser.add_argument("--revision", help="the source revision to record, where git cannot tell")
    parser.add_argument("--model", help="a network of hap.models for 32x32 images (default: resnet56)")
    parser.add_argument("--batch", type=int, help="one batch size (default: 64 and 128)")
    parser.add_argument("--left", type=float, default=0.3874, help="share of FLOPs left in pruned networks")
    parser.add_argument("--seconds", type=float, default=150, help="begin no row of the forms after so long")
    parser.add_argument("--loops", action="store_true", help="also measure a plain loop against train")
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile, first")
    parser.add_argument("--small", action="store_true", help="in miniature")
    return parser.parse_args()


def main() -> None:
    begun, given = time.perf_counter(), arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale, bf16 = SMALL if given.small else FULL, device == "cuda"
    batches = (given.batch,) if given.batch else scale.batches
    scale = replace(scale, model=given.model or scale.model, batches=batches)
    images = 2 * scale.steps * max(scale.batches)
    data = (hap.data.load(given.data) if given.data else random_data(images)).to(device)
    networks = Networks(scale, given.left, device)
    record: dict[str, Any] = {
        "model": scale.model,
        "macs_left": [p.after.macs / p.before.macs for p in networks.plans],
        "data": data.name,
        "precision": "bf16" if bf16 else "fp32",
        "preparing_seconds": time.perf_counter() - begun,
        "rows": [],
    } | provenance(given.revision)
    parts = [compiled_forms(networks, data, scale, bf16)] if given.compile else []
    parts += [loops(data, scale, bf16)] if given.loops else []
    parts += [forms(networks, data, scale, bf16, given.seconds)]
    for part in parts:
        for found in part:
            record["rows"].append(found)
            print(
                "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()), flush=True
            )
            write_json(given.output, record)
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()

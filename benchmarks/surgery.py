"""Trace, plan and apply: against Torch-Pruning, against torch.export alone, and how the time grows with depth.

    python benchmarks/surgery.py OUT.json        # needs torchvision and torch-pruning

Each network of torchvision is pruned to half of its multiply-adds by magnitude, on a copy; the check that runs the
pruned model against the dense one is timed apart. Torch-Pruning builds its graph and takes one step by magnitude to
half of every layer's channels. torch.export captures the same model. The three take turns, and ratios are medians over
the rounds. What is known is written after every network.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hap
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.zoo_sweep.models import import_torchvision

torchvision = import_torchvision()
import torch_pruning as tp  # noqa: E402

Work = Callable[[nn.Module, Tensor], dict[str, float]]
DEPTHS = ("resnet50", "resnet101", "resnet152")


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def hap_steps(model: nn.Module, example: Tensor) -> dict[str, float]:
    """Seconds of each step. `check` is what apply_ adds when it proves the result by running it."""
    seconds, twin = {}, copy.deepcopy(model)
    groups, seconds["trace"] = timed(lambda: hap.trace(model, example))
    scores, seconds["score"] = timed(lambda: hap.score(model, groups, None, None, "magnitude"))
    plan, seconds["plan"] = timed(lambda: hap.plan(groups, scores, hap.Budget(flops=0.5)))
    _, seconds["apply"] = timed(lambda: hap.apply_(twin, plan, example, verify=False))
    _, checked = timed(lambda: hap.apply_(model, plan, example))
    return seconds | {"check": checked - seconds["apply"]}


def peer_step(model: nn.Module, example: Tensor) -> dict[str, float]:
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]

    def prune() -> None:
        importance = tp.importance.GroupMagnitudeImportance(p=2)
        tp.pruner.BasePruner(model, example, importance, pruning_ratio=0.5, ignored_layers=[last]).step()

    return {"all": timed(prune)[1]}


def export_step(model: nn.Module, example: Tensor) -> dict[str, float]:
    with torch.no_grad():
        return {"all": timed(lambda: torch.export.export(model, (example,), strict=False))[1]}


def rounds(name: str, works: dict[str, Work], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of each kind of work in each round, on a fresh copy every time."""
    torch.manual_seed(0)
    model, example = torchvision.models.get_model(name).eval(), torch.randn(1, 3, 224, 224)
    taken: dict[str, list[dict[str, float]]] = {work: [] for work in works}
    for _ in range(repeats):
        for work, run in works.items():
            taken[work].append(run(copy.deepcopy(model), example))
            print(f"{name:12} {work:14} {sum(taken[work][-1].values()):7.2f} s", flush=True)
    return taken


def ratio(taken: dict[str, list[dict[str, float]]], over: str, *steps: str) -> float:
    """How many times the named steps of HAP fit into the other work."""
    pairs = zip(taken[over], taken["hap"], strict=True)
    return statistics.median(sum(other.values()) / sum(mine[s] for s in steps) for other, mine in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peer", nargs="*", default=["densenet201"], help="networks to hold against Torch-Pruning")
    parser.add_argument("--large", nargs="*", default=["vit_l_16"], help="networks to hold against torch.export alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--revision", default=None)
    options = parser.parse_args()
    versions = {name: version(name) for name in ("torch-pruning", "torchvision")}
    result: dict[str, Any] = {"repeats": options.repeats, "versions": versions, "networks": {}}
    result |= provenance(options.revision)
    rounds("resnet18", {"hap": hap_steps, "torch-pruning": peer_step, "torch.export": export_step}, 1)  # warm up

    def note(name: str, taken: dict[str, list[dict[str, float]]], **ratios: float) -> None:
        result["networks"][name] = {"seconds": taken, **ratios}
        write_json(options.out, result)
        for key, value in ratios.items():
            print(f"{name:12} {key}: {value:.3g}", flush=True)

    main_steps = ("trace", "plan", "apply")
    for name in options.peer:
        taken = rounds(name, {"hap": hap_steps, "torch-pruning": peer_step}, options.repeats)
        everything = ratio(taken, "torch-pruning", *main_steps, "score", "check")
        note(
            name,
            taken,
            times_faster_than_torch_pruning=ratio(taken, "torch-pruning", *main_steps),
            times_faster_with_score_and_check=everything,
        )
    for name in options.large:
        taken = rounds(name, {"hap": hap_steps, "torch.export": export_step}, options.repeats)
        note(name, taken, times_torch_export=1 / ratio(taken, "torch.export", *main_steps))
    for name in DEPTHS:
        taken = rounds(name, {"hap": hap_steps, "torch.export": export_step}, options.repeats)
        seconds = statistics.median(sum(t[s] for s in main_steps) for t in taken["hap"])
        layers = sum(isinstance(m, nn.Conv2d) for m in torchvision.models.get_model(name).modules())
        note(
            name,
            taken,
            convolutions=layers,
            milliseconds_per_convolution=1e3 * seconds / layers,
            times_torch_export=1 / ratio(taken, "torch.export", *main_steps),
        )


if __name__ == "__main__":
    main()

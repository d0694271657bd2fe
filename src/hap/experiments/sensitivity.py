"""The paper's figures about the scores themselves: how probes settle, what is kept, and how long scoring takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hap
from hap.checkpoint import load
from hap.data import Data
from hap.experiments.campaign import Folders
from hap.experiments.config import PruneStep
from hap.experiments.networks import example_of, fresh
from hap.experiments.starting import IMAGES
from hap.experiments.steps import calibration, probe_record, score_step, sensitivity_record
from hap.files import write_json
from hap.planning import Budget
from hap.provenance import provenance
from hap.scoring import Criterion, HessianTrace, Random

TARGET = "sensitivity"
CHANNELS = (0.5, 0.45, 0.4, 0.31)
"""Shares of channels left in the paper's ablation."""
DRAWS = 3


@dataclass(frozen=True)
class Look:
    """One record about the scores of a dense network: `what` is probes, layers, shapes or seconds. Without `dense`, the
    name of the job that trained it, the network is untrained, which makes no difference to seconds."""

    name: str
    model: str
    what: str
    dense: str | None = None
    probes: int = 300


def pending(looks: Sequence[Look], folders: Folders) -> list[Look]:
    """Looks without a record whose dense network is there."""
    left = [k for k in looks if not folders.result(k.name).exists()]
    return [k for k in left if k.dense is None or folders.network(k.dense).exists()]


def status(looks: Sequence[Look], folders: Folders) -> dict[str, list[str]]:
    """Names of what is done, of what can be done now, and of what waits for a dense network."""
    ready = [k.name for k in pending(looks, folders)]
    done = [k.name for k in looks if folders.result(k.name).exists()]
    return {"done": done, "ready": ready, "waiting": [k.name for k in looks if k.name not in (*ready, *done)]}


def take(looks: Sequence[Look], data: Data, folders: Folders, revision: str | None,
         say: Callable[[str], None]) -> None:  # fmt: skip
    """Write the record of every look that can be taken."""
    for look in pending(looks, folders):
        say(f"{look.name}: scoring")
        model = fresh(look.model, data.classes)
        if look.dense is not None:
            load(folders.network(look.dense), model)
        record = KINDS[look.what](model.to(data.train.images.device), data, look)
        about = {"name": look.name, "model": look.model, "data": data.name, "dense": look.dense}
        write_json(folders.result(look.name), record | about | provenance(revision))


def _probes(model: nn.Module, data: Data, look: Look) -> dict[str, Any]:
    return probe_record(model, data, look.probes, IMAGES, 0)


def _layers(model: nn.Module, data: Data, look: Look) -> dict[str, Any]:
    """Scores of all channels and what the headline HAP+Implant plan does with each."""
    step = PruneStep("hap-implant", flops=0.407, implant=0.2, coupling="union")
    groups, scores = score_step(model, data, step, IMAGES, 0, lambda _: None)
    plan = hap.plan(groups, scores, step.budget(), step.make_implant())
    return sensitivity_record(look.name, scores, plan, step.criterion) | {"flops": step.flops}


def _seconds(model: nn.Module, data: Data, look: Look) -> dict[str, Any]:
    """Time of all scores on 512 images: exactly, and by Hutchinson's probes as the paper does; each after a warm-up."""
    batches = calibration(data, model, IMAGES, 0)
    groups = hap.trace(model, example_of(data).to(batches[0][0].device), "union")

    def timed(criterion: HessianTrace, warm_up: HessianTrace) -> float:
        hap.score(model, groups, batches, F.cross_entropy, warm_up)
        begun = time.perf_counter()
        hap.score(model, groups, batches, F.cross_entropy, criterion)  # ends on the CPU, so nothing is left running
        return time.perf_counter() - begun

    exact = HessianTrace(method="exact")
    few, all_probes = (HessianTrace(method="hutchinson", probes=n) for n in (2, look.probes))
    return {"kind": "hap-score-seconds", "format": 1, "images": sum(len(y) for _, y in batches), "units": groups.units,
            "exact_seconds": timed(exact, exact), "probes": look.probes, "probe_seconds": timed(all_probes, few),
            "device": "cuda" if torch.device(batches[0][0].device).type == "cuda" else "cpu"}  # fmt: skip


def _shapes(model: nn.Module, data: Data, look: Look) -> dict[str, Any]:
    """What is left of FLOPs and parameters at the paper's shares of channels, by how the sensitivity is found."""
    batches = calibration(data, model, IMAGES, 0)
    groups = hap.trace(model, example_of(data).to(batches[0][0].device), "union")
    few = [HessianTrace(method="hutchinson", probes=look.probes, seed=seed) for seed in range(DRAWS)]
    criteria: dict[str, Sequence[Criterion]] = {
        f"{look.probes} probes": few, "exact": [HessianTrace(method="exact")], "random": [Random(seed=0)],
    }  # fmt: skip
    rows = []
    for how, draws in criteria.items():
        for criterion in draws:
            scores = hap.score(model, groups, batches, F.cross_entropy, criterion)
            for share in CHANNELS:
                plan = hap.plan(groups, scores, Budget(channels=share))
                rows.append({"how": how, "channels": share, "flops": plan.after.macs / plan.before.macs,
                             "params": plan.after.params / plan.before.params})  # fmt: skip
    return {"kind": "hap-shapes", "format": 1, "images": sum(len(y) for _, y in batches), "rows": rows}


KINDS: dict[str, Callable[[nn.Module, Data, Look], dict[str, Any]]] = {
    "probes": _probes,
    "layers": _layers,
    "shapes": _shapes,
    "seconds": _seconds,
}


def looks(resnet56: str) -> list[Look]:
    """The paper's: probes and layers of ResNet56, as trained by a job, and seconds of three networks. Besides, the
    shapes that the public code's number of probes leads to."""
    timed = ("resnet56", "preresnet29", "wide_resnet32")
    return [
        Look("sensitivity-layers", "resnet56", "layers", resnet56),
        Look("sensitivity-probes", "resnet56", "probes", resnet56),
        Look("sensitivity-shapes", "resnet56", "shapes", resnet56, probes=3),
        *(Look(f"sensitivity-seconds-{model}", model, "seconds") for model in timed),
    ]

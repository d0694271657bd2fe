"""The paper's figures about the scores themselves: how probes settle, what is kept, and how long scoring takes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hap
from hap.data import Batch, Data
from hap.io.checkpoint import load
from hap.planning.budget import Budget
from hap.scoring import Criterion, HessianTrace, Random
from hap.utils.atomic_files import write_json
from hap.workflow.config import PruneStep
from hap.workflow.networks import first_images, new_network
from hap.workflow.provenance import provenance
from hap.workflow.steps import Work, calibration, probe_record, sensitivity_record
from hap_reproduction.cifar10.job import Folders
from hap_reproduction.cifar10.removal import one_shot_record, rank_correlation, removal_record
from hap_reproduction.cifar10.starting import IMAGES

TARGET = "sensitivity"
CHANNELS = (0.5, 0.45, 0.4, 0.31)
"""Shares of channels left in the paper's ablation."""
DRAWS = 3


@dataclass(frozen=True)
class Study:
    """One record about the scores of a dense network: `what` is one of `KINDS`. Without `dense`, the
    name of the job that trained it, the network is untrained, which makes no difference to seconds."""

    name: str
    model: str
    what: str
    dense: str | None = None
    probes: int = 300
    images: tuple[int, ...] = (IMAGES, 10_000)


def pending(looks: Sequence[Study], folders: Folders) -> list[Study]:
    """Looks without a record whose dense network is there."""
    left = [k for k in looks if not folders.result(k.name).exists()]
    return [k for k in left if k.dense is None or folders.dense(k.dense).exists()]


def status(looks: Sequence[Study], folders: Folders) -> dict[str, list[str]]:
    """Names of what is done, of what can be done now, and of what waits for a dense network."""
    ready = [k.name for k in pending(looks, folders)]
    done = [k.name for k in looks if folders.result(k.name).exists()]
    return {"done": done, "ready": ready, "waiting": [k.name for k in looks if k.name not in (*ready, *done)]}


def take(
    looks: Sequence[Study],
    data: Data,
    folders: Folders,
    revision: str | None,
    say: Callable[[str], None],
    seconds: float | None = None,
) -> None:
    """Write the record of every look that can be taken. With `seconds`, none begins after so many."""
    begun = time.monotonic()
    for look in pending(looks, folders):
        if seconds is not None and time.monotonic() - begun >= seconds:
            return
        say(f"{look.name}: scoring")
        model = new_network(look.model, data.classes)
        if look.dense is not None:
            load(folders.dense(look.dense), model)
        record = KINDS[look.what](model.to(data.train.images.device), data, look)
        about = {"name": look.name, "model": look.model, "data": data.name, "dense": look.dense}
        write_json(folders.result(look.name), record | about | provenance(revision))


def _probes(model: nn.Module, data: Data, look: Study) -> dict[str, Any]:
    return probe_record(model, data, look.probes, IMAGES, 0)


def _layers(model: nn.Module, data: Data, look: Study) -> dict[str, Any]:
    """Scores of all channels and what the headline HAP+Implant plan does with each."""
    step = PruneStep("hap-implant", flops=0.407, implant=0.2, coupling="union")
    groups, scores = Work(model, data, step, IMAGES, 0).score()
    plan = hap.plan(groups, scores, step.budget(), step.make_implant())
    return sensitivity_record(look.name, scores, plan, step.criterion) | {"flops": step.flops}


def _seconds(model: nn.Module, data: Data, look: Study) -> dict[str, Any]:
    """Time of all scores on 512 images: exactly, and by Hutchinson's probes as the paper does; each after a warm-up."""
    batches = calibration(data, model, IMAGES, 0)
    groups = hap.trace(model, first_images(data).to(batches[0][0].device), "union")

    def timed(criterion: HessianTrace, warm_up: HessianTrace) -> float:
        hap.score(model, groups, batches, F.cross_entropy, warm_up)
        begun = time.perf_counter()
        hap.score(model, groups, batches, F.cross_entropy, criterion)  # ends on the CPU, so nothing is left running
        return time.perf_counter() - begun

    exact = HessianTrace(method="exact")
    few, all_probes = (HessianTrace(method="hutchinson", probes=n) for n in (2, look.probes))
    return {
        "kind": "hap-score-seconds",
        "format": 1,
        "images": sum(len(y) for _, y in batches),
        "units": groups.units,
        "exact_seconds": timed(exact, exact),
        "probes": look.probes,
        "probe_seconds": timed(all_probes, few),
        "device": "cuda" if torch.device(batches[0][0].device).type == "cuda" else "cpu",
    }


def _shapes(model: nn.Module, data: Data, look: Study) -> dict[str, Any]:
    """What is left of FLOPs and parameters at the paper's shares of channels, by how the sensitivity is found."""
    batches = calibration(data, model, IMAGES, 0)
    groups = hap.trace(model, first_images(data).to(batches[0][0].device), "union")
    few = [HessianTrace(method="hutchinson", probes=look.probes, seed=seed) for seed in range(DRAWS)]
    criteria: dict[str, Sequence[Criterion]] = {
        f"{look.probes} probes": few,
        "exact": [HessianTrace(method="exact")],
        "random": [Random(seed=0)],
    }
    rows = []
    for how, draws in criteria.items():
        for criterion in draws:
            scores = hap.score(model, groups, batches, F.cross_entropy, criterion)
            for share in CHANNELS:
                plan = hap.plan(groups, scores, Budget(channels=share))
                rows.append(
                    {
                        "how": how,
                        "channels": share,
                        "flops": plan.after.macs / plan.before.macs,
                        "params": plan.after.params / plan.before.params,
                    }
                )
    return {"kind": "hap-shapes", "format": 1, "images": sum(len(y) for _, y in batches), "rows": rows}


def _images(model: nn.Module, data: Data, look: Study) -> dict[str, Any]:
    """How far two draws of training images agree on the exact scores, and on the channels that stay at the paper's
    first row, by the number of images; and the share of the loss's curvature that one in twenty images carries."""
    groups = hap.trace(model, first_images(data).to(data.train.images.device), "union")
    rows = []
    for count in look.images:
        draws = [calibration(data, model, count, seed) for seed in range(2)]
        scores = [hap.score(model, groups, batches, F.cross_entropy, "hessian") for batches in draws]
        kept = [hap.plan(groups, one, Budget(flops=0.3874)).kept for one in scores]
        pairs = [{(layer, unit) for layer, units in one.items() for unit in units} for one in kept]
        rows.append(
            {
                "images": sum(len(y) for _, y in draws[0]),
                "rank_correlation": rank_correlation(*scores),
                "kept_in_both": len(pairs[0] & pairs[1]) / len(pairs[0] | pairs[1]),
                "carried_by_a_twentieth": _carried(model, draws[0], 0.05),
            }
        )
    return {"kind": "hap-score-images", "format": 1, "rows": rows}


@torch.no_grad()
def _carried(model: nn.Module, batches: Sequence[Batch], share: float) -> float:
    """The part of the sum over images of trace(H), H the loss's Hessian in the logits, that the largest hold."""
    traces = torch.cat([1 - model(x).double().softmax(1).square().sum(1) for x, _ in batches]).sort(descending=True)[0]
    return float(traces[: max(1, round(share * len(traces)))].sum() / traces.sum())


KINDS: dict[str, Callable[[nn.Module, Data, Study], dict[str, Any]]] = {
    "probes": _probes,
    "layers": _layers,
    "shapes": _shapes,
    "images": _images,
    "seconds": _seconds,
    "removal": lambda model, data, look: removal_record(model, data, look.images[0]),
    "one-shot": lambda model, data, look: one_shot_record(model, data),
}


def studies(resnet56: Sequence[str]) -> list[Study]:
    """The paper's: probes and layers of ResNet56, as trained by the first of these jobs, and seconds of three networks.
    Besides, the shapes that the public code's number of probes leads to, how far scores depend on the images, and what
    they are worth before fine-tuning: beside what the loss does, and, for all jobs, in pruned networks."""
    first = resnet56[0]
    timed = ("resnet56", "preresnet29", "wide_resnet32")
    return [
        Study("sensitivity-layers", "resnet56", "layers", first),
        Study("sensitivity-probes", "resnet56", "probes", first),
        Study("sensitivity-shapes", "resnet56", "shapes", first, probes=3),
        Study("sensitivity-images", "resnet56", "images", first),
        Study("sensitivity-removal", "resnet56", "removal", first, images=(2048,)),
        *(Study(f"sensitivity-one-shot-{i}", "resnet56", "one-shot", name) for i, name in enumerate(resnet56)),
        *(Study(f"sensitivity-seconds-{model}", model, "seconds") for model in timed),
    ]

"""How a job's network comes about before it is trained: fresh, or pruned from a dense one in one of three ways."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

import hap
from hap.data import Data
from hap.errors import HapError
from hap.io.checkpoint import load, read
from hap.planning.plan import Plan
from hap.scoring import Scores
from hap.workflow.config import PruneStep
from hap.workflow.networks import first_images, new_network
from hap.workflow.steps import Work, calibration
from hap_reproduction.cifar10.eigendamage import Ranks, eigendamage_, rebuild_
from hap_reproduction.files import read_record

IMAGES = 512
"""Training images that every method is given to score on, unless its job says otherwise."""


@dataclass(frozen=True)
class EigenStep:
    """EigenDamage down to a share of the parameters."""

    name: str
    params: float
    criterion: str = "eigendamage"


@dataclass(frozen=True)
class BorrowedStep:
    """What another library would remove at a share of the FLOPs, as a file in the folder `plans` says."""

    name: str
    flops: float
    criterion: str


Step = PruneStep | EigenStep | BorrowedStep


@dataclass(frozen=True)
class Pruned:
    """A pruned network with what a checkpoint needs to build it again, and how long scoring took."""

    plan: Plan | None
    ranks: Ranks | None
    seconds: float


ScoreCache = dict[tuple[Any, ...], tuple[Scores, float]]
"""Scores of one network by what they depend on, and the seconds that they took."""


def prune(
    model: nn.Module,
    step: Step,
    data: Data,
    seed: int,
    plans: Path,
    images: int = IMAGES,
    known: ScoreCache | None = None,
) -> Pruned:
    """Prune in place; a PruneStep scores on so many `images`, unless the scores are `known` already."""
    begun = time.monotonic()
    if isinstance(step, EigenStep):
        batches = calibration(data, model, IMAGES, seed)
        ranks = eigendamage_(model, first_images(data).to(batches[0][0].device), batches, params=step.params)
        return Pruned(None, ranks, time.monotonic() - begun)
    if isinstance(step, BorrowedStep):
        plan = borrowed(model, data, plans / f"{step.name}.json", step.flops)
        return Pruned(plan, None, time.monotonic() - begun)
    known, work = {} if known is None else known, Work(model, data, step, images, seed)
    key = step.criterion, step.probes, step.coupling, images, seed
    if key in known:
        groups = work.trace()
    else:
        groups, scores = work.score()
        known[key] = scores, time.monotonic() - begun
    scores, seconds = known[key]
    return Pruned(replace(work, images=IMAGES).prune(groups, scores), None, seconds)


def borrowed(model: nn.Module, data: Data, path: Path, flops: float) -> Plan:
    """Remove from the model, in place, what a file of another library's choices lists by group."""
    record = read_record(path, ("coupling", "removed"), "make it again with benchmarks/torch_pruning_plans.py")
    example = first_images(data).to(next(iter(model.parameters())).device)
    groups = hap.trace(model, example, record["coupling"])
    plan = hap.draft(groups, record["removed"])
    if plan.after.macs > flops * plan.before.macs:
        raise HapError(f"{path} leaves {plan.after.macs / plan.before.macs:.4f} of the FLOPs; expected at most {flops}")
    hap.apply_(model, plan, example)
    return plan


def describe(step: Step | None) -> dict[str, Any] | None:
    """The step as a result file keeps it. Older files do not name the one round that they took."""
    return None if step is None else {n: value for n, value in asdict(step).items() if (n, value) != ("rounds", 1)}


def open_started(path: Path, model: str, classes: int) -> nn.Module:
    """The network of a checkpoint that a job wrote, in the shape that its plan or its ranks say."""
    network = new_network(model, classes)
    rebuild_(network, read(path).about.get("ranks") or {})
    return load(path, network).eval()

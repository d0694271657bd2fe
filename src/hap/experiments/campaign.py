"""Many training runs as jobs: started from files, trained side by side on one device, resumed, recorded one by one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

import hap
from hap.checkpoint import load, read, save
from hap.data import Data
from hap.errors import HapError
from hap.experiments.config import PruneStep
from hap.experiments.networks import example_of, fresh
from hap.experiments.steps import prune_step, score_step
from hap.files import write_json
from hap.plans import Plan
from hap.provenance import provenance
from hap.recipes import Recipe
from hap.training import History, evaluate, train_many

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One network to train. Without `prune` it is a dense one from scratch; with it, `dense` names the job it starts
    from, and `most_params` is a second limit on what is left, besides the step's own budget.

    `paper` holds the figures of the paper's row that this one is held against; `targets` the tables it belongs to.
    """

    name: str
    model: str
    recipe: Recipe
    targets: tuple[str, ...]
    dense: str | None = None
    prune: PruneStep | None = None
    most_params: float | None = None
    paper: dict[str, float] | None = None
    teacher: bool = False


@dataclass(frozen=True)
class Folders:
    """`results`: a JSON file per finished job. `networks`: finished checkpoints. `work`: what resuming needs."""

    results: Path
    networks: Path
    work: Path

    def result(self, name: str) -> Path:
        return self.results / f"{name}.json"

    def network(self, name: str) -> Path:
        return self.networks / f"{name}.safetensors"

    def started(self, name: str) -> Path:
        return self.work / f"{name}-start.safetensors"


def pending(jobs: Sequence[Job], folders: Folders) -> list[Job]:
    """Jobs without a result whose dense network is there, in the order given."""
    return [
        j for j in jobs
        if not folders.result(j.name).exists() and (j.dense is None or folders.network(j.dense).exists())
    ]  # fmt: skip


def work_off(jobs: Sequence[Job], data: Data, folders: Folders, together: int = 8, seconds: float | None = None,
             revision: str | None = None, say: Say = print) -> None:  # fmt: skip
    """Train what is pending, up to `together` jobs of equal length at a time, and stop in time for `seconds`.

    Interrupted jobs go on where they stopped when the same jobs are pending in the same order.
    """
    begun = time.monotonic()
    while queue := pending(jobs, folders):
        first = queue[0].recipe
        chosen = [j for j in queue if (j.recipe.epochs, j.recipe.batch) == (first.epochs, first.batch)][:together]
        left = None if seconds is None else seconds - (time.monotonic() - begun)
        if left is not None and left <= 0:
            return
        if not _train(chosen, data, folders, left, revision, say):
            return


def _train(
    jobs: Sequence[Job], data: Data, folders: Folders, seconds: float | None, revision: str | None, say: Say
) -> bool:
    """One batch of jobs; True when they are finished and recorded."""
    begun = time.monotonic()
    models = [_start(job, data, folders, say) for job in jobs]
    teachers = [_dense(job, data, folders) if job.teacher else None for job in jobs]
    name = hashlib.sha256("\n".join(job.name for job in jobs).encode()).hexdigest()[:12]
    left = None if seconds is None else max(1e-3, seconds - (time.monotonic() - begun))
    histories = train_many(
        models, data, [job.recipe for job in jobs], teachers=teachers, checkpoint_dir=folders.work / name,
        seconds=left, progress=False,
    )  # fmt: skip
    done = True
    for job, model, history in zip(jobs, models, histories, strict=True):
        say(f"{job.name}: {history.epochs}/{job.recipe.epochs} epochs, test accuracy {history.final_accuracy}")
        if history.epochs == job.recipe.epochs:
            _record(job, model, history, data, folders, len(jobs), revision)
        done &= history.epochs == job.recipe.epochs
    say(f"{sum(h.images_per_second[-1] for h in histories):.0f} images/s, {len(jobs)} networks side by side")
    return done


def _start(job: Job, data: Data, folders: Folders, say: Say) -> nn.Module:
    """The network as training begins, from `work` if it was made before."""
    device = data.train.images.device
    if job.prune is None:
        return fresh(job.model, data.classes, job.recipe.seed).to(device)
    path = folders.started(job.name)
    if path.exists():
        return load(path, fresh(job.model, data.classes)).to(device)
    say(f"{job.name}: pruning")
    model = _dense(job, data, folders)
    dense = evaluate(model, data).accuracy
    plan, seconds = _prune(model, job, data)
    metrics = {"dense_accuracy": dense, "accuracy_before_finetuning": evaluate(model, data).accuracy,
               "scoring_seconds": seconds}  # fmt: skip
    save(path, model, plan, metrics=metrics)
    return model


def _dense(job: Job, data: Data, folders: Folders) -> nn.Module:
    assert job.dense is not None
    return load(folders.network(job.dense), fresh(job.model, data.classes)).to(data.train.images.device).eval()


def _prune(model: nn.Module, job: Job, data: Data) -> tuple[Plan, float]:
    """Prune to the step's budget and, where the job has a second limit that this would break, to that one instead."""
    step = job.prune
    assert step is not None
    begun = time.monotonic()
    groups, scores = score_step(model, data, step, 512, job.recipe.seed, lambda _: None)
    seconds = time.monotonic() - begun
    first = hap.plan(groups, scores, step.budget(), step.make_implant(), step.limits(), per_cost=step.per_cost)
    if job.most_params is not None and first.after.params > job.most_params * first.before.params:
        step = replace(step, flops=None, channels=None, params=job.most_params)
    return prune_step(model, data, step, groups, scores, 512, job.recipe.seed, lambda _: None), seconds


def _record(job: Job, model: nn.Module, history: History, data: Data, folders: Folders, together: int,
            revision: str | None) -> None:  # fmt: skip
    """The result file and the checkpoint in half precision, whose accuracy is measured too."""
    accuracy = evaluate(model, data).accuracy
    plan, metrics = None, {}
    if job.prune is not None:
        started = read(folders.started(job.name))
        plan, metrics = started.plan, started.metrics
    _round_to_half(model)
    count = hap.cost(model, example_of(data))
    result = {
        "kind": "hap-cifar10", "format": 1, "name": job.name, "model": job.model, "data": data.name,
        "seed": job.recipe.seed, "dense": job.dense, "prune": asdict(job.prune) if job.prune else None,
        "most_params": job.most_params, "targets": list(job.targets), "paper": job.paper,
        "recipe": job.recipe.to_dict(), "teacher": job.dense if job.teacher else None, **metrics,
        "accuracy": accuracy, "accuracy_in_half_precision": evaluate(model, data).accuracy,
        "params": count.params, "macs": count.macs,
        "params_left": count.params / plan.before.params if plan else 1.0,
        "macs_left": count.macs / plan.before.macs if plan else 1.0,
        "units": _units(plan) if plan else None,
        "seconds": sum(history.seconds), "side_by_side": together, "history": history.to_dict(),
    } | provenance(revision)  # fmt: skip
    about = {"model": job.model, "classes": data.classes, "data": data.name, "result": job.name}
    save(folders.network(job.name), model.half(), plan, metrics={"accuracy": accuracy}, about=about)
    write_json(folders.result(job.name), result)


def _units(plan: Plan) -> dict[str, list[int]]:
    """Per layer: how many units were kept, implanted and removed."""
    return {n: [len(part[n]) for part in (plan.kept, plan.implanted, plan.removed)] for n in plan.kept}


@torch.no_grad()
def _round_to_half(model: nn.Module) -> None:
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.half())


def status(jobs: Sequence[Job], folders: Folders) -> dict[str, list[str]]:
    """Names of finished jobs, of those that can run now, and of those that wait for a dense network."""
    ready = {j.name for j in pending(jobs, folders)}
    done = [j.name for j in jobs if folders.result(j.name).exists()]
    return {"done": done, "ready": [j.name for j in jobs if j.name in ready],
            "waiting": [j.name for j in jobs if j.name not in ready and j.name not in done]}  # fmt: skip


def select(jobs: Sequence[Job], target: str) -> list[Job]:
    """The jobs of a table or figure, by its name; "all" for every one."""
    known = sorted({t for j in jobs for t in j.targets})
    if target != "all" and target not in known:
        raise HapError(f"target is {target!r}; expected all or one of {', '.join(known)}")
    return [j for j in jobs if target == "all" or target in j.targets]

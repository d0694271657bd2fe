"""Many training runs as jobs: started from files, trained side by side on one device, resumed, recorded one by one."""

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hap
from hap.data import Data
from hap.errors import HapError
from hap.io.checkpoint import load, read, save
from hap.planning.plan import Plan
from hap.training import evaluate
from hap.utils.atomic_files import digest, write_json
from hap.workflow.networks import first_images, new_network
from hap.workflow.provenance import provenance
from hap_reproduction.cifar10 import batches
from hap_reproduction.cifar10.batches import Batch
from hap_reproduction.cifar10.job import KIND, Folders, Job, Say, pending
from hap_reproduction.cifar10.masking import dense_form, pruned_form, trains_alike
from hap_reproduction.cifar10.stacking import train_stacked
from hap_reproduction.cifar10.starting import ScoreCache, describe, open_started, prune
from hap_reproduction.cifar10.training import NotFinite, Together
from hap_reproduction.cifar10.trimming import Trimmed, common_widths, trim
from hap_reproduction.files import locked

MASKED_FROM = 0.05
"""The share of FLOPs left from which a pruned network trains in a shape that others share, in which it can be one
network with them (`stack`) and be compiled. Odd widths use a GPU poorly; `benchmarks/train_throughput.py` measures."""


@dataclass(frozen=True)
class SideBySide:
    """How jobs are trained, for speed alone: the steps that they take are the same.

    Up to `together` jobs of one network and recipe train at a time, up to `stack` of one shape as one network, which
    may be `compiled`. Networks with at least `masked_from` of their FLOPs left train in a shape that they share: the
    dense one, or one between it and theirs (`hap.trimming`).
    """

    together: int = 8
    stack: int = 8
    compiled: bool = False
    masked_from: float = MASKED_FROM

    def __post_init__(self) -> None:
        if self.together < 1:
            raise HapError(f"together is {self.together}; expected how many networks to train at a time, at least 1")


DEFAULT = SideBySide()


def work_off(
    jobs: Sequence[Job],
    data: Data,
    folders: Folders,
    manner: SideBySide = DEFAULT,
    seconds: float | None = None,
    revision: str | None = None,
    say: Say = print,
) -> None:
    """Train what is pending and stop in time for `seconds`, at the end of an epoch.

    What an earlier call left unfinished is gone on with first, in whatever company it was. One process trains in a
    `work` folder at a time: two would take up each other's states.
    """
    if seconds is not None and seconds <= 0:
        raise HapError(f"seconds is {seconds}; expected how long to train at the most, more than 0")
    folders.check()
    with locked(folders.work, "wait until it has ended, or train other runs with another --work"):
        _work_off(jobs, data, folders, manner, seconds, revision, say)


def _work_off(
    jobs: Sequence[Job],
    data: Data,
    folders: Folders,
    manner: SideBySide,
    seconds: float | None,
    revision: str | None,
    say: Say,
) -> None:
    if lost := batches.unknown(folders.work):
        say(f"these states name no runs, so only the command that began them could go on with them: {', '.join(lost)}")
    begun, first = time.monotonic(), True
    while queue := pending(jobs, folders):
        left = None if seconds is None else seconds - (time.monotonic() - begun)
        if left is not None and left <= 0 and not first:  # one epoch at least, however long it took to get here
            return
        first = False
        batch = _interrupted(queue, folders, manner, say) or _next(queue, folders, manner)
        named = {job.name: job for job in queue}
        if not _train(batch, [named[name] for name in batch.jobs], data, folders, manner, left, revision, say):
            return


def _interrupted(queue: Sequence[Job], folders: Folders, manner: SideBySide, say: Say) -> Batch | None:
    """What of these jobs has a state, up to `together` of one batch; the state of its other jobs stays for later."""
    names, newer = {job.name for job in queue}, set[str]()
    for batch in batches.begun(folders.work):
        own = [name for name in batch.jobs if name not in newer]
        if chosen := [name for name in own if name in names][: manner.together]:
            others = [name for name in own if name not in chosen and not _is_recorded(name, folders)]
            say(f"going on with {', '.join(chosen)}, begun in {batch.folder}")
            return batches.only(batch, chosen, others)
        newer |= set(batch.jobs)
    return None


def _is_recorded(name: str, folders: Folders) -> bool:
    return folders.result(name).exists() and folders.dense(name).exists()


def _next(queue: Sequence[Job], folders: Folders, manner: SideBySide) -> Batch:
    """The first job with others that train beside it."""
    chosen = [job.name for job in queue if _alike(job, queue[0])][: manner.together]
    return batches.new_batch(folders.work, chosen, manner.masked_from)


def prepare(jobs: Sequence[Job], data: Data, folders: Folders, say: Say = print) -> None:
    """Prune for all jobs that can run, so that their training begins at once. Another process may train meanwhile."""
    _prune(pending(jobs, folders), data, folders, say)


def _alike(job: Job, other: Job) -> bool:
    """Whether two jobs train side by side: the same network by the same recipe, whose seed may differ. Others could,
    but what is large would hold up what is small."""
    return job.model == other.model and replace(job.recipe, seed=other.recipe.seed) == other.recipe


@dataclass(frozen=True)
class Trainee:
    """A job's network in the shape that it trains in. With `masks`, it is the dense shape of what `plan` leaves, or the
    smaller one that `trimmed` tells."""

    model: nn.Module
    plan: Plan | None
    masks: dict[str, Tensor] | None
    trimmed: Trimmed | None = None

    @property
    def form(self) -> str:
        return "pruned" if self.masks is None else "masked" if self.trimmed is None else "trimmed"

    def finished(self, dense: nn.Module, example: Tensor) -> nn.Module:
        """The network to be recorded: the pruned one. Of `dense` only the shapes count."""
        if self.masks is None:
            return self.model
        assert self.plan is not None
        whole = self.model if self.trimmed is None else self.trimmed.restored(dense)
        return pruned_form(whole, self.plan, example)


def _train(
    batch: Batch,
    jobs: Sequence[Job],
    data: Data,
    folders: Folders,
    manner: SideBySide,
    seconds: float | None,
    revision: str | None,
    say: Say,
) -> bool:
    """One batch of jobs; True when they are finished and recorded, and their state is needed no more."""
    begun = time.monotonic()
    for job in jobs:
        if folders.result(job.name).exists():
            say(
                f"{job.name} has a result, but its network is gone and others start from it: it is trained again, and "
                "is not the network that those before started from"
            )
    _prune(jobs, data, folders, say)
    trainees = _trimmed([_trainee(job, data, folders, batch.masked_from) for job in jobs], batch, jobs[0].model, data)
    teachers = [_dense(job, data, folders) if job.teacher else None for job in jobs]
    left = None if seconds is None else max(1e-3, seconds - (time.monotonic() - begun))
    until = "" if left is None else f" for {left:.0f} s, to the end of an epoch and for one at least"
    say(f"training {len(jobs)} networks side by side{until}")
    try:
        histories = train_stacked(
            [t.model for t in trainees],
            data,
            [job.recipe for job in jobs],
            teachers=teachers,
            masks=[t.masks for t in trainees],
            checkpoint_dir=batch.folder,
            seconds=left,
            stack=manner.stack,
            compiled=manner.compiled,
        )
    except NotFinite as error:
        name = jobs[error.position].name
        raise HapError(f"{name}: {error}. The others go on without it where --jobs leaves it out") from error
    done = True
    for job, trainee, history in zip(jobs, trainees, histories, strict=True):
        say(f"{job.name}: {history.epochs}/{job.recipe.epochs} epochs, test accuracy {history.final_accuracy}")
        if history.epochs == job.recipe.epochs:
            _record(job, trainee, history, data, folders, batch.side_by_side, revision)
        done &= history.epochs == job.recipe.epochs
    say(f"{sum(h.images_per_second[-1] for h in histories):.0f} images/s, {len(jobs)} networks side by side")
    if done:
        batch.remove()
    return done


def _trainee(job: Job, data: Data, folders: Folders, masked_from: float) -> Trainee:
    """The job's network as training begins, in the shape that trains faster."""
    model = _start(job, data, folders)
    plan = read(folders.started(job.name)).plan if job.prune is not None else None
    if plan is None or not trains_alike(plan) or plan.after.macs < masked_from * plan.before.macs:
        return Trainee(model, plan, None)
    whole, masks = dense_form(model, plan, _shape(job.model, data))
    return Trainee(whole, plan, masks)


def _shape(model: str, data: Data) -> nn.Module:
    """A dense network of this name, of which only the shapes count."""
    return new_network(model, data.classes).to(data.train.images.device).eval()


def _trimmed(trainees: list[Trainee], batch: Batch, model: str, data: Data) -> list[Trainee]:
    """Those under masks in the smaller shape that they share, which their state depends on: the batch notes it down."""
    if not any(trainee.masks for trainee in trainees):
        return trainees
    example = first_images(data)
    groups = hap.trace(_shape(model, data), example, "union")
    widths = batch.widths
    if widths is None:
        widths = common_widths(groups, [trainee.masks for trainee in trainees if trainee.masks is not None])
        replace(batch, widths=widths).write()
    if not widths:
        return trainees
    found = []
    for trainee in trainees:
        if trainee.masks is not None:
            small = trim(trainee.model, trainee.masks, groups, widths, example)
            trainee = Trainee(small.model, trainee.plan, small.masks, small)
        found.append(trainee)
    return found


def _start(job: Job, data: Data, folders: Folders) -> nn.Module:
    """The network as training begins: a fresh one, or what pruning left in `work`."""
    device = data.train.images.device
    if job.prune is None:
        return new_network(job.model, data.classes, job.recipe.seed).to(device)
    path, settings = folders.started(job.name), _settings(job)
    if read(path).about.get("settings", settings) != settings:
        raise HapError(f"{path} was pruned with other settings than {job.name} has now; delete it to prune anew")
    for key, name in (("dense", job.dense), ("start", job.start)):
        there, used = _digest(name, folders), read(path).about.get(key)
        if there is not None and used is not None and there != used:
            raise HapError(
                f"{path} was pruned from another network than the {name} that is there now, which was trained again; "
                "delete it to prune anew"
            )
    return open_started(path, job.model, data.classes).to(device)


def _prune(jobs: Sequence[Job], data: Data, folders: Folders, say: Say) -> None:
    """Prune for those jobs for which this was not done before; what ranks units alike is found once for all of them."""
    known: dict[str | None, ScoreCache] = {}
    for job in jobs:
        if job.prune is None or folders.started(job.name).exists():
            continue
        say(f"{job.name}: pruning")
        model = _dense(job, data, folders)
        dense, scores = evaluate(model, data).accuracy, known.setdefault(job.start or job.dense, {})
        if job.start is not None:
            model = _in_dense_shape(folders.dense(job.start), model, data)
        made = prune(model, job.prune, data, job.recipe.seed, folders.plans, job.images, scores)
        metrics = {
            "dense_accuracy": dense,
            "accuracy_before_finetuning": evaluate(model, data).accuracy,
            "scoring_seconds": made.seconds,
        }
        about = {
            "ranks": made.ranks,
            "settings": _settings(job),
            "dense": _digest(job.dense, folders),
            "start": _digest(job.start, folders),
        }
        if folders.started(job.name).exists():  # by a process that prunes ahead: its plan may be in use
            continue
        save(folders.started(job.name), model, made.plan, metrics=metrics, about=about)


def _digest(name: str | None, folders: Folders) -> str | None:
    """Which network of this name it is that a job starts from: one that was trained again is another."""
    return digest(folders.dense(name)) if name and folders.dense(name).exists() else None


def _in_dense_shape(path: Path, dense: nn.Module, data: Data) -> nn.Module:
    """A pruned network as the dense one with zeros where something went: these have a score of zero, so under a smaller
    budget they go again, before all else."""
    plan, pruned = read(path).plan, load(path, copy.deepcopy(dense)).to(data.train.images.device)
    if plan is None:
        raise HapError(f"{path} is not pruned; expected the network of an earlier step")
    return dense_form(pruned, plan, dense)[0].eval()


def _settings(job: Job) -> Any:
    """How a job is pruned, as a checkpoint keeps it."""
    return json.loads(json.dumps([describe(job.prune), job.images, *([job.start] if job.start else [])]))


def _dense(job: Job, data: Data, folders: Folders) -> nn.Module:
    assert job.dense is not None
    return load(folders.dense(job.dense), new_network(job.model, data.classes)).to(data.train.images.device).eval()


def _record(
    job: Job, trainee: Trainee, history: Together, data: Data, folders: Folders, side_by_side: int, revision: str | None
) -> None:
    """The result file and the checkpoint in half precision, whose accuracy is measured too."""
    example, shape = first_images(data), _shape(job.model, data)
    model = trainee.finished(shape, example)
    accuracy = evaluate(model, data).accuracy
    started = read(folders.started(job.name)) if job.prune is not None else None
    plan, ranks = trainee.plan, started.about.get("ranks") if started else None
    _round_to_half(model)
    count, dense = hap.cost(model, example), hap.cost(shape, example)
    result = {
        "kind": KIND,
        "format": 1,
        "name": job.name,
        "model": job.model,
        "data": data.name,
        "seed": job.recipe.seed,
        "dense": job.dense,
        "start": job.start,
        "dense_sha256": started.about.get("dense") if started else None,
        "start_sha256": started.about.get("start") if started else None,
        "prune": describe(job.prune),
        "images": min(job.images, len(data.train)) if job.prune else None,
        "targets": list(job.targets),
        "paper": job.paper,
        "recipe": job.recipe.to_dict(),
        "teacher": job.dense if job.teacher else None,
        **(started.metrics if started else {}),
        "accuracy": accuracy,
        "accuracy_in_half_precision": evaluate(model, data).accuracy,
        "params": count.params,
        "macs": count.macs,
        "params_left": count.params / dense.params,
        "macs_left": count.macs / dense.macs,
        "units": _units(plan) if plan else None,
        "ranks": ranks,
        "trained": trainee.form if job.prune else "dense",
        "seconds": sum(history.seconds),
        "side_by_side": side_by_side,
        "stack": history.stack,
        "compiled": history.compiled,
        "history": history.to_dict(),
    } | provenance(revision)
    about = {"model": job.model, "classes": data.classes, "data": data.name, "result": job.name, "ranks": ranks}
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

"""What is trained: one job a network, and the folders that its files lie in."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch

import hap
from hap.errors import HapError
from hap.training.recipes import Recipe
from hap.utils.atomic_files import check_writable
from hap_reproduction.cifar10.starting import IMAGES, BorrowedStep, Step

Say = Callable[[str], None]
KIND = "hap-cifar10"


@dataclass(frozen=True)
class Job:
    """One network to train. Without `prune` it is a dense one from scratch; with it, `dense` names the job it starts
    from.

    `paper` holds the figures of the paper's row that this one is held against; `targets` the tables it belongs to;
    `images` how many training images a PruneStep scores on. To prune in steps, `start` names another pruned job, whose
    network is pruned further in place of the dense one; budgets are shares of the dense one all the same.
    """

    name: str
    model: str
    recipe: Recipe
    targets: tuple[str, ...]
    dense: str | None = None
    prune: Step | None = None
    paper: dict[str, float] | None = None
    teacher: bool = False
    images: int = IMAGES
    start: str | None = None


@dataclass(frozen=True)
class Folders:
    """`results`: a JSON file per finished job. `networks`: finished checkpoints. `work`: what resuming needs.
    `plans`, in `results`: what other libraries chose to remove. `networks` in `results` may hold dense networks that
    runs start from and that are not handed out."""

    results: Path
    networks: Path
    work: Path

    @property
    def plans(self) -> Path:
        return self.results / "plans"

    def result(self, name: str) -> Path:
        return self.results / f"{name}.json"

    def network(self, name: str) -> Path:
        return self.networks / f"{name}.safetensors"

    def dense(self, name: str) -> Path:
        """Where a finished network that others start from is, wherever it is kept."""
        kept = self.results / "networks" / f"{name}.safetensors"
        return kept if kept.exists() and not self.network(name).exists() else self.network(name)

    def started(self, name: str) -> Path:
        return self.work / f"{name}-start.safetensors"

    def check(self) -> None:
        """Refuse folders that cannot be written to before the work, not after it."""
        for folder in (self.results, self.networks, self.work):
            check_writable(folder)


def pending(jobs: Sequence[Job], folders: Folders) -> list[Job]:
    """Jobs that can run now and have no result, in the order given.

    A network that is too large to keep may be gone while its result is there: it is trained again if some job that has
    no result needs it.
    """
    wanted = [j for j in jobs if not folders.result(j.name).exists()]
    missing: set[str] = set()
    while more := {name for j in wanted for name in _lacks(j, folders)} - missing:
        missing |= more
        wanted += [j for j in jobs if j.name in more and j not in wanted]
    return [j for j in jobs if j in wanted and not missing_plans([j], folders) and not _lacks(j, folders)]


def missing_plans(jobs: Sequence[Job], folders: Folders) -> list[Path]:
    """The files of other libraries' choices that jobs without a result wait for."""
    left = [j for j in jobs if not folders.result(j.name).exists()]
    files = [folders.plans / f"{j.prune.name}.json" for j in left if isinstance(j.prune, BorrowedStep)]
    return [file for file in files if not file.exists()]


def _lacks(job: Job, folders: Folders) -> list[str]:
    """Networks that the job needs and that are not there: once it is pruned, that is its teacher at most."""
    pruned = folders.started(job.name).exists()
    needed = [job.dense] if pruned and job.teacher else [] if pruned else [job.dense, job.start]
    return [name for name in needed if name is not None and not folders.dense(name).exists()]


def status(jobs: Sequence[Job], folders: Folders) -> dict[str, list[str]]:
    """Names of finished jobs, of those that can run now, and of those that wait for a network or a plan."""
    ready = {j.name for j in pending(jobs, folders)}
    done = [j.name for j in jobs if folders.result(j.name).exists() and j.name not in ready]
    return {
        "done": done,
        "ready": [j.name for j in jobs if j.name in ready],
        "waiting": [j.name for j in jobs if j.name not in ready and j.name not in done],
    }


def select(jobs: Sequence[Job], target: str, pattern: str = "*", others: Sequence[str] = ()) -> list[Job]:
    """The jobs of a table or figure, by its name, with those whose networks they start from; "all" for every one.
    With a `pattern` such as `*-seed0`, those of them whose names match it. `others` are targets that are not of jobs,
    for who errs."""
    known = {t for j in jobs for t in j.targets}
    if target != "all" and target not in known:
        raise HapError(f"target is {target!r}; expected all or one of {', '.join(sorted({*known, *others}))}")
    chosen = [j for j in jobs if (target == "all" or target in j.targets) and fnmatch(j.name, pattern)]
    if not chosen:
        raise HapError(f"no run of {target} is named like {pattern!r}; hap reproduce {target} --status lists them")
    needed = {j.name for j in chosen}
    for job in reversed(jobs):  # what a job starts from comes before it
        needed |= {job.dense or "", job.start or ""} if job.name in needed else set()
    return [j for j in jobs if j.name in needed]


@functools.cache
def _dense_macs(model: str) -> int:
    info = hap.models.info(model)
    return hap.cost(hap.models.build(model).eval(), torch.zeros(1, *info.input_shape)).macs


def estimate(job: Job) -> float:
    """What a job costs, in epochs of a dense ResNet56: multiply-adds of the dense network, and of its teacher.

    A pruned network counts as a dense one: thin layers do not train faster in proportion. Networks with wider layers
    than ResNet56 use a GPU better and take less than this.
    """
    return job.recipe.epochs * (4 / 3 if job.teacher else 1) * _dense_macs(job.model) / _dense_macs("resnet56")

"""Jobs and what they left, put together over their seeds: what the page of results is made of."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hap_reproduction.cifar10.job import Job
from hap_reproduction.cifar10.jobs import LONG
from hap_reproduction.cifar10.starting import IMAGES, BorrowedStep, EigenStep
from hap_reproduction.files import read_record
from hap_reproduction.pages.zoo_manifest import RUN_AGAIN

Record = Mapping[str, Any]
CRITERIA = {
    "hessian": "HAP",
    "magnitude": "Magnitude",
    "random": "Random",
    "reversed-hessian": "Reversed HAP",
    "bn-scale": "BN scale (slimming)",
    "l1": "L1 norm",
    "gate-curvature": "Gate curvature",
}
NEEDED = {
    "sensitivity-layers": ("criterion", "layers", "flops"),
    "sensitivity-probes": ("probes", "images", "channels"),
    "sensitivity-shapes": ("images", "rows"),
    "sensitivity-images": ("rows",),
    "sensitivity-removal": ("name", "units", "images", "scored_on", "measured", "rows", "falls"),
    "sensitivity-one-shot": ("name", "scored_on", "rows"),
    "sensitivity-seconds": ("exact_seconds", "probe_seconds", "probes", "device", "hardware"),
    "implants-from-zero": ("rows",),
}
"""What the page reads of records that are not of a run, by how their names begin."""
PROTOCOLS = ("paper", "best", "short")
BORROWED = {"magnitude": "group magnitude", "taylor": "Taylor", "bn-scale": "BN scale"}


T_95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
    15: 2.131,
    20: 2.086,
    30: 2.042,
    60: 2.000,
    120: 1.980,
}
"""By degrees of freedom, how many standard errors to either side hold 95% of Student's t."""


@dataclass(frozen=True)
class Noise:
    """How much one seed's accuracy spreads: its standard deviation in points, and the degrees of freedom of that."""

    deviation: float
    freedom: int

    def margin(self, *seeds: int) -> float:
        """Half of the 95% interval of a mean over so many seeds, or of the difference of two. Degrees of freedom
        between those of the table count as the fewer."""
        return T_95[max(n for n in T_95 if n <= self.freedom)] * self.deviation * sum(1 / n for n in seeds) ** 0.5


@dataclass(frozen=True)
class Row:
    """One way to make a network. `records` holds a result per seed that has run, `jobs` all that are to run; `noise` is
    that of the pruned networks of its protocol, or of all where none of those has run with several seeds."""

    name: str
    label: str
    jobs: tuple[Job, ...]
    records: tuple[Record, ...]
    noise: Noise | None = None

    @property
    def job(self) -> Job:
        return self.jobs[0]

    @property
    def protocol(self) -> str:
        return self.name.split("-")[1]

    @property
    def accuracies(self) -> list[float]:
        """Per cent, after the last epoch."""
        return [100 * r["accuracy"] for r in self.records]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    def share(self, kind: str) -> float:
        """Per cent of params or macs left: the mean over seeds, whose plans differ a little."""
        return 100 * statistics.fmean(r.get(f"{kind}_left", 1.0) for r in self.records)

    @property
    def dense(self) -> float:
        """Mean accuracy of the dense networks that the seeds started from, per cent."""
        return 100 * statistics.fmean(r["dense_accuracy"] for r in self.records)

    @property
    def budget(self) -> tuple[str, float]:
        """What the job's budget is in, and per cent left."""
        for kind in ("flops", "params"):
            if (share := getattr(self.job.prune, kind, None)) is not None:
                return kind, round(100 * share, 2)
        return "flops", 100.0


def read_records(folder: Path) -> dict[str, Record]:
    """All result files of a folder by name."""
    return {path.stem: read_record(path, _needed(path.stem), RUN_AGAIN) for path in sorted(folder.glob("*.json"))}


def _needed(name: str) -> tuple[str, ...]:
    """What the page reads of a record of that name."""
    run = ("name", "accuracy", "params", "hardware", "history") if "-seed" in name else ()
    pruned = ("dense_accuracy",) if run and "-dense-" not in name else ()
    return next((keys for start, keys in NEEDED.items() if name.startswith(start)), (*run, *pruned))


def make_rows(jobs: Iterable[Job], records: Mapping[str, Record]) -> list[Row]:
    """A row for every job, its seeds together, in the order of the jobs."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.name.rpartition("-seed")[0], []).append(job)
    rows = [
        Row(name, label(members[0]), tuple(members), tuple(records[j.name] for j in members if j.name in records))
        for name, members in groups.items()
    ]
    pruned = [row for row in rows if row.job.prune is not None]
    own = {protocol: noise_of(row for row in pruned if row.protocol == protocol) for protocol in PROTOCOLS}
    every = noise_of(pruned)
    return [replace(row, noise=own.get(row.protocol) or every) for row in rows]


def label(job: Job) -> str:
    """The method in words."""
    step = job.prune
    if step is None:
        return "dense"
    if isinstance(step, EigenStep):
        return "EigenDamage"
    if isinstance(step, BorrowedStep):
        return f"Torch-Pruning, {BORROWED[step.criterion]}"
    if step.implant_kind == "LowRank":
        return "Low rank"
    name = CRITERIA[step.criterion] + (" + Implant" if step.implant else "")
    if step.implant_init == "zero":
        name += ", from zero"
    if step.per_cost and not job.teacher:  # all of protocol best ranks so
        name += ", per cost"
    if step.probes:
        name += f", {step.probes} probes"
    if job.teacher and job.recipe.epochs == LONG[2]:
        name += f", {job.recipe.epochs} epochs"
    if job.start is not None:
        name += ", in two steps"
    if job.images != IMAGES and not job.teacher:
        name += f", {job.images:,} images"
    return f"{name}, coupled" if step.coupling == "joint" and step.criterion == "hessian" else name


def noise_of(rows: Iterable[Row]) -> Noise | None:
    """The spread over seeds, pooled over the rows with several: their variances, weighted by degrees of freedom."""
    several = [row.accuracies for row in rows if len(row.records) > 1]
    freedom = sum(len(a) - 1 for a in several)
    if not freedom:
        return None
    return Noise((sum((len(a) - 1) * statistics.variance(a) for a in several) / freedom) ** 0.5, freedom)

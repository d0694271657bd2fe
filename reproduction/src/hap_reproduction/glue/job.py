"""What is run: a task, a criterion and a seed, with the settings of all runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hap
from hap.errors import HapError
from hap.scoring import Criterion
from hap_reproduction.glue.tuning import Tuning

KIND, FORMAT = "hap-glue", 1
BUDGETS = (0.8, 0.6, 0.5, 0.4)
ORDER = ("mrpc", "sst2", "rte", "qnli")
"""The most telling first: MRPC is the paper's; QNLI, the paper's other, comes last, since it may be a part of its
development set."""
MOST_STEPS = {"sst2": 1000}
"""Fine-tuning ends after so many steps, before and after pruning, on a task that is large."""
DIRECTIONS = 16
"""Of the Hessian, taken out of its noise by "hessian-deflated"."""


def criterion_of(name: str, seed: int = 0, probes: int = 2) -> Criterion:
    made: dict[str, Criterion] = {
        "hessian": hap.JointTrace("hutchinson", probes=probes, seed=seed),
        "hessian-deflated": hap.JointTrace("hutchinson", probes=probes, seed=seed, deflate=DIRECTIONS),
        "narrow": hap.JointTrace("hutchinson", probes=probes, seed=seed),
        "gauss-newton": hap.JointTrace("gauss-newton", seed=seed),
        "gradient": hap.GateGradient(),
        "gradient-raw": hap.GateGradient(per_layer=False),
        "magnitude": hap.Whole(hap.Magnitude()),
        "random": hap.Random(seed),
    }
    if name not in made:
        raise HapError(f"--criteria names {name!r}; expected some of {', '.join(made)}")
    return made[name]


CRITERIA = ("hessian", "gradient", "magnitude", "random")
IMPLANT = hap.NarrowHeads(ratio=0.5, rank=0.25)
"""With "narrow", the Hessian's ranking, half of the heads that would go keep a quarter of their width, at the same
FLOPs: of the choices in benchmarks/narrow_heads.py the one that stays nearest to the dense network at 60%."""
UNWRITTEN = {"implant": hap.NarrowHeads(ratio=0.5, rank=0.25).to_dict()}
"""Settings that files do not hold which are older than their being written down. It does not follow `IMPLANT`."""


@dataclass(frozen=True)
class Job:
    task: str
    criterion: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.criterion}-seed{self.seed}"


@dataclass(frozen=True)
class Settings:
    """How every job of a campaign is run: `dense` before pruning, `after` it. `score_batch` bounds the memory of
    scores, which are taken on `calibration` training examples."""

    dense: Tuning = field(default_factory=lambda: Tuning(epochs=5))
    after: Tuning = field(default_factory=lambda: Tuning(epochs=10))
    budgets: tuple[float, ...] = BUDGETS
    calibration: int = 256
    score_batch: int = 32
    probes: int = 50
    together: int = 4
    graphs: bool = True

    def tuning(self, which: str, job: Job) -> Tuning:
        chosen = self.dense if which == "dense" else self.after
        limits = [n for n in (chosen.most_steps, MOST_STEPS.get(job.task)) if n is not None]
        return replace(chosen, seed=job.seed, most_steps=min(limits, default=None))

    def of(self, job: Job) -> dict[str, Any]:
        """All that the figures of a job depend on, but for the model and the shares of the heads."""
        return {
            "tuning": {which: self.tuning(which, job).to_dict() for which in ("dense", "after")},
            "criterion": criterion_of(job.criterion, job.seed, self.probes).to_dict(),
            "calibration": self.calibration,
        } | ({"implant": IMPLANT.to_dict()} if job.criterion == "narrow" else {})


@dataclass(frozen=True)
class Folders:
    """`results`: a JSON file per finished job. `work`: dense networks, and budgets that are finished."""

    results: Path
    work: Path

    def result(self, job: Job) -> Path:
        return self.results / f"{job.name}.json"

    def dense(self, job: Job) -> Path:
        return self.work / f"{job.task}-dense-seed{job.seed}.safetensors"

    def part(self, job: Job) -> Path:
        return self.work / f"{job.name}.part.json"


def jobs(tasks: Iterable[str], criteria: Sequence[str], seeds: Iterable[int]) -> list[Job]:
    """Task by task; all criteria of a seed before the next seed, so that what is there can be compared."""
    for name in criteria:
        criterion_of(name)
    return [Job(t, c, s) for t in tasks for s in seeds for c in criteria]


def check_same(path: Path, seen: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to go on from a file that other settings made: its figures would be taken for those of these."""
    seen = UNWRITTEN | seen
    if off := [k for k in wanted if seen.get(k) != wanted[k]]:
        raise HapError(
            f"{path} was made with {off[0]} {seen.get(off[0])}; expected {wanted[off[0]]}. Give the settings that made "
            "it, or other folders with --out and --work"
        )


def status(chosen: Sequence[Job], folders: Folders) -> dict[str, list[str]]:
    done = [j.name for j in chosen if folders.result(j).exists()]
    return {"done": done, "left": [j.name for j in chosen if j.name not in done]}

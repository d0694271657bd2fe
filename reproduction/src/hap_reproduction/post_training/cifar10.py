"""ResNet56 pruned and not trained: test accuracy by criterion, budget, coupling and repair.

`python -m hap_reproduction.post_training.cifar10 --data data/cifar10 --others FILE` runs what has no record yet, in
the folder `results/post-training`; with `--choose` the accuracy is that of 5,000 training images that no step of the
pruning sees, which is what settings are chosen by.
"""

import copy
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import hap
from hap.data import Batch, Data, Split
from hap.execution.calling import eval_mode
from hap.refit import estimate_norms_
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.post_training.networks import Dense, dense_networks

BUDGETS = (0.5, 0.387, 0.29)
HELD = 5000


@dataclass(frozen=True)
class Setting:
    """How a network is pruned and repaired."""

    flops: float
    criterion: str = "reconstruction"
    per_cost: bool = True
    coupling: str = "union"
    repair: str = "refit"
    images: int = 2048
    rectified: int = 2
    rounds: int = 1
    minutes: float = 0.0
    hints: bool = True

    @property
    def slug(self) -> str:
        cost = "-per-cost" if self.per_cost else ""
        more = "" if self.rectified == 2 else f"-rectified-{self.rectified}"
        more += "" if self.rounds == 1 else f"-{self.rounds}-rounds"
        more += f"-{self.minutes:g}-minutes" if self.minutes else ""
        more += "" if self.hints else "-without-hints"
        return f"{self.criterion}{cost}-{self.coupling}-{self.repair}{more}-{self.images}-{100 * self.flops:.1f}"


def held_out(data: Data) -> Data:
    """The data with 5,000 training images, taken out of the training split, in place of the test images."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(9))
    parts = [Split(data.train.images[i], data.train.labels[i]) for i in (order[HELD:], order[:HELD])]
    return Data(parts[0], parts[1], data.classes, data.mean, data.std, data.name, data.pad, data.flip)


@dataclass(frozen=True)
class Reference:
    """A dense network, its data, and what it answers on the test split and on mixtures of its images."""

    model: nn.Module
    data: Data
    accuracy: float
    answers: Tensor
    mixed_answers: Tensor

    @classmethod
    def of(cls, dense: Dense, data: Data) -> "Reference":
        model, data = dense.load(data)
        answers = [answered(model, data, mixed) for mixed in (False, True)]
        return cls(model, data, hap.evaluate(model, data).accuracy, *answers)


@torch.no_grad()
def answered(model: nn.Module, data: Data, mixed: bool) -> Tensor:
    """Log-probabilities for the images of the test split, or for 0.6 of one image and 0.4 of another."""
    batches = (0.6 * x + 0.4 * x.flip(0) if mixed else x for x, _ in data.batches("test", 100))
    with eval_mode(model):
        return torch.cat([model(x).log_softmax(1) for x in batches])


def fidelity(model: nn.Module, reference: Reference) -> dict[str, float]:
    """How near the model's answers are to the dense model's, on the test split and on mixtures of its images.

    `divergence` is the mean Kullback-Leibler divergence in nats per image, `agreement` the share of equal answers. On
    images that a network was trained on, a dense network is all but certain, so that nearly anything agrees with it;
    on `mixed` ones it is not.
    """
    found = {}
    for prefix, theirs in (("", reference.answers), ("mixed_", reference.mixed_answers)):
        ours = answered(model, reference.data, bool(prefix))
        found[f"{prefix}divergence"] = float(F.kl_div(ours, theirs, reduction="batchmean", log_target=True))
        found[f"{prefix}agreement"] = float((ours.argmax(1) == theirs.argmax(1)).double().mean())
    return found


def measure(name: str, reference: Reference, setting: Setting) -> dict[str, Any]:
    """Prune one network, repair it, and count right answers."""
    model, original, data = copy.deepcopy(reference.model), reference.model, reference.data
    batches = data.calibration(setting.images)
    seconds = {}
    begun = time.perf_counter()
    how: dict[str, Any] = {"criterion": setting.criterion, "per_cost": setting.per_cost, "coupling": setting.coupling}
    how["flops"] = setting.flops
    if setting.rounds > 1:
        how |= {"rounds": setting.rounds, "repair": setting.repair}
        plan, repaired = hap.prune_(model, batches[0][0][:2], batches, F.cross_entropy, **how), {}
    else:
        plan = hap.prune_(model, batches[0][0][:2], _scored(batches), F.cross_entropy, **how)
        seconds["prune"] = time.perf_counter() - begun
        begun = time.perf_counter()
        repaired = _repair_(model, original, data, batches, plan, setting)
    seconds["repair"] = time.perf_counter() - begun
    after = hap.evaluate(model, data)
    return {
        "kind": "hap-post-training",
        "format": 1,
        "network": name,
        "setting": asdict(setting),
        "dense": reference.accuracy,
        "accuracy": after.accuracy,
        "drop": reference.accuracy - after.accuracy,
        **fidelity(model, reference),
        "flops_left": plan.after.macs / plan.before.macs,
        "params_left": plan.after.params / plan.before.params,
        "examples": after.count,
        "seconds": seconds,
        **repaired,
        **provenance(),
    }


def _scored(batches: list[Batch]) -> list[Batch]:
    """As many of the images as scores of the paper are taken on."""
    return list(itertools.islice(batches, 4))


def _repair_(
    model: nn.Module, dense: nn.Module, data: Data, batches: list[Batch], plan: hap.Plan, setting: Setting
) -> dict[str, Any]:
    if setting.repair in ("refit", "distil"):
        report = hap.refit_(model, dense, batches, plan, rectified=setting.rectified, progress=False)
        found: dict[str, Any] = {"output_error": {"before": report.before, "after": report.after}}
        if setting.repair == "distil":
            how: dict[str, Any] = {"augment": data.augment, "hints": setting.hints, "progress": False}
            more = hap.distil_(model, dense, batches, setting.minutes, **how)
            found["distilled"] = asdict(more)
        return found
    if setting.repair == "norms":
        estimate_norms_(model, batches)
    elif setting.repair == "compensate":
        compensated = hap.compensate_(copy.deepcopy(dense), plan, batches)
        model.load_state_dict(hap.apply_(compensated, plan, batches[0][0][:2]).state_dict())
        estimate_norms_(model, batches)
    return {}


def settings(choose: bool) -> Iterator[Setting]:
    """What is measured, the most telling first."""
    if choose:
        criteria = ("reconstruction", "magnitude", "gate-curvature", "hessian", "bn-scale", "taylor", "random")
        for per_cost, flops, criterion in itertools.product((True, False), BUDGETS, criteria):
            yield Setting(flops, criterion, per_cost, images=1024)
        for hints, flops in itertools.product((True, False), BUDGETS):
            yield Setting(flops, repair="distil", minutes=5, hints=hints)
        return
    for flops in BUDGETS:
        yield Setting(flops)
    for flops in BUDGETS:
        yield Setting(flops, repair="distil", minutes=5)
    for flops in BUDGETS:
        yield Setting(flops, repair="distil", minutes=5, hints=False)
    for repair, flops in itertools.product(("none", "norms", "compensate"), BUDGETS):
        yield Setting(flops, repair=repair)
    for flops in BUDGETS:
        yield Setting(flops, criterion="magnitude")
        yield Setting(flops, coupling="joint")
        yield Setting(flops, rectified=0)
        yield Setting(flops, rounds=3)


def main(
    data: Annotated[str, typer.Option(help="The folder of CIFAR-10.")] = "data/cifar10",
    others: Annotated[Path | None, typer.Option(help="The ResNet56 that others trained, safetensors.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of records.")] = Path("results/post-training"),
    choose: Annotated[bool, typer.Option(help="Measure on training images held out, to choose by.")] = False,
    only: Annotated[str, typer.Option(help="Networks whose name has this in it.")] = "",
    match: Annotated[str, typer.Option(help="Settings whose name has this in it.")] = "",
) -> None:
    """Prune, repair and evaluate whatever has no record yet."""
    found = hap.data.load("cifar10", data)
    found = held_out(found) if choose else found
    folder = out / "choosing" if choose else out
    known: dict[str, Reference] = {}
    for setting, dense in itertools.product(settings(choose), dense_networks(Path.cwd(), others)):
        path = folder / f"resnet56-{dense.name}-{setting.slug}.json"
        if only in dense.name and match in setting.slug and not path.exists():
            reference = known[dense.name] = known.get(dense.name) or Reference.of(dense, found)
            record = measure(dense.name, reference, setting)
            write_json(path, record)
            print(f"{path.stem}: {100 * record['dense']:.2f} -> {100 * record['accuracy']:.2f}", flush=True)


if __name__ == "__main__":
    typer.run(main)

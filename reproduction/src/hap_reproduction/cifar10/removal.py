"""What scores are worth before any fine-tuning: beside the loss without each single unit, and in pruned networks."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import hap
from hap.data import Batch, Data
from hap.groups.groups import Groups
from hap.planning.budget import Budget
from hap.scoring.gates import Gate, gated, gates_of
from hap.workflow.networks import first_images
from hap.workflow.steps import calibration
from hap_reproduction.cifar10.starting import IMAGES

AT_ONCE = 128
CRITERIA = (
    "gate-curvature",
    "hessian",
    "magnitude",
    "l1",
    "taylor",
    "fisher",
    "bn-scale",
    "geometric-median",
    "random",
)
IN_LOSS = ("gate-curvature", "hessian")
"""Criteria that say how far the loss rises, not only which unit goes first."""
PRUNED_BY = ("gate-curvature", "hessian", "magnitude", "random")
FLOPS = (0.7, 0.5, 0.3874)


# ---- one unit at a time -------------------------------------------------------------------------------------


def removal_record(model: nn.Module, data: Data, images: int) -> dict[str, Any]:
    """Scores on some training images beside what the loss on another draw of them rises by when a unit goes."""
    scored = calibration(data, model, IMAGES, 0)
    groups = hap.trace(model, first_images(data).to(scored[0][0].device), "union")
    scores = {name: hap.score(model, groups, scored, F.cross_entropy, name) for name in CRITERIA}
    judged = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in calibration(data, model, images, 1)]
    rises = dict(zip(("given", "own"), loss_rises(model, groups, judged), strict=True))
    stages = {n: n.partition(".")[0] for n in groups}
    rows = []
    for name, values in scores.items():
        row: dict[str, Any] = {"criterion": name}
        for labels, found in rises.items():
            within = [rank_correlation({n: values[n]}, {n: found[n]}) for n in groups if len(groups[n]) > 1]
            row[labels] = {"all": rank_correlation(values, found), "within_layers": sum(within) / len(within)}
        rows.append(row | ({"predicted": _by_stage(values, stages)} if name in IN_LOSS else {}))
    return {
        "kind": "hap-removal",
        "format": 1,
        "scored_on": _count(scored),
        "images": _count(judged),
        "units": groups.units,
        "measured": {labels: _by_stage(found, stages) for labels, found in rises.items()},
        "rows": rows,
        "rises": {labels: {n: v.tolist() for n, v in found.items()} for labels, found in rises.items()},
        "falls": float((torch.cat(list(rises["given"].values())) < 0).double().mean()),
    }


def rank_correlation(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Spearman's, over the units of all groups."""
    ranks = [torch.cat(list(scores.values())).argsort().argsort().double() for scores in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _by_stage(values: Mapping[str, Tensor], stages: Mapping[str, str]) -> dict[str, float]:
    """The sum over the units of each stage."""
    return {
        stage: sum(float(v.sum()) for n, v in values.items() if stages[n] == stage)
        for stage in dict.fromkeys(stages.values())
    }


def _count(batches: Sequence[Batch]) -> int:
    return sum(len(y) for _, y in batches)


Rises = dict[str, Tensor]


@torch.no_grad()
def loss_rises(model: nn.Module, groups: Groups, batches: Sequence[Batch]) -> tuple[Rises, Rises]:
    """By how much the mean cross-entropy rises when a unit goes, alone, for every unit of every group: with the labels
    given, and with labels as the whole model sees them, in its own probabilities. The second is never a fall: it is the
    Kullback-Leibler divergence from the model's outputs, and its Hessian there is the Gauss-Newton matrix.

    What runs before a unit is computed once for all units of its group, as far as the model is a chain of modules.
    """
    gates = gates_of(model, groups)
    rises = {name: torch.zeros(len(group), 2, dtype=torch.float64) for name, group in groups.items()}
    for x, y in ((x, y) for xs, ys in batches for x, y in zip(xs.split(AT_ONCE), ys.split(AT_ONCE), strict=True)):
        with _noting(model) as outputs:
            logits = model(x).double()
        labels = (y, logits.softmax(1))
        whole = _losses(logits, labels)
        for name, values in rises.items():
            own = {module: mine for module, some in gates.items() if (mine := [g for g in some if g.group == name])}
            with _resumed(model, outputs, list(own)):
                for unit in range(len(values)):
                    with gated(model, own, partial(_without, unit)):
                        values[unit] += _losses(model(x).double(), labels) - whole
    by_labels = [{n: v[:, i] / _count(batches) for n, v in rises.items()} for i in range(2)]
    return by_labels[0], by_labels[1]


def _losses(logits: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
    """The cross-entropy for each of these labels, summed over the samples."""
    return torch.stack([F.cross_entropy(logits, y, reduction="sum") for y in labels]).cpu()


def _chain(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that a model may call one after the other: its children, and those of its sequences."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        parts = {f"{name}.{n}": part for n, part in child.named_children()} if isinstance(child, nn.Sequential) else {}
        found |= parts or {name: child}
    return found


@contextmanager
def _noting(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What the modules of the chain return, in the order of their calls; nothing if one is called twice, or if what it
    returns is written to later."""
    outputs: dict[str, Tensor] = {}
    versions: dict[str, int] = {}
    twice: list[str] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            twice.extend([name] if name in outputs else [])
            outputs[name], versions[name] = output, output._version

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in _chain(model).items()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
        if twice or any(outputs[name]._version != version for name, version in versions.items()):
            outputs.clear()


@contextmanager
def _resumed(model: nn.Module, outputs: Mapping[str, Tensor], places: Sequence[str]) -> Iterator[None]:
    """Inside, modules of the chain that ran before the first of these places hand on what they returned before."""
    chain, before = _chain(model), []
    for name in outputs:
        if any(place == name or place.startswith(f"{name}.") for place in places):
            break
        before.append(name)
    try:
        for name in before:
            chain[name].forward = lambda *args, output=outputs[name], **kwargs: output
        yield
    finally:
        for name in before:
            del chain[name].forward


def _without(unit: int, gate: Gate, value: Tensor) -> Tensor:
    """What passes a gate once a unit is gone."""
    keep = torch.from_numpy(gate.unit.unit != unit).to(value)
    shape = [1] * value.ndim
    shape[gate.axis] = -1
    return value * keep.repeat(value.shape[gate.axis] // len(keep)).view(shape)


# ---- whole plans --------------------------------------------------------------------------------------------


def one_shot_record(model: nn.Module, data: Data) -> dict[str, Any]:
    """Test accuracy of networks pruned by several criteria and not trained since: as they are, and once their
    BatchNorms have seen training images again."""
    batches, example = calibration(data, model, IMAGES, 0), first_images(data).to(next(model.parameters()).device)
    groups = hap.trace(model, example, "union")
    rows = []
    for criterion in PRUNED_BY:
        scores = hap.score(model, groups, batches, F.cross_entropy, criterion)
        for per_cost in (False, True):
            for flops in FLOPS:
                plan = hap.plan(groups, scores, Budget(flops=flops), per_cost=per_cost)
                pruned = hap.apply_(copy.deepcopy(model), plan, example)
                as_it_is = hap.evaluate(pruned, data).accuracy
                _estimate_again_(pruned, batches)
                rows.append(
                    {
                        "criterion": criterion,
                        "per_cost": per_cost,
                        "flops": flops,
                        "params": plan.after.params / plan.before.params,
                        "accuracy": as_it_is,
                        "estimated_again": hap.evaluate(pruned, data).accuracy,
                    }
                )
    return {
        "kind": "hap-one-shot",
        "format": 1,
        "scored_on": _count(batches),
        "tested_on": len(data.test),
        "rows": rows,
    }


@torch.no_grad()
def _estimate_again_(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Means and variances of all BatchNorms from these images, as averages over parts of them."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over all calls
    model.train()
    for x, _ in batches:
        for part in x.split(AT_ONCE):
            model(part)
    model.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum

"""hap score, hap prune."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.cli import options
from hap.cli.options import check_out, check_saved_name, open_with_data
from hap.cli.screen import error_line, plan_table, say, share, table, tell_written, working
from hap.cli.screen import out as screen
from hap.errors import HapError
from hap.groups.groups import Groups
from hap.planning.budget import Budget
from hap.planning.plan import Plan
from hap.pruning.plan_for_drop import Tolerance, check_alone, plan_for_drop
from hap.pruning.prune_in_rounds import Choice
from hap.scoring import Scores
from hap.utils import distributed
from hap.utils.atomic_files import write_json
from hap.workflow.config import PruneStep
from hap.workflow.networks import checkpoint_path, describe_network, first_images, metrics_of
from hap.workflow.results import read_json
from hap.workflow.run import short_digest
from hap.workflow.steps import Work, note_if_fewer_images

KIND = "hap-scores"
EVALUATED = 2000
"""Training images, beside those that networks are scored and repaired on, that say what accuracy is lost."""


def score(
    checkpoint: options.Saved,
    data: options.DataSpec = None,
    criterion: options.Criterion = "hessian",
    coupling: options.Coupling = "joint",
    stream: options.Stream = False,
    probes: options.Probes = None,
    out: options.OutScores = None,
    calibration: options.Calibration = 512,
    model: options.Model = None,
    data_root: options.DataRoot = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    seed: options.Seed = 0,
) -> None:
    """Say how sensitive the loss is to each channel.

    \b
    Examples:
      hap score runs/dense.safetensors --criterion hessian --out runs/scores.json
      hap score runs/dense.safetensors --probes 300 --coupling union
    """
    step = PruneStep("score", criterion, params=1.0, coupling=coupling, probes=probes)
    if out is not None:
        check_out(out, checkpoint)
    network, _, _, found = open_with_data(checkpoint, model, device, data, data_root, image_size)
    _warn(note_if_fewer_images(found, calibration))
    with working("scoring") as tell:
        _, scores = Work(network, found, step, calibration, seed, tell, stream).score()
    screen().print(_score_table(scores, criterion))
    if out is not None:
        record = {
            "kind": KIND,
            "format": 1,
            "checkpoint": short_digest(checkpoint),
            "coupling": coupling,
            "stream": stream,
            "data": found.name,
            "criterion": step.make_criterion(seed).to_dict(),
            "about": scores.about,
            "scores": {n: v.tolist() for n, v in scores.items()},
            "errors": {n: v.tolist() for n, v in scores.errors.items()},
        }
        write_json(out, record)
        tell_written(out)


def _score_table(scores: Scores, criterion: str) -> Any:
    rows = []
    for name, values in scores.items():
        cells = [f"{float(v):.3g}" for v in (values.min(), values.median(), values.max())]
        error = [f"{float(scores.errors[name].median()):.2g}"] if scores.errors else []
        rows.append([name, str(len(values)), *cells, *error])
    head = ["layer", "units", "min", "median", "max", *(["standard error"] if scores.errors else [])]
    how = ", ".join(str(v) for v in scores.about.values())
    return table(head, rows, title=f"sensitivity by {criterion}{f' ({how})' if how else ''}")


def prune(
    checkpoint: options.Saved,
    out: options.OutCheckpoint,
    data: options.DataSpec = None,
    params: options.Params = None,
    flops: options.Flops = None,
    channels: options.Channels = None,
    activations: options.Activations = None,
    latency: options.Latency = None,
    max_drop: options.MaxDrop = None,
    backend: options.Backend = "eager",
    threads: options.Threads = None,
    batch: options.TimedBatch = 1,
    implant: options.ImplantShare = 0.0,
    implant_kind: options.ImplantKind = "Pointwise",
    implant_init: options.ImplantInit = None,
    criterion: options.Criterion = "hessian",
    coupling: options.Coupling = "joint",
    stream: options.Stream = False,
    probes: options.Probes = None,
    scores: options.ScoresFile = None,
    per_layer: options.PerLayer = 0.95,
    round_to: options.RoundTo = 1,
    leave: options.Leave = None,
    per_cost: options.PerCost = False,
    compensate: options.Compensate = False,
    repair: options.Repair = None,
    minutes: options.Minutes = None,
    calibration: options.Calibration = 512,
    model: options.Model = None,
    data_root: options.DataRoot = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    seed: options.Seed = 0,
) -> None:
    """Prune a trained network to a budget.

    \b
    Examples:
      hap prune runs/dense.safetensors --params 0.3 --implant 0.2 \\
          --out runs/pruned.safetensors
      hap prune runs/dense.safetensors --flops 0.5 --criterion magnitude \\
          --per-cost --coupling union --minutes 5 --out runs/half.safetensors
      hap prune runs/dense.safetensors --latency 0.5 --out runs/fast.safetensors
      hap prune runs/dense.safetensors --max-drop 1 --out runs/nearly.safetensors
    """
    given = {**locals(), "name": "prune", "leave": leave or ()}  # the options of this command, by name
    asked = {"params": params, "flops": flops, "channels": channels, "latency": latency, "activations": activations}
    searched = _searched(asked, max_drop, scores, {"batch": batch, "backend": backend, "threads": threads})
    given |= {"channels": 1.0, "repair": repair or ("refit" if max_drop else None)} if searched else {}
    step = PruneStep(**{field.name: given[field.name] for field in dataclasses.fields(PruneStep)})
    check_saved_name(out, checkpoint, scores)
    _check_dense(checkpoint)
    network, _, spec, found = open_with_data(checkpoint, model, device, data, data_root, image_size)
    work = Work(network, found, step, calibration, seed, stream=stream)
    plan, metrics, found_out = _prune(work, scores, checkpoint, searched)
    settings = {**dataclasses.asdict(step), "channels": channels, "stream": stream, **found_out}
    described = describe_network(spec, found) | {"prune": settings, "pruned_from": checkpoint.name}
    hap.save(out, network, plan, metrics=metrics, about=described)
    tell_written(out)


def _searched(
    asked: dict[str, float | None], max_drop: float | None, scores: Path | None, timed: dict[str, Any]
) -> dict[str, Any]:
    """What is met by trying, beside the budget of a step: a tolerated drop, or a budget of time and how to time."""
    if max_drop is not None:
        check_alone({"max_drop": max_drop, **asked})
        if scores is not None:
            raise HapError(
                "--max-drop measures on images that no score has seen, and a file of scores does not say "
                "which it has seen; leave out --scores"
            )
        return {"max_drop": max_drop}
    budget = hap.Budget(**asked)
    if budget.latency is None:
        return {}
    if distributed.processes() > 1:
        raise HapError("--latency is measured by one process; start hap prune without torchrun")
    return {"budget": budget, **timed}


def _check_dense(checkpoint: Path) -> None:
    if hap.read(checkpoint_path(checkpoint)).plan is not None:
        raise HapError(f"{checkpoint} is pruned already; prune the dense checkpoint again with a smaller budget")


def _prune(
    work: Work, scores: Path | None, checkpoint: Path, searched: Mapping[str, Any]
) -> tuple[Plan, dict[str, Any], dict[str, Any]]:
    """Prune in place and show it. `searched`: what is met by trying, time or accuracy.

    Returns the plan, metrics after and before, and how time or accuracy was measured."""
    _warn(note_if_fewer_images(work.data, work.images))
    before = {key: value for key, value in metrics_of(work.model, work.data).items() if key != "loss"}
    with working("pruning") as tell:
        work = dataclasses.replace(work, say=tell)
        known = work.score() if scores is None else _read_scores(scores, work, checkpoint)
        search = _prune_to_drop if "max_drop" in searched else _prune_to_time
        plan, timing = search(work, *known, **searched) if searched else (work.prune(*known), {})
    after = metrics_of(work.model, work.data)
    _show(plan, before, after, timing)
    return plan, {**after, "dense": before}, timing


def _prune_to_time(
    work: Work, groups: Groups, scores: Scores, budget: Budget, batch: int, **how: Any
) -> tuple[Plan, dict[str, Any]]:
    """Prune to a share of the dense network's time, in place. Returns the plan, and what was timed and how."""
    work.say("pruning copies and timing them")
    images, step = first_images(work.data, batch, work.model), work.step
    bounds = budget, step.make_implant(), step.limits()
    made = hap.plan_for_latency(work.model, groups, scores, images, *bounds, per_cost=step.per_cost, **how)
    work.apply(made.plan)
    timing = {name: getattr(made, name) for name in ("ratio", "round_to", "backend", "threads", "device")}
    return made.plan, {"latency": budget.latency, **timing, "batch": batch}


def _prune_to_drop(work: Work, groups: Groups, scores: Scores, max_drop: float) -> tuple[Plan, dict[str, Any]]:
    """Prune until at most so many points of accuracy are lost, in place. Returns the plan, and what was asked for."""
    work.say("pruning copies and seeing what they get right")
    images, step = first_images(work.data, near=work.model), work.step
    held = work.held_out(EVALUATED)

    def right(model: nn.Module) -> Tensor:
        return torch.cat([100.0 * (model(x).argmax(1) == y) for x, y in held])

    how = step.make_criterion(work.seed), step.make_implant(), step.limits(), step.per_cost
    choice = Choice(work.model, groups, images, work.batches(), F.cross_entropy, *how, known=scores)
    allowed = Tolerance("max_drop", max_drop, right)
    plan, network = plan_for_drop(choice, allowed, repair=step.repair_name)
    work.apply(plan, network)
    return plan, {"max_drop": max_drop, "evaluated": sum(len(y) for _, y in held)}


def _read_scores(path: Path, work: Work, checkpoint: Path) -> tuple[Groups, Scores]:
    """Trace, and read the scores that `hap score` wrote for this checkpoint."""
    if not path.is_file():
        raise HapError(f"there is no file {path}")
    found = read_json(path)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise HapError(f"{path} holds no scores; make them with hap score --out {path}")
    if found["checkpoint"] != short_digest(checkpoint):
        raise HapError(f"{path} holds the scores of another checkpoint than {checkpoint}; score this one")
    if found["coupling"] != work.step.coupling:
        raise HapError(f"{path} was scored with --coupling {found['coupling']}; give that, or score again")
    if (scored := found.get("stream", False)) != work.stream:
        raise HapError(f"{path} was scored {'with' if scored else 'without'} --stream; do the same, or score again")
    if found["criterion"]["name"] != work.step.make_criterion().to_dict()["name"]:
        raise HapError(f"{path} was scored by {found['criterion']['name']}; give that as --criterion, or score again")
    return work.trace(), Scores({n: torch.tensor(v, dtype=torch.float64) for n, v in found["scores"].items()})


def _warn(text: str | None) -> None:
    if text is not None:
        error_line(f"note: {text}")


def _show(plan: Plan, before: dict[str, Any], after: dict[str, Any], timing: dict[str, Any]) -> None:
    screen().print(plan_table(plan))
    accuracy = before["accuracy"], after["accuracy"]
    rows = [["accuracy", *(f"{value:.2%}" for value in accuracy), f"{100 * (accuracy[1] - accuracy[0]):+.2f}"]]
    for label, key in (("params", "params"), ("FLOPs", "macs")):
        rows.append([label, f"{before[key]:,}", f"{after[key]:,}", share(after[key], before[key])])
    screen().print(table(["", "dense", "pruned", "left"], rows))
    say("FLOPs are multiply-adds of one image. Accuracy is before fine-tuning; hap finetune brings it back.")
    if plan.untouched:
        say(f"{plan.untouched}.")
    if plan.curve:
        rows = [[f"{t.flops:.1%}", f"{t.drop:.2f}", f"{t.bound:.2f}", "yes" if t.within else "no"] for t in plan.curve]
        screen().print(table(["FLOPs left", "points lost", "at most", "tolerated"], rows, title="what was tried"))
        say("Points lost are those of training images that nothing else was taken from; at most: with 95% confidence.")
    if "ratio" in timing:
        say(
            "Time left: {ratio:.1%} of the dense network's, measured with {backend}, {threads} threads, {batch} images "
            "a call, on {device}; widths are multiples of {round_to}.".format(**timing)
        )

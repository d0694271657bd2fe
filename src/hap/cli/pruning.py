"""hap score, hap prune."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import hap
from hap.cli.options import (
    Backend,
    Calibration,
    Coupling,
    Criterion,
    DataRoot,
    DataSpec,
    Device,
    ImageSize,
    Model,
    Probes,
    Saved,
    Seed,
    Stream,
    Threads,
    check_not_input,
    check_out,
    check_saved_name,
    data_for,
    opened,
)
from hap.cli.screen import error_line, percent, plan_table, say, share, table, working, wrote
from hap.cli.screen import out as screen
from hap.data import Data
from hap.errors import HapError
from hap.groups.groups import Groups
from hap.planning.cost import Count
from hap.planning.plan import Plan
from hap.pruning.plan_for_latency import TimedPlan
from hap.scoring import Scores
from hap.utils import distributed
from hap.utils.atomic_files import write_json
from hap.workflow.config import PruneStep
from hap.workflow.networks import about, example_of
from hap.workflow.results import read_json
from hap.workflow.run import digest
from hap.workflow.steps import carry_out, fewer, prune_step, score_step

KIND = "hap-scores"


def score(
    checkpoint: Saved,
    data: DataSpec = None,
    criterion: Criterion = "hessian",
    coupling: Coupling = "joint",
    stream: Stream = False,
    probes: Probes = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the scores, which hap prune can read.")] = None,
    calibration: Calibration = 512,
    model: Model = None,
    data_root: DataRoot = None,
    image_size: ImageSize = None,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Say how sensitive the loss is to each channel.

    \b
    Examples:
      hap score runs/dense.safetensors --criterion hessian --out runs/scores.json
      hap score runs/dense.safetensors --probes 300 --coupling union
    """
    step = PruneStep("score", criterion, params=1.0, coupling=coupling, probes=probes)
    if out is not None:
        check_not_input(out, checkpoint)
        check_out(out)
    network, saved, spec = opened(checkpoint, model, device)
    found = data_for(checkpoint, network, saved, spec, data, data_root, image_size)
    _warn(fewer(found, calibration))
    with working("scoring") as tell:
        _, scores = score_step(network, found, step, calibration, seed, tell, stream=stream)
    screen().print(_score_table(scores, criterion))
    if out is not None:
        record = {
            "kind": KIND, "format": 1, "checkpoint": digest(checkpoint), "coupling": coupling, "stream": stream,
            "data": found.name,
            "criterion": step.make_criterion(seed).to_dict(), "about": scores.about,
            "scores": {n: v.tolist() for n, v in scores.items()},
            "errors": {n: v.tolist() for n, v in scores.errors.items()},
        }  # fmt: skip
        write_json(out, record)
        wrote(out)


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
    checkpoint: Saved,
    out: Annotated[Path, typer.Option(help="The checkpoint to write (.safetensors).")],
    data: DataSpec = None,
    params: Annotated[float | None, typer.Option(help="Share of the parameters that is LEFT.")] = None,
    flops: Annotated[float | None, typer.Option(help="Share of the multiply-adds that is LEFT.")] = None,
    channels: Annotated[float | None, typer.Option(help="Share of the channels that is LEFT.")] = None,
    activations: Annotated[float | None, typer.Option(help="Share of what layers write that is LEFT.")] = None,
    latency: Annotated[float | None, typer.Option(help="Share of the measured time that is LEFT.")] = None,
    backend: Backend = "eager",
    threads: Threads = None,
    batch: Annotated[int, typer.Option(min=1, help="Images of a timed call, with --latency.")] = 1,
    implant: Annotated[float, typer.Option(help="Share of the removed k x k channels to replace by implants.")] = 0.0,
    implant_kind: Annotated[
        str, typer.Option(help="Pointwise (the paper's), LowRank, DepthwiseSeparable, SpatialLowRank.")
    ] = "Pointwise",
    implant_init: Annotated[str | None, typer.Option(help="Start values: lstsq, center or zero.")] = None,
    criterion: Criterion = "hessian",
    coupling: Coupling = "joint",
    stream: Stream = False,
    probes: Probes = None,
    scores: Annotated[
        Path | None, typer.Option(help="Scores of this checkpoint that hap score wrote, instead of scoring again.")
    ] = None,
    per_layer: Annotated[float, typer.Option(help="At most this share of a layer goes.")] = 0.95,
    round_to: Annotated[int, typer.Option(help="Layers keep a multiple of this many units.")] = 1,
    leave: Annotated[
        list[str] | None, typer.Option(help="Layers not to touch: a name or a pattern. Repeatable.")
    ] = None,
    per_cost: Annotated[bool, typer.Option("--per-cost", help="Rank by sensitivity per cost saved.")] = False,
    compensate: Annotated[
        bool, typer.Option("--compensate", help="Repair what reads the removed units by least squares.")
    ] = False,
    calibration: Calibration = 512,
    model: Model = None,
    data_root: DataRoot = None,
    image_size: ImageSize = None,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Prune a trained network to a budget.

    \b
    Examples:
      hap prune runs/dense.safetensors --params 0.3 --implant 0.2 \\
          --out runs/pruned.safetensors
      hap prune runs/dense.safetensors --flops 0.5 --criterion magnitude \\
          --coupling union --out runs/half.safetensors
      hap prune runs/dense.safetensors --latency 0.5 --backend onnxruntime \\
          --threads 1 --device cpu --out runs/fast.safetensors
    """
    if latency is not None and distributed.processes() > 1:
        raise HapError("--latency is measured by one process; start hap prune without torchrun")
    budget = hap.Budget(params, flops, channels, latency, activations)
    left = 1.0 if latency is not None else channels  # a step has a budget of its own; that of time is met here
    step = PruneStep("prune", criterion, params, flops, left, implant, implant_kind, implant_init, coupling, probes,
                     per_layer, round_to, tuple(leave or ()), per_cost, compensate, activations)  # fmt: skip
    check_saved_name(out, checkpoint, scores)
    network, saved, spec = opened(checkpoint, model, device)
    if saved.plan is not None:
        raise HapError(f"{checkpoint} is pruned already; prune the dense checkpoint again with a smaller budget")
    found = data_for(checkpoint, network, saved, spec, data, data_root, image_size)
    _warn(fewer(found, calibration))
    before, cost_before = hap.evaluate(network, found), _cost(network, found)
    with working("pruning") as tell:
        groups, values = _scores(network, found, step, scores, checkpoint, calibration, seed, tell, stream)
        if latency is None:
            timing, plan = {}, prune_step(network, found, step, groups, values, calibration, seed, tell)
        else:
            tell("pruning copies and timing them")
            images = example_of(found, batch).to(next(iter(network.parameters())).device)

            def timed() -> str:
                made = hap.plan_for_latency(network, groups, values, images, budget, step.make_implant(), step.limits(),
                                            per_cost=per_cost, backend=backend, threads=threads)  # fmt: skip
                return json.dumps({"plan": made.plan.to_dict(), "timing": _timing(made, latency, batch)})

            answer = json.loads(distributed.from_first(timed))  # each process would measure something else
            plan, timing = Plan.from_dict(answer["plan"]), answer["timing"]
            carry_out(network, found, step, plan, calibration, seed, tell)
    after, cost_after = hap.evaluate(network, found), _cost(network, found)
    _show(plan, (before.accuracy, after.accuracy), (cost_before, cost_after))
    if timing:
        say("Time left: {ratio:.1%} of the dense network's, measured with {backend}, {threads} threads, {batch} images "
            "a call, on {device}; widths are multiples of {round_to}.".format(**timing))  # fmt: skip
    dense = {"accuracy": before.accuracy, "params": cost_before.params, "macs": cost_before.macs}
    metrics = {"accuracy": after.accuracy, "loss": after.loss, "params": cost_after.params, "macs": cost_after.macs}
    settings = {**dataclasses.asdict(step), "channels": channels, "stream": stream, **timing}
    described = {**about(spec, found), "prune": settings, "pruned_from": checkpoint.name}
    hap.save(out, network, plan, metrics={**metrics, "dense": dense}, about=described)
    wrote(out)


def _timing(timed: TimedPlan, latency: float, batch: int) -> dict[str, Any]:
    """What was timed, how, and what came out: for the checkpoint and for the screen."""
    how = {"backend": timed.backend, "threads": timed.threads, "device": timed.device, "batch": batch}
    return {"latency": latency, "ratio": timed.ratio, "round_to": timed.round_to, **how}


def _warn(text: str | None) -> None:
    if text is not None:
        error_line(f"note: {text}")


def _cost(network: nn.Module, data: Data) -> Count:
    return hap.cost(network, example_of(data).to(next(iter(network.parameters())).device))


def _scores(network: nn.Module, data: Data, step: PruneStep, path: Path | None, checkpoint: Path, count: int, seed: int,
            tell: Any, stream: bool) -> tuple[Groups, Scores]:  # fmt: skip
    if path is None:
        return score_step(network, data, step, count, seed, tell, stream=stream)
    if not path.is_file():
        raise HapError(f"there is no file {path}")
    found = read_json(path)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise HapError(f"{path} holds no scores; make them with hap score --out {path}")
    if found["checkpoint"] != digest(checkpoint):
        raise HapError(f"{path} holds the scores of another checkpoint than {checkpoint}; score this one")
    if found["coupling"] != step.coupling:
        raise HapError(f"{path} was scored with --coupling {found['coupling']}; give that, or score again")
    if (scored := found.get("stream", False)) != stream:
        raise HapError(f"{path} was scored {'with' if scored else 'without'} --stream; do the same, or score again")
    if found["criterion"]["name"] != step.make_criterion().to_dict()["name"]:
        raise HapError(f"{path} was scored by {found['criterion']['name']}; give that as --criterion, or score again")
    example = example_of(data).to(next(iter(network.parameters())).device)
    groups = hap.trace(network, example, step.coupling, stream=stream)
    return groups, Scores({n: torch.tensor(v, dtype=torch.float64) for n, v in found["scores"].items()})


def _show(plan: Plan, accuracy: tuple[float, float], count: tuple[Count, Count]) -> None:
    screen().print(plan_table(plan))
    rows = [
        ["accuracy", *map(percent, accuracy), f"{100 * (accuracy[1] - accuracy[0]):+.2f}"],
        ["params", *(f"{c.params:,}" for c in count), share(count[1].params, count[0].params)],
        ["FLOPs", *(f"{c.macs:,}" for c in count), share(count[1].macs, count[0].macs)],
    ]
    screen().print(table(["", "dense", "pruned", "left"], rows))
    say("FLOPs are multiply-adds of one image. Accuracy is before fine-tuning; hap finetune brings it back.")
    if plan.untouched:
        say(f"{plan.untouched}.")

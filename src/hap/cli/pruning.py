"""hap score, hap order, hap prune."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

import hap
from hap.cli import options
from hap.cli.options import check_out, check_saved_name, open_with_data
from hap.cli.screen import error_line, plan_table, say, share, table, tell_written, working
from hap.cli.screen import out as screen
from hap.errors import HapError
from hap.groups.groups import Groups
from hap.planning.budget import Budget
from hap.planning.order import Order
from hap.planning.plan import Plan
from hap.pruning.plan_for_drop import Tolerance, check_alone, plan_for_drop
from hap.pruning.prune_in_rounds import check_rounds
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
    work = Work(network, found, step, calibration, seed, stream=stream)
    scores = _score_and_show(work)
    if out is not None:
        about = {"checkpoint": short_digest(checkpoint), "data": found.name}
        errors = {n: v.tolist() for n, v in scores.errors.items()}
        write_json(out, {"kind": KIND, "format": 1, **about, **work.order(scores).to_dict(), "errors": errors})
        tell_written(out)


def order(
    checkpoint: options.Saved,
    out: options.OutCheckpoint,
    data: options.DataSpec = None,
    criterion: options.Criterion = "hessian",
    per_cost: options.PerCost = False,
    coupling: options.Coupling = "joint",
    stream: options.Stream = False,
    probes: options.Probes = None,
    calibration: options.Calibration = 512,
    model: options.Model = None,
    data_root: options.DataRoot = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    seed: options.Seed = 0,
) -> None:
    """Find out once which channels go first, and store that with the network: hap prune --from-order cuts any size.

    \b
    Examples:
      hap order runs/dense.safetensors --criterion magnitude --per-cost \\
          --out runs/ordered.safetensors
      hap prune --from-order runs/ordered.safetensors --flops 0.37 \\
          --repair refit --out runs/small.safetensors
    """
    step = PruneStep("order", criterion, params=1.0, coupling=coupling, probes=probes, per_cost=per_cost)
    check_saved_name(out, checkpoint)
    _check_dense(checkpoint)
    network, saved, spec, found = open_with_data(checkpoint, model, device, data, data_root, image_size)
    work = Work(network, found, step, calibration, seed, stream=stream)
    made = work.order(_score_and_show(work))
    about = {**saved.about, **describe_network(spec, found)}
    hap.save(out, network, recipe=saved.recipe, metrics=saved.metrics, about=about, order=made)
    tell_written(out)


def _score_and_show(work: Work) -> Scores:
    """Score the units of the network, and print what came out."""
    _warn(note_if_fewer_images(work.data, work.images))
    with working("scoring") as tell:
        _, scores = dataclasses.replace(work, say=tell).score()
    screen().print(_score_table(scores, work.step.criterion))
    return scores


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
    ctx: typer.Context,
    out: options.OutCheckpoint,
    checkpoint: options.Network = None,
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
    from_order: options.FromOrder = None,
    per_layer: options.PerLayer = 0.95,
    round_to: options.RoundTo = 1,
    leave: options.Leave = None,
    per_cost: options.PerCost = False,
    compensate: options.Compensate = False,
    repair: options.Repair = None,
    minutes: options.Minutes = None,
    rounds: options.Rounds = 1,
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
      hap prune --from-order runs/ordered.safetensors --flops 0.37 \\
          --repair refit --out runs/small.safetensors
    """
    given = {**locals(), "name": "prune", "leave": leave or ()}  # the options of this command, by name
    order = _order_asked_for(ctx, checkpoint, from_order)
    if order is not None:
        made = {name: getattr(order, name) for name in ("coupling", "stream", "per_cost")}
        given |= {"checkpoint": from_order, **made}
    _prune_and_save(given, order)


MADE = ("criterion", "coupling", "stream", "probes", "per_cost", "scores", "rounds")
"""Options that an order has made the choice of, or that would score anew."""


def _order_asked_for(ctx: typer.Context, checkpoint: Path | None, from_order: Path | None) -> Order | None:
    """The order in the file of --from-order, beside which nothing is given that it has chosen."""
    if from_order is None:
        if checkpoint is None:
            raise HapError("there is nothing to prune: give a CHECKPOINT, or --from-order with a file of hap order")
        return None
    if checkpoint is not None:
        raise HapError(f"--from-order {from_order} holds the network too; leave out {checkpoint}")
    order = hap.read(checkpoint_path(from_order)).order
    if order is None:
        raise HapError(f"{from_order} holds no order; make a file with one: hap order {from_order} --out ...")
    for name in MADE:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            seen = f"{option} is given beside --from-order {from_order}, which has {order}"
            raise HapError(f"{seen}; leave out {option}, or make another with hap order")
    return order


def _prune_and_save(given: Mapping[str, Any], order: Order | None) -> None:
    """`given`: the options of hap prune by name. `order`: what goes first, where that is known."""
    checkpoint, out, stream, scores = (given[name] for name in ("checkpoint", "out", "stream", "scores"))
    searched = _searched(given)
    step = _step(given, searched)
    check_saved_name(out, checkpoint, scores)
    _check_dense(checkpoint)
    network, _, spec, found = open_with_data(checkpoint, *(given[name] for name in FOUND_BY))
    ignore = () if order is None else order.ignore
    work = Work(network, found, step, given["calibration"], given["seed"], stream=stream, ignore=ignore)
    known = order if scores is None else _read_scores(scores, work, checkpoint)
    plan, metrics, found_out = _prune(work, known, searched)
    settings = {**dataclasses.asdict(step), "channels": given["channels"], "stream": stream, **found_out}
    if order is not None:
        settings |= {"criterion": order.criterion, "ignore": order.ignore}
    described = describe_network(spec, found) | {"prune": settings, "pruned_from": checkpoint.name}
    hap.save(out, network, plan, metrics=metrics, about=described)
    tell_written(out)


FOUND_BY = ("model", "device", "data", "data_root", "image_size")
"""Options that say where the network and its data are found."""


def _step(given: Mapping[str, Any], searched: Mapping[str, Any]) -> PruneStep:
    """The step that the options ask for; a budget that is met by trying is none of the step's."""
    chosen = {field.name: given[field.name] for field in dataclasses.fields(PruneStep)}
    if searched:
        chosen |= {"channels": 1.0, "repair": given["repair"] or ("refit" if "max_drop" in searched else None)}
    return PruneStep(**chosen)


def _searched(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is met by trying, beside the budget of a step: a tolerated drop, or a budget of time and how to time."""
    asked = {name: given[name] for name in ("params", "flops", "channels", "latency", "activations")}
    check_rounds(given["rounds"], given["latency"], None)
    for name, needed in (("latency", given["latency"] is not None), ("rounds", given["rounds"] > 1)):
        if needed and distributed.processes() > 1:
            raise HapError(f"--{name} takes one process; start hap prune without torchrun")
    if given["max_drop"] is not None:
        check_alone({"max_drop": given["max_drop"], **asked})
        for name in ("scores", "from_order"):
            if given[name] is not None:
                option = f"--{name.replace('_', '-')}"
                raise HapError(
                    f"--max-drop measures on images that no score has seen, and {given[name]} does not say which it "
                    f"has seen; leave out {option}"
                )
        return {"max_drop": given["max_drop"]}
    budget = hap.Budget(**asked)
    if budget.latency is None:
        return {}
    return {"budget": budget, **{name: given[name] for name in ("batch", "backend", "threads")}}


def _check_dense(checkpoint: Path) -> None:
    if hap.read(checkpoint_path(checkpoint)).plan is not None:
        raise HapError(f"{checkpoint} is pruned already; prune the dense checkpoint again with a smaller budget")


def _prune(work: Work, order: Order | None, searched: Mapping[str, Any]) -> tuple[Plan, dict[str, Any], dict[str, Any]]:
    """Prune in place, and show it. `order`: what goes first, if that is known; `searched`: what is met by trying.

    Returns the plan, metrics after and before, and how time or accuracy was measured."""
    _warn(note_if_fewer_images(work.data, work.images))
    before = {key: value for key, value in metrics_of(work.model, work.data).items() if key != "loss"}
    with working("pruning") as tell:
        work = dataclasses.replace(work, say=tell)
        known = work.score() if order is None else work.known(order)
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
    held = work.held_out(EVALUATED)

    def right(model: nn.Module) -> Tensor:
        return torch.cat([100.0 * (model(x).argmax(1) == y) for x, y in held])

    allowed, step = Tolerance("max_drop", max_drop, right), work.step
    plan, network = plan_for_drop(work.choice(groups, scores), allowed, step.rounds, step.repair_name)
    work.apply(plan, network)
    return plan, {"max_drop": max_drop, "evaluated": sum(len(y) for _, y in held)}


def _read_scores(path: Path, work: Work, checkpoint: Path) -> Order:
    """What goes first by the scores that `hap score` wrote for this checkpoint."""
    if not path.is_file():
        raise HapError(f"there is no file {path}")
    found = read_json(path)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise HapError(f"{path} holds no scores; make them with hap score --out {path}")
    if found.get("checkpoint") != short_digest(checkpoint):
        raise HapError(f"{path} holds the scores of another checkpoint than {checkpoint}; score this one")
    known = {"stream": False, **found, "ignore": [], "per_cost": work.step.per_cost}
    try:
        order = Order.from_dict({field.name: known.get(field.name) for field in dataclasses.fields(Order)})
    except HapError as error:
        raise HapError(f"{path}: ", error) from error
    if order.coupling != work.step.coupling:
        raise HapError(f"{path} was scored with --coupling {order.coupling}; give that, or score again")
    if order.stream != work.stream:
        seen = "with" if order.stream else "without"
        raise HapError(f"{path} was scored {seen} --stream; do the same, or score again")
    if order.criterion["name"] != work.step.make_criterion().to_dict()["name"]:
        raise HapError(f"{path} was scored by {order.criterion['name']}; give that as --criterion, or score again")
    return order


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

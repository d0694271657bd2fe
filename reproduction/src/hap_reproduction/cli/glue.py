"""hap glue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hap.cli.options import Device
from hap.cli.screen import out, resumable, say, table, wrote
from hap.errors import HapError
from hap.utils.atomic_files import write_text
from hap.workflow.networks import pick_device
from hap_reproduction.glue.campaign import CRITERIA, ORDER, Campaign, Folders, Settings, jobs, status
from hap_reproduction.glue.data import TASKS
from hap_reproduction.glue.head_costs import measure as measure_costs
from hap_reproduction.glue.head_latency import measure
from hap_reproduction.glue.page import render as render_page

DEFAULTS = Settings()


def glue(
    task: Annotated[str, typer.Option(help=f"One or several of {', '.join(ORDER)}, with commas; or all.")] = "all",
    model: Annotated[
        str | None, typer.Option(help="A folder that from_pretrained reads, or a name that transformers can find.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="The folder with TASK/train.tsv and TASK/dev.tsv, or a name such as nyu-mll/glue."),
    ] = None,
    results: Annotated[Path, typer.Option("--out", help="One result file per task, criterion and seed.")] = Path(
        "results/glue"
    ),
    work: Annotated[Path, typer.Option(help="Dense networks, and what resuming needs.")] = Path("runs/glue"),
    criteria: Annotated[
        str, typer.Option(help="With commas; also hessian-deflated, gauss-newton, gradient-raw, narrow.")
    ] = ",".join(CRITERIA),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0.")] = 3,
    heads: Annotated[str, typer.Option(help="Shares of the heads that are LEFT, with commas.")] = ",".join(
        map(str, DEFAULTS.budgets)
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Of fine-tuning before pruning.")] = DEFAULTS.dense.epochs,
    more_epochs: Annotated[int, typer.Option(min=1, help="Of fine-tuning after pruning.")] = DEFAULTS.after.epochs,
    most_steps: Annotated[int | None, typer.Option(min=1, help="End each fine-tuning after so many steps.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = DEFAULTS.dense.lr,
    batch: Annotated[int, typer.Option(min=1, help="Texts in a training batch.")] = DEFAULTS.dense.batch,
    calibration: Annotated[int, typer.Option(min=1, help="Training texts to score on.")] = DEFAULTS.calibration,
    score_batch: Annotated[int, typer.Option(min=1, help="Texts scored at once: the memory.")] = DEFAULTS.score_batch,
    probes: Annotated[int, typer.Option(min=2, help="Random probes for the Hessian's trace.")] = DEFAULTS.probes,
    together: Annotated[int, typer.Option(min=1, help="Networks to train side by side.")] = DEFAULTS.together,
    graphs: Annotated[bool, typer.Option(help="Record training steps as CUDA graphs.")] = True,
    seconds: Annotated[float | None, typer.Option(help="Stop in time for this many seconds, to go on later.")] = None,
    state: Annotated[bool, typer.Option("--status", help="Only say what is done and what is left.")] = False,
    render: Annotated[Path | None, typer.Option(help="Only make this Markdown page from the result files.")] = None,
    latency: Annotated[
        bool, typer.Option("--latency", help="Only time the model with and without half its heads.")
    ] = False,
    costs: Annotated[
        bool, typer.Option("--costs", help="Only time scores beside fine-tuning, on the first task.")
    ] = False,
    note: Annotated[str, typer.Option(help="What to say of the model beside its figures.")] = "",
    revision: Annotated[str | None, typer.Option(help="The source revision to record, where git cannot tell.")] = None,
    device: Device = None,
) -> None:
    """Remove attention heads from an encoder fine-tuned on GLUE, as the paper does. Finished runs are skipped.

    \b
    Examples:
      hap glue --task mrpc --model roberta-base --data data/glue
      hap glue --model models/mpnet --data data/glue --seconds 550
      hap glue --render docs/results-glue.md
    """
    if render is not None:
        page = render_page(results)
        write_text(render, page)
        wrote(render)
        return
    chosen, shares = jobs(_tasks(task), criteria.split(","), range(seeds)), _shares(heads)
    folders = Folders(results, work)
    if state:
        found = status(chosen, folders)
        out().print(table(["run", "state"], [[name, what] for what, names in found.items() for name in names]))
        return
    if model is None or (data is None and not latency):
        raise HapError("this needs --model and --data: a model's folder or name, and the folder or name of the tasks")
    where = pick_device(device)
    if latency:
        path = results / f"latency-{where.type}.json"
        for row in measure(model, path, where, revision=revision)["rows"]:
            times = f"{row['dense']['median']:.2f} ms dense, {row['pruned']['median']:.2f} ms pruned"
            say(f"{row['backend']}, batch {row['batch']}: {times}, {row['faster']:.3f} times faster")
        wrote(path)
        return
    assert data is not None
    settings = replace(
        DEFAULTS,
        dense=replace(DEFAULTS.dense, epochs=epochs, most_steps=most_steps, lr=lr, batch=batch),
        after=replace(DEFAULTS.after, epochs=more_epochs, most_steps=most_steps, lr=lr, batch=batch),
        budgets=shares, calibration=calibration, score_batch=score_batch, probes=probes, together=together,
        graphs=graphs,
    )  # fmt: skip
    campaign = Campaign(model, data, folders, settings, where, note, revision, lambda text: typer.echo(text, err=True))
    if costs:
        path = results / f"costs-{where.type}.json"
        for row in measure_costs(campaign, chosen[0].task, path)["rows"]:
            memory = f", {row['of_a_step']:.2f} of a step's memory" if row["of_a_step"] else ""
            times = f"{row['seconds']:.2f} s, {row['of_an_epoch']:.2f} of an epoch{memory}"
            say(f"{row['criterion']}, {row['batch']} texts at once: {times}")
        wrote(path)
        return
    with resumable("the same command goes on with the budgets that are not finished"):
        campaign.work_off(chosen, seconds)


def _tasks(text: str) -> list[str]:
    names = list(ORDER) if text == "all" else text.split(",")
    if wrong := [n for n in names if n not in TASKS]:
        raise HapError(f"--task is {wrong[0]!r}; expected all or some of {', '.join(ORDER)}, with commas")
    return names


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share < 1 for share in shares):
        raise HapError(f"--heads is {text!r}; expected shares that are LEFT, between 0 and 1, such as 0.8,0.5")
    return shares

"""hap glue."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hap.cli.options import Device
from hap.cli.screen import out, resumable, say, table, tell_written
from hap.errors import HapError
from hap.utils.atomic_files import write_text
from hap.workflow.networks import pick_device
from hap_reproduction.glue.campaign import Campaign
from hap_reproduction.glue.data import TASKS
from hap_reproduction.glue.head_costs import measure as measure_costs
from hap_reproduction.glue.head_latency import measure
from hap_reproduction.glue.job import CRITERIA, ORDER, Folders, Job, Settings, jobs, status
from hap_reproduction.glue.page import render as render_page

DEFAULTS = Settings()
CRITERIA_TEXT, BUDGETS_TEXT = ",".join(CRITERIA), ",".join(map(str, DEFAULTS.budgets))
RESULTS, WORK = Path("results/glue"), Path("runs/glue")


Task = Annotated[str, typer.Option(help=f"One or several of {', '.join(ORDER)}, with commas; or all.")]
Encoder = Annotated[
    str | None, typer.Option(help="A folder that from_pretrained reads, or a name that transformers can find.")
]
TasksFolder = Annotated[
    str | None, typer.Option(help="The folder with TASK/train.tsv and TASK/dev.tsv, or a name such as nyu-mll/glue.")
]
ResultsFolder = Annotated[Path, typer.Option("--out", help="One result file per task, criterion and seed.")]
WorkFolder = Annotated[Path, typer.Option(help="Dense networks, and what resuming needs.")]
Criteria = Annotated[str, typer.Option(help="With commas; also hessian-deflated, gauss-newton, gradient-raw, narrow.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds, from 0.")]
Heads = Annotated[str, typer.Option(help="Shares of the heads that are LEFT, with commas.")]
Epochs = Annotated[int, typer.Option(min=1, help="Of fine-tuning before pruning.")]
MoreEpochs = Annotated[int, typer.Option(min=1, help="Of fine-tuning after pruning.")]
MostSteps = Annotated[int | None, typer.Option(min=1, help="End each fine-tuning after so many steps.")]
Rate = Annotated[float, typer.Option(help="Learning rate.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts in a training batch.")]
Calibration = Annotated[int, typer.Option(min=1, help="Training texts to score on.")]
ScoreBatch = Annotated[int, typer.Option(min=1, help="Texts scored at once: the memory.")]
Probes = Annotated[int, typer.Option(min=2, help="Random probes for the Hessian's trace.")]
Together = Annotated[int, typer.Option(min=1, help="Networks to train side by side.")]
Graphs = Annotated[bool, typer.Option(help="Record training steps as CUDA graphs.")]
Seconds = Annotated[float | None, typer.Option(help="Stop in time for this many seconds, to go on later.")]
StatusOnly = Annotated[bool, typer.Option("--status", help="Only say what is done and what is left.")]
RenderPage = Annotated[Path | None, typer.Option(help="Only make this Markdown page from the result files.")]
LatencyOnly = Annotated[bool, typer.Option("--latency", help="Only time the model with and without half its heads.")]
CostsOnly = Annotated[bool, typer.Option("--costs", help="Only time scores beside fine-tuning, on the first task.")]
Note = Annotated[str, typer.Option(help="What to say of the model beside its figures.")]
Revision = Annotated[str | None, typer.Option(help="The source revision to record, where git cannot tell.")]


def glue(
    task: Task = "all",
    model: Encoder = None,
    data: TasksFolder = None,
    results: ResultsFolder = RESULTS,
    work: WorkFolder = WORK,
    criteria: Criteria = CRITERIA_TEXT,
    seeds: Seeds = 3,
    heads: Heads = BUDGETS_TEXT,
    epochs: Epochs = DEFAULTS.dense.epochs,
    more_epochs: MoreEpochs = DEFAULTS.after.epochs,
    most_steps: MostSteps = None,
    lr: Rate = DEFAULTS.dense.lr,
    batch: BatchSize = DEFAULTS.dense.batch,
    calibration: Calibration = DEFAULTS.calibration,
    score_batch: ScoreBatch = DEFAULTS.score_batch,
    probes: Probes = DEFAULTS.probes,
    together: Together = DEFAULTS.together,
    graphs: Graphs = True,
    seconds: Seconds = None,
    state: StatusOnly = False,
    render: RenderPage = None,
    latency: LatencyOnly = False,
    costs: CostsOnly = False,
    note: Note = "",
    revision: Revision = None,
    device: Device = None,
) -> None:
    """Remove attention heads from an encoder fine-tuned on GLUE, as the paper does. Finished runs are skipped.

    \b
    Examples:
      hap glue --task mrpc --model roberta-base --data data/glue
      hap glue --model models/mpnet --data data/glue --seconds 550
      hap glue --render docs/results-glue.md
    """
    options = dict(locals())  # the options of this command, by name
    _shares(heads)
    if render is not None:
        return _render(results, render)
    chosen, budgets, folders = (
        jobs(_tasks(task), criteria.split(","), range(seeds)),
        _shares(heads),
        Folders(results, work),
    )
    if state:
        return _show_state(chosen, folders)
    if model is None or (data is None and not latency):
        raise HapError("this needs --model and --data: a model's folder or name, and the folder or name of the tasks")
    where = pick_device(device)
    if latency:
        return _time_heads(model, results / f"latency-{where.type}.json", where, revision)
    assert data is not None
    settings = _settings(options)
    campaign = Campaign(model, data, folders, settings, where, note, revision, lambda text: typer.echo(text, err=True))
    if costs:
        return _time_scores(campaign, chosen[0].task, results / f"costs-{where.type}.json")
    with resumable("the same command goes on with the budgets that are not finished"):
        return campaign.work_off(chosen, seconds)


def _settings(options: Mapping[str, Any]) -> Settings:
    tuning = {name: options[name] for name in ("most_steps", "lr", "batch")}
    own = {name: options[name] for name in ("calibration", "score_batch", "probes", "together", "graphs")}
    dense = replace(DEFAULTS.dense, epochs=options["epochs"], **tuning)
    after = replace(DEFAULTS.after, epochs=options["more_epochs"], **tuning)
    return replace(DEFAULTS, dense=dense, after=after, budgets=_shares(options["heads"]), **own)


def _render(results: Path, page: Path) -> None:
    write_text(page, render_page(results))
    tell_written(page)


def _show_state(chosen: list[Job], folders: Folders) -> None:
    found = status(chosen, folders)
    out().print(table(["run", "state"], [[name, what] for what, names in found.items() for name in names]))


def _time_heads(model: str, path: Path, device: torch.device, revision: str | None) -> None:
    for row in measure(model, path, device, revision=revision)["rows"]:
        times = f"{row['dense']['median']:.2f} ms dense, {row['pruned']['median']:.2f} ms pruned"
        say(f"{row['backend']}, batch {row['batch']}: {times}, {row['faster']:.3f} times faster")
    tell_written(path)


def _time_scores(campaign: Campaign, task: str, path: Path) -> None:
    for row in measure_costs(campaign, task, path)["rows"]:
        memory = f", {row['of_a_step']:.2f} of a step's memory" if row["of_a_step"] else ""
        times = f"{row['seconds']:.2f} s, {row['of_an_epoch']:.2f} of an epoch{memory}"
        say(f"{row['criterion']}, {row['batch']} texts at once: {times}")
    tell_written(path)


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

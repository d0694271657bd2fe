"""hap reproduce."""

import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer

import hap
from hap.cli.options import Device
from hap.cli.screen import out, resumable, say, table, tell_written
from hap.data import Data
from hap.errors import HapError
from hap.workflow.networks import pick_device
from hap_reproduction.cifar10 import sensitivity
from hap_reproduction.cifar10.campaign import MASKED_FROM, SideBySide, work_off
from hap_reproduction.cifar10.campaign import prepare as prune_for
from hap_reproduction.cifar10.job import Folders, Job, estimate, missing_plans, select, status
from hap_reproduction.cifar10.jobs import dense_name, headline_networks, jobs, load_data
from hap_reproduction.cifar10.sensitivity import Study

TARGETS = ("dense", "resnet56", "vgg16", "preresnet29", "best", "ablation", "implants", "head-to-head", "curves")


Target = Annotated[
    str, typer.Argument(help=f"A table or figure by name ({', '.join(TARGETS)}, {sensitivity.TARGET}), or all.")
]
DataFolder = Annotated[str | None, typer.Option(help="The folder with CIFAR-10.")]
Jobs = Annotated[
    str, typer.Option("--jobs", help="Only runs with such names, as *-seed0, and those that they start from.")
]
StatusOnly = Annotated[bool, typer.Option("--status", help="Only say what is done and what is left.")]
RenderOnly = Annotated[
    bool, typer.Option("--render", help="Only write the page of results and the zoo's manifest from what is there.")
]
PrepareOnly = Annotated[
    bool, typer.Option("--prepare", help="Only prune, so that training begins at once; others may train meanwhile.")
]
Together = Annotated[int, typer.Option(min=1, help="How many networks to train side by side.")]
Stack = Annotated[int, typer.Option(min=1, help="How many networks of one shape may run as one network.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile such stacks.")]
MaskedFrom = Annotated[
    float, typer.Option(help="Train pruned networks in one shape from this share of FLOPs left; 2: never.")
]
Seconds = Annotated[
    float | None,
    typer.Option(help="Stop in time for this many seconds, at the end of an epoch, of one at least; go on later."),
]
ResultsFolder = Annotated[Path, typer.Option(help="One result file per run.")]
NetworksFolder = Annotated[Path, typer.Option(help="Finished networks, in half precision.")]
WorkFolder = Annotated[Path, typer.Option(help="What resuming needs.")]
PageFile = Annotated[Path, typer.Option(help="The page that --render writes; figures go to images/ beside it.")]
Revision = Annotated[str | None, typer.Option(help="The source revision to record, where git cannot tell.")]


def reproduce(
    target: Target,
    data: DataFolder = None,
    only: Jobs = "*",
    state: StatusOnly = False,
    render: RenderOnly = False,
    prepare: PrepareOnly = False,
    together: Together = 8,
    stack: Stack = 8,
    compiled: Compile = False,
    masked_from: MaskedFrom = MASKED_FROM,
    seconds: Seconds = None,
    results: ResultsFolder = Path("results/cifar10"),
    networks: NetworksFolder = Path("zoo"),
    work: WorkFolder = Path("runs/cifar10"),
    page: PageFile = Path("docs/results.md"),
    revision: Revision = None,
    device: Device = None,
) -> None:
    """Rerun the paper's CIFAR-10 experiments. Finished runs are skipped, interrupted ones go on.

    \b
    Examples:
      hap reproduce all --status
      hap reproduce ablation --data data/cifar10 --together 8 --seconds 1500
      hap reproduce all --render
    """
    folders = Folders(results, networks, work)
    if render:
        _render(folders, page)
        return
    if seconds is not None and seconds <= 0:
        raise HapError(f"--seconds is {seconds:g}; expected how long to train at the most, more than 0")
    chosen, looks = _choose(target, only)
    if state or data is None:
        _show(chosen, looks, folders)
        return
    folders.check()
    loaded = load_data(data, pick_device(device))
    if missing_plans(chosen, folders):
        _say(_plans_to_make(chosen, folders, data))
    with resumable("the same command goes on where it stopped"):
        if prepare:
            prune_for(chosen, loaded, folders, _say)
            return
        _work(chosen, looks, loaded, folders, SideBySide(together, stack, compiled, masked_from), seconds, revision)
    if seconds is not None and (found := _ready(chosen, looks, folders)):
        _say(
            f"stopped for --seconds {seconds:g}: {found} of {len(chosen) + len(looks)} runs could go on or begin; the "
            f"same command does so, and hap reproduce {target} --status lists what is left"
        )
    elif missing_plans(chosen, folders):
        raise HapError(_plans_to_make(chosen, folders, data))


def _plans_to_make(chosen: list[Job], folders: Folders, data: str) -> str:
    """What keeps runs beside another library waiting, and the way out."""
    files = missing_plans(chosen, folders)
    return (
        f"{len(files)} of {len(chosen)} runs wait for what Torch-Pruning removes, the first for {files[0]}; once the "
        f"dense network is trained, make the files by python benchmarks/torch_pruning_plans.py --data {data} "
        f"--networks {folders.networks} --out {folders.plans}"
    )


def _choose(target: str, pattern: str) -> tuple[list[Job], list[Study]]:
    """The jobs and the looks at scores of a target that are named so, with the dense networks that either needs."""
    every = jobs()
    trained = [dense_name("resnet56", "paper", seed) for seed in range(3)]
    about = sensitivity.studies(trained) if target in ("all", sensitivity.TARGET) else []
    looks = [look for look in about if fnmatch(look.name, pattern)]
    if target == sensitivity.TARGET and not looks:
        known = ", ".join(look.name for look in about)
        raise HapError(f"no run of {target} is named like {pattern!r}; expected one of {known}")
    trains = target != sensitivity.TARGET and not (looks and not any(fnmatch(job.name, pattern) for job in every))
    wanted = select(every, target, pattern, (sensitivity.TARGET,)) if trains else []
    names = {job.name for job in wanted} | {look.dense for look in looks}
    return [job for job in every if job.name in names], looks


def _work(
    chosen: list[Job],
    looks: list[Study],
    data: Data,
    folders: Folders,
    manner: SideBySide,
    seconds: float | None,
    revision: str | None,
) -> None:
    """Looks are short, so they come first where their networks are there, and again after the training."""
    begun = time.monotonic()

    def left() -> float | None:
        return None if seconds is None else seconds - (time.monotonic() - begun)

    sensitivity.take(looks, data, folders, revision, _say, left())
    if (some := left()) is None or some > 0:
        work_off(chosen, data, folders, manner, some, revision, _say)
    sensitivity.take(looks, data, folders, revision, _say, left())


def _ready(chosen: list[Job], looks: list[Study], folders: Folders) -> int:
    """How many runs could be worked on now: none, unless the time was up."""
    return len(status(chosen, folders)["ready"]) + len(sensitivity.status(looks, folders)["ready"])


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _show(chosen: list[Job], looks: list[Study], folders: Folders) -> None:
    """The jobs in the order in which they run, with what each is expected to cost."""
    found = status(chosen, folders)
    seen = {name: what for what, names in found.items() for name in names}
    rows = [[job.name, seen[job.name], f"{estimate(job):.0f}"] for job in chosen]
    rows += [[name, what, "-"] for what, names in sensitivity.status(looks, folders).items() for name in names]
    left = sum(estimate(job) for job in chosen if seen[job.name] != "done")
    out().print(table(["run", "state", "ResNet56 epochs"], rows))
    out().print(
        f"{len(found['done'])} of {len(chosen)} networks trained; what is left takes as many multiply-adds as "
        f"{left:.0f} epochs of a dense ResNet56",
        markup=False,
    )
    if missing_plans(chosen, folders):
        say(_plans_to_make(chosen, folders, "data/cifar10"))


def _render(folders: Folders, page: Path) -> None:
    from hap_reproduction.pages.results import write_results
    from hap_reproduction.pages.rows import read_records
    from hap_reproduction.pages.zoo_manifest import write_manifest

    if not any(folders.results.glob("*.json")):
        raise HapError(f"there is no result file in {folders.results}: name the folder that has them with --results")
    read_records(folders.results)  # so that nothing is written where a file is damaged
    manifest = write_manifest(headline_networks(), folders.networks, folders.results)
    for path in [*write_results(folders, page, manifest), folders.networks / hap.zoo.MANIFEST]:
        tell_written(path)

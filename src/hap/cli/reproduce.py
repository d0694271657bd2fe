"""hap reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import hap
from hap.cli.options import Device
from hap.cli.screen import out, resumable, table
from hap.experiments.campaign import Folders, select, status, work_off
from hap.experiments.cifar10 import jobs
from hap.experiments.networks import pick_device


def reproduce(
    target: Annotated[
        str, typer.Argument(help="A table or figure by name (dense, resnet56, ablation, implants), or all.")
    ],
    data: Annotated[str | None, typer.Option(help="The folder with CIFAR-10.")] = None,
    state: Annotated[bool, typer.Option("--status", help="Only say what is done and what is left.")] = False,
    together: Annotated[int, typer.Option(help="How many networks to train side by side.")] = 8,
    seconds: Annotated[float | None, typer.Option(help="Stop in time for this many seconds, to go on later.")] = None,
    results: Annotated[Path, typer.Option(help="One result file per run.")] = Path("results/cifar10"),
    networks: Annotated[Path, typer.Option(help="Finished networks, in half precision.")] = Path("zoo"),
    work: Annotated[Path, typer.Option(help="What resuming needs.")] = Path("runs/cifar10"),
    revision: Annotated[str | None, typer.Option(help="The source revision to record, where git cannot tell.")] = None,
    device: Device = None,
) -> None:
    """Rerun the paper's CIFAR-10 experiments. Finished runs are skipped, interrupted ones go on.

    \b
    Examples:
      hap reproduce all --status
      hap reproduce ablation --data data/cifar10 --together 8 --seconds 1500
    """
    chosen, folders = select(jobs(), target), Folders(results, networks, work)
    if state or data is None:
        found = status(chosen, folders)
        out().print(table(["run", "state"], [[name, what] for what, names in found.items() for name in names]))
        return
    loaded = hap.data.load(data, device=pick_device(device))
    with resumable("the same command goes on where it stopped"):
        work_off(chosen, loaded, folders, together, seconds, revision, say=lambda text: typer.echo(text, err=True))

"""hap zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hap.cli.screen import out, resumable, table
from hap.errors import HapError
from hap.experiments.zoo import sweep


def zoo(
    models: Annotated[list[str], typer.Argument(help="tv:NAME, timm:NAME, hap:NAME, or files with one such a line.")],
    results: Annotated[Path, typer.Option("--out", help="The result file.")] = Path("results/zoo.json"),
    flops: Annotated[float, typer.Option(help="Share of the multiply-adds that is LEFT.")] = 0.5,
    processes: Annotated[int, typer.Option(min=1, help="Models at a time.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time limit for each model.")] = 120.0,
) -> None:
    """Prune models of other libraries by magnitude, each checked by running it. What is done is not done again.

    \b
    Examples:
      hap zoo tv:resnet18 timm:deit_tiny_patch16_224
      hap zoo models.txt --processes 2
    """
    specs = [spec for given in models for spec in _specs(given)]
    with resumable("the same command goes on where it stopped"):
        records = sweep(specs, results, flops, processes, seconds, say=lambda text: typer.echo(text, err=True))
    rows = [
        [r["model"], str(r["groups"]), f"{r['macs'][1] / r['macs'][0]:.1%}", f"{r['params'][1] / r['params'][0]:.1%}",
         f"{sum(r['seconds'].values()) - r['seconds']['export']:.1f}", f"{r['seconds']['export']:.1f}"]
        if r["verified"] else [r["model"], "-", "-", "-", "-", r["why"][:60]]
        for r in records
    ]  # fmt: skip
    out().print(table(["model", "groups", "FLOPs left", "params left", "seconds", "export alone"], rows))
    out().print(f"{sum(r['verified'] for r in records)} of {len(records)} pruned and verified")


def _specs(given: str) -> list[str]:
    if ":" in given:
        return [given]
    if not Path(given).is_file():
        raise HapError(f"{given!r} is neither FAMILY:NAME nor a file")
    return [line.strip() for line in Path(given).read_text(encoding="utf-8").splitlines() if line.strip()]

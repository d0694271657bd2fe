"""hap zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hap.cli.screen import out, resumable, table
from hap.errors import HapError
from hap.experiments.zoo import PEER, Record, sweep


def zoo(
    models: Annotated[
        list[str], typer.Argument(help="tv:NAME, timm:NAME, hf:NAME, hap:NAME, or files with one such a line.")
    ],
    results: Annotated[Path, typer.Option("--out", help="The result file.")] = Path("results/zoo.json"),
    flops: Annotated[float, typer.Option(help="Share of the multiply-adds that is LEFT.")] = 0.5,
    processes: Annotated[int, typer.Option(min=1, help="Models at a time.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time limit for each model.")] = 120.0,
    retry: Annotated[bool, typer.Option("--retry", help="Do again what failed before.")] = False,
) -> None:
    """Prune models of other libraries by magnitude, each checked by running it. What is done is not done again.

    Where torch-pruning is installed, it prunes each model too, and stands beside.

    \b
    Examples:
      hap zoo tv:resnet18 timm:deit_tiny_patch16_224 hf:bert
      hap zoo models.txt --processes 2
    """
    specs = [spec for given in models for spec in _specs(given)]
    with resumable("the same command goes on where it stopped"):
        records = sweep(specs, results, flops, processes, seconds, retry, lambda text: typer.echo(text, err=True))
    heads = ["model", "groups", "FLOPs left", "params left", "seconds", "export alone", "torch-pruning"]
    out().print(table(heads, [_row(record) for record in records]))
    out().print(f"{sum(r['verified'] for r in records)} of {len(records)} pruned and verified")
    if beside := [r[PEER] for r in records if PEER in r]:
        out().print(f"torch-pruning: {sum(p['verified'] for p in beside)} of {len(beside)}")


def _row(record: Record) -> list[str]:
    peer = _peer(record.get(PEER))
    if not record["verified"]:
        return [record["model"], "-", "-", "-", "-", record["why"][:60], peer]
    left = [f"{record[key][1] / record[key][0]:.1%}" for key in ("macs", "params")]
    export = record["seconds"]["export"]
    own = sum(record["seconds"].values()) - export
    return [record["model"], str(record["groups"]), *left, f"{own:.1f}", f"{export:.1f}", peer]


def _peer(record: Record | None) -> str:
    if record is None:
        return ""
    if not record["verified"]:
        return record["why"][:40]
    return f"{record['macs'][1] / record['macs'][0]:.1%} in {record['seconds']:.1f} s"


def _specs(given: str) -> list[str]:
    if ":" in given:
        return [given]
    if not Path(given).is_file():
        raise HapError(f"{given!r} is neither FAMILY:NAME nor a file")
    return [line.strip() for line in Path(given).read_text(encoding="utf-8").splitlines() if line.strip()]

"""hap zoo."""

from pathlib import Path
from typing import Annotated

import typer

from hap.cli.screen import out, resumable, table
from hap.errors import HapError
from hap_reproduction.zoo_sweep.summary import (
    ABOVE_HEADS,
    FAMILY_HEADS,
    PEER,
    Record,
    above_rows,
    equal,
    failures,
    family_rows,
    own_seconds,
    sentences,
)
from hap_reproduction.zoo_sweep.sweep import sweep


def zoo(
    models: Annotated[
        list[str], typer.Argument(help="tv:NAME, timm:NAME, hf:NAME, hap:NAME, or files with one such a line.")
    ],
    results: Annotated[Path, typer.Option("--out", help="The result file.")] = Path("results/zoo.json"),
    flops: Annotated[float, typer.Option(help="Share of the multiply-adds that is LEFT.")] = 0.5,
    processes: Annotated[int, typer.Option(min=1, help="Models at a time.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time limit for pruning a model, and again for exporting it.")] = 120.0,
    memory: Annotated[float, typer.Option(help="Most GiB of memory for each process.")] = 16.0,
    retry: Annotated[bool, typer.Option("--retry", help="Do again what failed before.")] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Do all again but for torch-pruning, which a change of hap does not concern."),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Source revision to record, where git cannot tell.")] = None,
) -> None:
    """Prune models of other libraries by magnitude, each checked by running it. What is done is not done again.

    The pruned ones are exported and run again. Where torch-pruning is installed, it prunes each model too, and stands
    beside. Models start in the order given: put the slowest first.

    \b
    Examples:
      hap zoo tv:resnet18 timm:deit_tiny_patch16_224 hf:bert
      hap zoo models.txt --processes 2
    """
    specs = [spec for given in models for spec in _specs(given)]
    with resumable("the same command goes on where it stopped"):
        found = sweep(
            specs,
            results,
            flops,
            processes,
            seconds,
            memory,
            retry,
            again,
            revision,
            lambda text: typer.echo(text, err=True),
        )
    heads = ["model", "groups", "FLOPs left", "params left", "seconds", "export", "exported", "torch-pruning"]
    out().print(table(heads, [_row(record, seconds) for record in found["models"]]))
    out().print(table(FAMILY_HEADS, family_rows(found["summary"])))
    if above := above_rows(found["summary"]):
        out().print(table(ABOVE_HEADS, above))
    for line in [*failures(found["models"]), *sentences(found["summary"])]:
        out().print(line, markup=False, soft_wrap=True)


def _row(record: Record, limit: float) -> list[str]:
    peer = _peer(record.get(PEER))
    if not record["verified"]:
        return [record["model"], "-", "-", "-", "-", "-", "-", peer]
    left = [f"{record[key][1] / record[key][0]:.1%}" for key in ("macs", "params")]
    alone = record["seconds"].get("export")  # none, where torch.export alone took too long
    seconds = f"{own_seconds(record, limit):.1f}", "-" if alone is None else f"{alone:.1f}"
    return [record["model"], str(record["groups"]), *left, *seconds, "equal" if equal(record) else "no", peer]


def _peer(record: Record | None) -> str:
    if record is None:
        return ""
    if not record["verified"]:
        return record["why"][:24]
    return f"{record['macs'][1] / record['macs'][0]:.1%} in {record['seconds']:.1f} s"


def _specs(given: str) -> list[str]:
    if ":" in given:
        return [given]
    if not Path(given).is_file():
        raise HapError(f"{given!r} is neither FAMILY:NAME nor a file")
    lines = [line.strip() for line in Path(given).read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]

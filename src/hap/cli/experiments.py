"""hap demo, hap run, hap report."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from hap.cli.options import Device, Seed, allow_local_modules, check_out
from hap.cli.screen import out, resumable, table, tell_skipped, tell_step, tell_written, working
from hap.report import write_report
from hap.report.summary import Row, summarise
from hap.workflow.config import DenseStep, Experiment, FinetuneStep, PruneStep, read_config
from hap.workflow.networks import pick_device
from hap.workflow.results import Result
from hap.workflow.run import Console, remove_results
from hap.workflow.run import run as run_experiment

Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what was done before and start anew.")]
DEMO = Path("runs/demo")


def demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Where results, checkpoints and the report go.")] = DEMO,
    quick: Annotated[bool, typer.Option("--quick", help="One epoch of everything, only to see that it works.")] = False,
    fresh: Fresh = False,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Train, prune and compare a small network on handwritten digits: the whole of HAP, about a minute.

    \b
    Examples:
      hap demo
      hap demo --fresh --seed 7 --out runs/again
    """
    short = {"epochs": 1} if quick else {}
    experiment = Experiment(
        model="digits_resnet",
        data="digits",
        out=str(out_folder),
        dense=DenseStep("digits", short),
        finetune=FinetuneStep("digits-finetune", short),
        prune=(
            PruneStep("HAP", params=0.3),
            PruneStep("HAP + Implant", params=0.3, implant=0.2),
            PruneStep("Magnitude", criterion="magnitude", params=0.3),
        ),
        seeds=(seed,) if quick else (seed, seed + 1, seed + 2),
        calibration=128 if quick else 512,
        probes=8 if quick else 200,
        threads=1,  # so small a network gains little from more, and with one its figures do not depend on how many
    )
    _carry_out(experiment, device, fresh)


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to do; see docs/command-line.md.")],
    out_folder: Annotated[Path | None, typer.Option("--out", help="Instead of the config's out folder.")] = None,
    fresh: Fresh = False,
    device: Device = None,
) -> None:
    """Carry out an experiment: a dense network, several ways to prune it, fine-tuning, results and a report.

    \b
    Examples:
      hap run examples/digits.toml
      hap run examples/digits.toml --out runs/other --device cpu
    """
    experiment = read_config(config)
    if out_folder is not None:
        experiment = dataclasses.replace(experiment, out=str(out_folder))
    if ":" in experiment.model:
        allow_local_modules()
    _carry_out(experiment, device, fresh)


def report(
    folder: Annotated[Path, typer.Argument(metavar="RESULTS_DIR", help="A folder with result files.")],
    out_file: Annotated[Path | None, typer.Option("--out", help="Default: RESULTS_DIR/report.html")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write the main chart as a picture.")] = None,
) -> None:
    """Make one self-contained page from result files.

    \b
    Examples:
      hap report runs/demo
      hap report runs/demo --out report.html --png summary.png
    """
    path = check_out(out_file or folder / "report.html") if folder.is_dir() else Path()
    with working("drawing"):
        write_report(folder, path, png)
    tell_written(path)


def _carry_out(experiment: Experiment, device: str | None, fresh: bool) -> None:
    folder, where = Path(experiment.out), pick_device(device)
    check_out(folder / "report.html")
    if fresh:
        remove_results(experiment)
    with resumable("the same command goes on where it stopped"):
        results = run_experiment(experiment, where, Console(tell_step, tell_skipped, working))
        with working("drawing the report"):
            write_report(folder, folder / "report.html", folder / "summary.png")
    _show(results)
    tell_written(folder / "report.html")


def _show(results: list[Result]) -> None:
    rows = summarise(results)
    shown = [
        [
            r.name,
            _accuracy(r),
            f"{r.params:,}",
            f"{r.params_left:.1%}",
            f"{r.macs:,}",
            f"{r.macs_left:.1%}",
            f"{r.latency:.2f} ms",
            f"{r.speed:.2f}x",
        ]
        for r in rows
    ]
    head = ["method", "accuracy", "params", "left", "FLOPs", "left", "latency", "speed"]
    first = results[0]
    out().print(table(head, shown, title=f"{first.config['model']} on {first.config['data']}"))
    seeds = max(len(r.accuracies) for r in rows)
    spread = f"mean and standard deviation over {seeds} fine-tunings; " if seeds > 1 else ""
    where = "one CPU thread" if first.hardware["device"] == "cpu" else first.hardware["gpu"]
    notes = [
        f"Accuracy: {spread}one of the {first.test_images} test images is {100 / first.test_images:.2f} points.",
        f"FLOPs: multiply-adds of one image. Speed: median ratio when timed in turns with the dense network, "
        f"{first.dense.batch} images on {where}; latency: the dense median divided by it.",
    ]
    for note in notes:
        out().print(note, style="dim", soft_wrap=True)


def _accuracy(row: Row) -> str:
    spread = f" ± {100 * row.deviation:.2f}" if row.deviation is not None else ""
    return f"{row.accuracy:.2%}{spread}"

"""Options that several commands share, each with one meaning."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from hap.cli.screen import working
from hap.data import Data
from hap.errors import HapError
from hap.io.checkpoint import Checkpoint
from hap.pruning.latency import BACKENDS
from hap.pruning.repair import REPAIRS
from hap.scoring import CRITERIA
from hap.training.evaluation import check_reads, device_of
from hap.utils.atomic_files import check_writable
from hap.workflow.networks import data_of_checkpoint, load_data, open_checkpoint, pick_device

Saved = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A file that hap wrote.")]
Network = Annotated[
    Path | None, typer.Argument(metavar="CHECKPOINT", help="A file that hap wrote. Not needed with --from-order.")
]
Model = Annotated[
    str | None,
    typer.Option(help="A zoo name or package.module:factory. Only needed if the checkpoint holds no zoo network."),
]
DataSpec = Annotated[
    str | None,
    typer.Option("--data", help="digits, cifar10, cifar100 or a folder. Default: what the network was trained on."),
]
DataRoot = Annotated[Path | None, typer.Option(help="The folder that holds the unpacked cifar10 or cifar100.")]
ImageSize = Annotated[
    int | None, typer.Option(min=1, help="Side of the square that a folder's images are cut to. Default: the model's.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: cuda if there is one.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything drawn at random.")]
Calibration = Annotated[int, typer.Option(min=1, help="Training images to score on.")]
Criterion = Annotated[
    str, typer.Option(help=f"What is insensitive: {', '.join(CRITERIA)}, or reversed-NAME.", show_default=True)
]
Coupling = Annotated[
    str, typer.Option(help="At sums of branches: joint (a channel goes from all) or union (the paper's).")
]
Stream = Annotated[
    bool, typer.Option("--stream", help="Cut the residual stream of a transformer too, which a norm spans.")
]
Probes = Annotated[
    int | None, typer.Option(min=2, help="Estimate the Hessian's trace with so many probes, instead of exactly.")
]

Params = Annotated[float | None, typer.Option(help="Share of the parameters that is LEFT.")]
Flops = Annotated[float | None, typer.Option(help="Share of the multiply-adds that is LEFT.")]
Channels = Annotated[float | None, typer.Option(help="Share of the channels that is LEFT.")]
Activations = Annotated[float | None, typer.Option(help="Share of what layers write that is LEFT.")]
Latency = Annotated[float | None, typer.Option(help="Share of the measured time that is LEFT.")]
MaxDrop = Annotated[
    float | None,
    typer.Option(help="In place of a budget: at most so many points of accuracy are lost, before any fine-tuning."),
]
TimedBatch = Annotated[int, typer.Option(min=1, help="Images of a timed call, with --latency.")]
ImplantShare = Annotated[float, typer.Option(help="Share of the removed k x k channels to replace by implants.")]
ImplantKind = Annotated[str, typer.Option(help="Pointwise (the paper's), LowRank, DepthwiseSeparable, SpatialLowRank.")]
ImplantInit = Annotated[str | None, typer.Option(help="Start values: lstsq, center or zero.")]
ScoresFile = Annotated[
    Path | None, typer.Option(help="Scores of this checkpoint that hap score wrote, instead of scoring again.")
]
FromOrder = Annotated[
    Path | None,
    typer.Option(help="A file of hap order, which holds the network and what goes first: nothing is scored again."),
]
Rounds = Annotated[
    int, typer.Option(help="Prune in so many steps: each time a part goes, --repair mends the rest, and it is scored.")
]
PerLayer = Annotated[float, typer.Option(help="At most this share of a layer goes.")]
RoundTo = Annotated[int, typer.Option(help="Layers keep a multiple of this many units.")]
Leave = Annotated[list[str] | None, typer.Option(help="Layers not to touch: a name or a pattern. Repeatable.")]
PerCost = Annotated[bool, typer.Option("--per-cost", help="Rank by sensitivity per cost saved.")]
Compensate = Annotated[bool, typer.Option("--compensate", help="Repair what reads the removed units by least squares.")]
Repair = Annotated[
    str | None,
    typer.Option(help=f"Mend what is left, without labels: {', '.join(REPAIRS)}. distil, a refit first, is the best."),
]
Minutes = Annotated[float | None, typer.Option(help="Time for --repair distil, which this alone means. Default: 5.")]
OutCheckpoint = Annotated[Path, typer.Option(help="The checkpoint to write (.safetensors).")]
OutScores = Annotated[Path | None, typer.Option(help="A JSON file for the scores, which hap prune can read.")]
Backend = Annotated[str, typer.Option(help=f"What is timed: {', '.join(BACKENDS)} (exported, BatchNorms folded).")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads while timing. Default: torch's number.")]


def open_network(path: Path, model: str | None, device: str | None) -> tuple[nn.Module, Checkpoint, str]:
    """A checkpoint's network on the device, what the checkpoint says, and the network's name."""
    if model is not None and ":" in model:
        allow_local_modules()
    network, checkpoint, spec = open_checkpoint(path, model)
    return network.to(pick_device(device)), checkpoint, spec


def open_with_data(
    path: Path, model: str | None, device: str | None, data: str | None, root: Path | None, size: int | None
) -> tuple[nn.Module, Checkpoint, str, Data]:
    """What `open_network` gives, and the data asked for, or the checkpoint's, on the same device."""
    network, checkpoint, spec = open_network(path, model, device)
    if size is None and isinstance(shape := checkpoint.about.get("input"), list) and shape:
        size = shape[-1]
    with working("reading the data"):
        found = load_data(data or data_of_checkpoint(checkpoint, path), spec, root, size)
    found = found.to(device_of(network))
    check_reads(network, found, spec)
    return network, checkpoint, spec, found


def allow_local_modules() -> None:
    """Let --model name a module in the current folder, as python -m would."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def check_out(path: Path, *inputs: Path | None) -> Path:
    """Refuse a place that cannot be written to, or a file that the command reads, before the work, not after it."""
    if any(path.resolve() == read.resolve() for read in inputs if read is not None):
        raise HapError(f"--out is {path}, which the command reads and would overwrite; give another name")
    if path.is_dir():
        raise HapError(f"cannot write {path}: it is a folder; give a file name")
    check_writable(path.parent)
    return path


def check_saved_name(path: Path, *inputs: Path | None) -> Path:
    """Checkpoints are safetensors files, and say so."""
    if path.suffix != ".safetensors":
        raise HapError(f"{path} is to be a checkpoint; its name must end in .safetensors")
    return check_out(path, *inputs)

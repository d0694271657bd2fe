"""Networks and data as the command line and experiments name them: by zoo name, factory, checkpoint or folder."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hap
from hap import models
from hap.data import Data
from hap.errors import Argument, HapError
from hap.io.checkpoint import Checkpoint
from hap.models import pretrained
from hap.pruning.latency import compare_latency
from hap.training.evaluation import device_of
from hap.workflow.results import Measured

NAMED_DATA = ("digits", "cifar10", "cifar100")
LATENCY_BATCH = 256
LATENCY_SECONDS = 1.0
LATENCY_ROUNDS = (8, 60)


def pick_device(name: str | None) -> torch.device:
    """The device of that name, or CUDA where there is one, else the CPU."""
    given = Argument("device", name, text="device")
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise HapError(given, f" is {name!r}; expected cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise HapError(given, f" is {name!r}; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise HapError(given, f" is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def load_data(spec: str, model: str | None = None, root: str | Path | None = None, size: int | None = None) -> Data:
    """A data set; images of a folder are cut to `size`, or to what the zoo's network of that name reads."""
    if size is None:
        size = models.info(model).input_shape[-1] if model in models.names() else 224
    return hap.data.load(spec, root=root, size=size)


def new_network(spec: str, classes: int | None, seed: int = 0) -> nn.Module:
    """A newly initialised network, the same for the same seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return models.resolve(spec, classes).eval()


def first_images(data: Data, count: int = 1, near: nn.Module | None = None) -> Tensor:
    """The first training images, as a network sees them, and where the network `near` is."""
    images = next(data.batches("train", count))[0]
    return images if near is None else images.to(device_of(near))


def describe_network(spec: str, data: Data) -> dict[str, Any]:
    """What a checkpoint says of its network, so that later commands need not be told."""
    shape = list(data.train.images.shape[1:])
    return {"model": spec, "classes": data.classes, "data": data.name, "input": shape}


def checkpoint_path(path: str | Path) -> Path:
    """The file itself; of `zoo:NAME`, the file of the trained network of that name."""
    return pretrained.path(str(path).removeprefix("zoo:")) if str(path).startswith("zoo:") else Path(path)


def open_checkpoint(path: str | Path, spec: str | None = None) -> tuple[nn.Module, Checkpoint, str]:
    """The network in a checkpoint, what the checkpoint says, and the name of the network.

    `zoo:NAME` is a trained network by its name. A model's name in the checkpoint is enough. `package.module:factory` is
    code, which a checkpoint must not choose: that comes from the caller or not at all.
    """
    path = checkpoint_path(path)
    checkpoint = hap.read(path)
    stored = checkpoint.about.get("model")
    if spec is None and not isinstance(stored, str):
        raise HapError(f"{path} does not say which network it holds; give --model")
    if spec is None and stored not in models.names():
        raise HapError(
            f"{path} holds the network {stored!r}, which is not in the zoo; a checkpoint cannot name code to "
            f"run, so if you trust it give --model {stored}"
        )
    chosen = spec or str(stored)
    model = new_network(chosen, _stored_classes(checkpoint, path))
    return hap.load(path, model).eval(), checkpoint, chosen


def _stored_classes(checkpoint: Checkpoint, path: str | Path) -> int | None:
    """The number of classes, if some tensor bears it out: a false one could ask for any amount of memory."""
    classes = checkpoint.about.get("classes")
    if classes is None:
        return None
    if not isinstance(classes, int) or not any(classes in shape for shape in checkpoint.shapes.values()):
        raise HapError(f"{path} speaks of {classes!r} classes, but none of its tensors has that size; it is damaged")
    return classes


def data_of_checkpoint(checkpoint: Checkpoint, path: str | Path) -> str:
    """The name of the data that a checkpoint's network was trained on, where a name is enough to find it."""
    name = checkpoint.about.get("data")
    if name not in NAMED_DATA:
        raise HapError(f"{path} does not name a data set known here; give --data, a name or a folder")
    return str(name)


def example_of_checkpoint(checkpoint: Checkpoint, path: str | Path, batch: int = 1) -> Tensor:
    """Zeros shaped like the network's input."""
    shape = checkpoint.about.get("input")
    if not (isinstance(shape, list) and shape and all(isinstance(n, int) and n > 0 for n in shape)):
        raise HapError(f"{path} does not say what its network reads; give --input-shape, such as 1,3,32,32, or --data")
    return torch.zeros(batch, *shape)


def metrics_of(model: nn.Module, data: Data) -> dict[str, Any]:
    """What a checkpoint says of how well its network does and what it costs."""
    found, count = hap.evaluate(model, data), hap.cost(model, first_images(data, near=model))
    return {"accuracy": found.accuracy, "loss": found.loss, "params": count.params, "macs": count.macs}


def measure_networks(*networks: tuple[nn.Module, float], data: Data) -> list[Measured]:
    """Cost and latency of networks whose accuracies are known, timed in turns: a change in load meets them all.

    The latency of the first is the median over the rounds, that of another is the first's times the median of their
    ratio in each round: what slows the machine down for a while slows both, and the ratio is what comparisons are
    about. On a CPU one thread is used, since the time of several depends on what else the machine does.
    """
    models = [model for model, _ in networks]
    example, batch = (first_images(data, count, near=models[0]) for count in (1, LATENCY_BATCH))
    once = sum(time.median for time in compare_latency(models, batch, runs=2, warmup=1, threads=1)) / 1e3
    fewest, most = LATENCY_ROUNDS
    rounds = min(most, max(fewest, round(LATENCY_SECONDS * len(models) / (2 * once))))
    times = compare_latency(models, batch, rounds, warmup=0, threads=1)
    measured = []
    for (model, accuracy), time in zip(networks, times, strict=True):
        count, median = hap.cost(model, example), times[0].median * time.ratio_to(times[0])
        measured.append(Measured(accuracy, count.params, count.macs, median, time.spread, len(batch)))
    return measured

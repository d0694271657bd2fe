"""The training loop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from hap.data import Data
from hap.errors import HapError
from hap.execution.calling import eval_mode
from hap.training.checkpoint import Checkpoint
from hap.training.evaluation import device_of
from hap.training.graph import Captured, Step
from hap.training.recipes import Recipe
from hap.training.report import Report
from hap.training.run import History, Run, epoch_seed
from hap.utils import distributed

STEPS_BETWEEN_CHECKS = 200
"""How many steps may run before the loss is looked at, which waits for the device."""
SEED_STEP = 7_919
"""Between the seeds of processes, whose samples differ and whose dropout must too."""


def train(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    *,
    teacher: nn.Module | None = None,
    checkpoint: str | Path | None = None,
    log_dir: str | Path | None = None,
    progress: bool = True,
    graphs: bool = True,
) -> History:
    """Train `model` in place on the device of its parameters and leave it in eval mode.

    Arguments:
        model: turns images into one logit for each class.
        data: what `hap.data.load` returns. Under torch.distributed all processes pass the same model and data, and each
            takes its part of every batch.
        recipe: see `hap.recipes.get`.
        teacher: a network to learn from as well, if the recipe has `distill`.
        checkpoint: a file from which the same call takes up an interrupted training after its last written epoch, or
            returns at once when it was finished; the model's weights at the call then do not count.
        log_dir: a folder for TensorBoard.
        progress: whether to show a bar.
        graphs: False turns off CUDA graphs, for networks that cannot be recorded.

    Returns:
        Loss, learning rate, accuracy and time of each epoch.

    >>> import hap
    >>> split = hap.data.Split(torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 2)
    >>> data = hap.data.Data(split, split, classes=2, mean=(0.5,), std=(0.3,), name="noise")
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    >>> hap.train(model, data, hap.Recipe(epochs=2, batch=32), progress=False).epochs
    2
    >>> hap.evaluate(model, data).count
    64
    """
    device = device_of(model)
    check_networks(model, data, recipe, teacher)
    with prepared(model, device):
        run = Run(model, near(data, device), recipe, None if teacher is None else frozen_copy(teacher, device))
        recorded = graphs and device.type == "cuda" and distributed.processes() == 1
        step = Captured(run.step) if recorded else run.step
        state = Checkpoint(None if checkpoint is None else Path(checkpoint), [run])
        first = distributed.agree(state.restore(), "the epoch to go on from")
        run.check_weights()
        shown = distributed.is_first()
        with Report(run, first, log_dir if shown else None, progress and shown) as report:
            for epoch in range(first, recipe.epochs):
                _train_epoch(run, step, epoch, report)
                last = epoch + 1 == recipe.epochs
                run.note_accuracy(epoch, always=last)
                report.epoch(epoch)
                state.save(epoch + 1, always=last)
        run.use_average()
    return run.history


def _train_epoch(run: Run, step: Step, epoch: int, report: Report) -> None:
    """All steps of one epoch; the one wait for the device is at its end."""
    begun = time.monotonic()
    seed_epoch(run, epoch)
    for index, batch in enumerate(run.epoch(epoch)):
        run.feed(batch)
        run.set_rates(epoch * run.steps_per_epoch + index)
        step()
        report.advance()
        if index % STEPS_BETWEEN_CHECKS == STEPS_BETWEEN_CHECKS - 1:
            run.check_loss(epoch)
    run.check_loss(epoch)
    run.note_epoch(epoch, time.monotonic() - begun)


def seed_epoch(run: Run, epoch: int) -> None:
    """Layers such as dropout draw from the global generators: a seed for each epoch lets training resume."""
    torch.manual_seed(epoch_seed(run.recipe, epoch) + SEED_STEP * distributed.rank())


@contextmanager
def prepared(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Training mode and, on CUDA, channels-last weights and tuned convolutions.

    At the end: eval mode, contiguous weights, and the random state and the tuning as they were.
    """
    cuda = device.type == "cuda"
    chosen = torch.cuda.device(device) if cuda else nullcontext()
    tuned = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = tuned or cuda
    lay_out(model.train(), torch.channels_last if cuda else torch.contiguous_format)
    try:
        with torch.random.fork_rng([device] if cuda else []), chosen:
            yield
    finally:
        torch.backends.cudnn.benchmark = tuned
        lay_out(model.eval(), torch.contiguous_format)


def lay_out(model: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    """Convolution weights in a memory format, in place."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    return model


def near(data: Data, device: torch.device) -> Data:
    """The data with its images on the device if there is room, so that not each batch has to move there.

    Half of a GPU's free memory is left for training.
    """
    size = sum(split.images.numel() for split in (data.train, data.test) if split.images.device != device)
    has_room = device.type != "cuda" or size < torch.cuda.mem_get_info(device)[0] / 2
    return data.to(device) if has_room else data


def frozen_copy(teacher: nn.Module, device: torch.device) -> nn.Module:
    """The caller's teacher stays as it is: the copy may change device and memory layout."""
    copy = deepcopy(teacher).to(device).eval().requires_grad_(False)
    return lay_out(copy, torch.channels_last) if device.type == "cuda" else copy


def check_networks(model: nn.Module, data: Data, recipe: Recipe, teacher: nn.Module | None) -> None:
    """Refuse networks that do not fit the data: a label beyond the outputs would end as an obscure failure."""
    if recipe.distill and teacher is None:
        raise HapError(f"the recipe has distill={recipe.distill} but no teacher is given: give one or set 0")
    for network in (model, teacher) if teacher is not None else (model,):
        images = next(data.batches("train", 1))[0].to(device_of(network))
        with eval_mode(network), torch.no_grad():
            shape = tuple(network(images).shape)
        if shape != (1, data.classes):
            raise HapError(
                f"the model turns one image of {data.name} into {shape}: expected (1, {data.classes}), "
                "one logit for each class"
            )

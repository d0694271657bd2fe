"""The training loop, and what it shows: a progress bar, and TensorBoard scalars when asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from hap.data import Data
from hap.errors import HapError, optional_package
from hap.training.cuda_graph import RecordedStep, Step
from hap.training.evaluation import check_reads, device_of
from hap.training.recipes import Recipe
from hap.training.resume import TrainingState
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
        step = RecordedStep(run.step) if recorded else run.step
        state = TrainingState(None if checkpoint is None else Path(checkpoint), [run])
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
    """Refuse networks that do not fit the data, and a recipe that asks for a teacher where there is none."""
    if recipe.distill and teacher is None:
        raise HapError(f"the recipe has distill={recipe.distill} but no teacher is given: give one or set 0")
    check_reads(model, data)
    if teacher is not None:
        check_reads(teacher, data, "the teacher")


# ---- what is shown ------------------------------------------------------------------------------------------


class Report:
    """A bar over all steps, with epoch, loss and test accuracy."""

    def __init__(self, run: Run, first: int, log_dir: str | Path | None, progress: bool) -> None:
        self.run, epochs = run, run.recipe.epochs
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
        done = first * run.steps_per_epoch
        self.task = self.bar.add_task(f"epoch {first}/{epochs}", total=run.total, completed=done)
        self.writer = None if log_dir is None else _tensorboard(log_dir, first)

    def __enter__(self) -> Report:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.writer is not None:
            self.writer.close()

    def advance(self) -> None:
        self.bar.advance(self.task)

    def epoch(self, epoch: int) -> None:
        """Show and log the last entries of the history, of epoch `epoch` (from 0)."""
        history = self.run.history
        text = f"epoch {epoch + 1}/{self.run.recipe.epochs}  loss {history.loss[-1]:.4f}"
        if known := [accuracy for accuracy in history.accuracy if accuracy is not None]:
            text += f"  accuracy {100 * known[-1]:.2f}%"
        self.bar.update(self.task, description=text)
        if self.writer is not None:
            for name, values in history.to_dict().items():
                if values[-1] is not None:
                    self.writer.add_scalar(name, values[-1], epoch + 1)


def _tensorboard(log_dir: str | Path, first: int) -> Any:
    with optional_package("logging needs tensorboard, which is missing", "log"):
        from torch.utils.tensorboard import SummaryWriter
    # Entries after the epoch that training resumes from belong to work that was lost.
    return SummaryWriter(str(log_dir), purge_step=first + 1)

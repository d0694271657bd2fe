"""The training loop, for one model or for several side by side on one device."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from hap.data import Data
from hap.errors import HapError
from hap.execution.calling import eval_mode
from hap.training.checkpoint import STATE, Checkpoint
from hap.training.evaluation import device_of, evaluate
from hap.training.graph import Captured, Step, in_turn
from hap.training.recipes import Recipe
from hap.training.report import Report
from hap.training.run import History, Run, epoch_seed
from hap.training.update import Masks, Update, lay_out
from hap.utils import distributed

UpdatesOf = Callable[[Sequence[Run]], AbstractContextManager[Sequence[Update]]]
"""How runs are carried out: a context manager, inside which the updates that it yields take the steps of all runs."""
STEPS_BETWEEN_CHECKS = 200
"""How many steps may run before the loss is looked at, which waits for the device."""


class NotFinite(HapError):
    """The weights or the loss of the model at this `position` are not finite."""

    def __init__(self, message: str, position: int):
        super().__init__(message)
        self.position = position


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
    path = None if checkpoint is None else Path(checkpoint)
    return _train([model], data, [recipe], [teacher], [None], path, log_dir, None, progress, graphs)[0]


def train_many(
    models: Sequence[nn.Module],
    data: Data,
    recipes: Sequence[Recipe],
    *,
    teachers: Sequence[nn.Module | None] | None = None,
    masks: Sequence[Masks | None] | None = None,
    checkpoint_dir: str | Path | None = None,
    seconds: float | None = None,
    log_dir: str | Path | None = None,
    progress: bool = True,
    graphs: bool = True,
    updates_of: UpdatesOf | None = None,
) -> list[History]:
    """Train independent models side by side on one device, each as `train` would alone but for what dropout draws.

    All recipes need the same batch size and number of epochs. `masks` holds, for each model that has them, 0/1 tensors
    by name of a parameter; where they are 0 the parameter is zero throughout. The state of all models stands in one
    file in `checkpoint_dir`. With `seconds`, training ends, its checkpoint written, after the last epoch expected to
    fit (but after one at least), and the same call goes on from there; `History.epochs` tells.

    `updates_of` may carry out several runs as one update, such as one network that stands for several models. It gets
    all runs and returns a context manager, inside which its updates take the steps. `None`: each run by itself.
    """
    path = None if checkpoint_dir is None else Path(checkpoint_dir) / STATE
    given: list[nn.Module | None] = [None] * len(models) if teachers is None else list(teachers)
    held: list[Masks | None] = [None] * len(models) if masks is None else list(masks)
    own = list(models), data, list(recipes), given, held
    return _train(*own, path, log_dir, seconds, progress, graphs, updates_of)


def _train(
    models: list[nn.Module],
    data: Data,
    recipes: list[Recipe],
    teachers: list[nn.Module | None],
    masks: list[Masks | None],
    checkpoint_path: Path | None,
    log_dir: str | Path | None,
    seconds: float | None,
    progress: bool,
    graphs: bool,
    updates_of: UpdatesOf | None = None,
) -> list[History]:
    begun = time.monotonic()
    device = _check(models, data, recipes, teachers)
    _check_masks(models, masks)
    data = data.to(device) if _has_room(device, data) else data
    with ExitStack() as stack:
        stack.enter_context(_prepared(models, device))
        copies = {id(t): _frozen_copy(t, device) for t in teachers if t is not None}
        runs = [
            Run(model, data, recipe, copies.get(id(teacher)), device, mask)
            for model, recipe, teacher, mask in zip(models, recipes, teachers, masks, strict=True)
        ]
        together = distributed.processes() > 1
        updates: Sequence[Update] = runs
        if updates_of is not None and not together:
            updates = stack.enter_context(updates_of(runs))
        checkpoint = Checkpoint(checkpoint_path, runs, data)
        first, epochs = distributed.agree(checkpoint.restore(), "the epoch to go on from"), recipes[0].epochs
        _check_weights(runs)
        step = _side_by_side(updates, graphs and device.type == "cuda" and not together)
        shown = progress and distributed.is_first()
        report = stack.enter_context(Report(runs, first, epochs, log_dir if distributed.is_first() else None, shown))
        for epoch in range(first, epochs):
            epoch_begun = time.monotonic()
            _run_epoch(runs, updates, data, step, epoch, report)
            last = epoch + 1 == epochs
            now = time.monotonic()
            late = seconds is not None and now - begun + (now - epoch_begun) > seconds
            out_of_time = distributed.total(late, device) > 0
            _evaluate_runs(runs, data, epoch, always=last or out_of_time)
            report.epoch(epoch)
            checkpoint.save(epoch + 1, always=last or out_of_time)
            if out_of_time:
                break
        for run in runs:
            run.use_average()
            run.history.stack, run.history.compiled = run.stack, run.compiled
    return [run.history for run in runs]


def _run_epoch(runs: list[Run], updates: Sequence[Update], data: Data, step: Step, epoch: int, report: Report) -> None:
    """All steps of one epoch for all runs; the one wait for the device is at its end."""
    begun = time.monotonic()
    steps = runs[0].steps_per_epoch
    # Layers such as dropout draw from the global generators: a seed for each epoch lets training resume.
    torch.manual_seed(epoch_seed(runs[0].recipe, epoch) + SEED_STEP * distributed.rank())
    for index, batches in enumerate(zip(*(run.epoch(data, epoch) for run in runs), strict=True)):
        for run, batch in zip(runs, batches, strict=True):
            run.feed(batch)
        for update in updates:
            update.set_rates(epoch * steps + index)
        step()
        report.advance()
        if index % STEPS_BETWEEN_CHECKS == STEPS_BETWEEN_CHECKS - 1:
            _check_finite(runs, epoch)
    _check_finite(runs, epoch)
    taken = time.monotonic() - begun
    for run in runs:
        run.history.loss.append(distributed.mean(run.loss_sum).item() / steps)
        run.history.seconds.append(taken)
        run.history.images_per_second.append(steps * run.size / taken)
        run.history.lr.append(run.recipe.learning_rate((epoch + 1) * steps - 1, run.total))


def _check_weights(runs: list[Run]) -> None:
    """A network that is broken from the start is not one whose learning rate is too high."""
    for position, run in enumerate(runs):
        for name, parameter in run.model.named_parameters():
            if not parameter.isfinite().all():
                which = f" of model {position}" if len(runs) > 1 else ""
                words = f"{name}{which} is not finite before training: expected finite weights to start from"
                raise NotFinite(words, position)


def _check_finite(runs: list[Run], epoch: int) -> None:
    for position, run in enumerate(runs):
        loss = distributed.mean(run.loss_sum).item()
        if not math.isfinite(loss):
            which = f" of model {position}" if len(runs) > 1 else ""
            raise NotFinite(
                f"the training loss{which} is {loss} in epoch {epoch + 1}: lower the learning "
                f"rate ({run.recipe.lr}) or raise warmup ({run.recipe.warmup}); the last checkpoint is kept",
                position,
            )


def _evaluate_runs(runs: list[Run], data: Data, epoch: int, always: bool) -> None:
    for run in runs:
        due = always or (epoch + 1) % run.recipe.eval_every == 0
        distributed.broadcast_(run.model)  # running statistics are each process's own
        with run.averaged():
            run.history.accuracy.append(evaluate(run.model, data).accuracy if due else None)


def _side_by_side(updates: Sequence[Update], captured: bool) -> Step:
    steps = [update.step for update in updates]
    return Captured(steps) if captured else in_turn(steps)


@contextmanager
def _prepared(models: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Training mode and, on CUDA, channels-last weights and tuned convolutions.

    At the end: eval mode, contiguous weights, and the random state and the tuning as they were.
    """
    cuda = device.type == "cuda"
    chosen = torch.cuda.device(device) if cuda else nullcontext()
    tuned = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = tuned or cuda
    for model in models:
        lay_out(model.train(), torch.channels_last if cuda else torch.contiguous_format)
    try:
        with torch.random.fork_rng([device] if cuda else []), chosen:
            yield
    finally:
        torch.backends.cudnn.benchmark = tuned
        for model in models:
            lay_out(model.eval(), torch.contiguous_format)


def _has_room(device: torch.device, data: Data) -> bool:
    """Whether the images may move to the device; else each batch does. Half of its free memory is left for training."""
    if device.type != "cuda":
        return True
    size = sum(split.images.numel() for split in (data.train, data.test) if split.images.device != device)
    return size < torch.cuda.mem_get_info(device)[0] / 2


def _frozen_copy(teacher: nn.Module, device: torch.device) -> nn.Module:
    """The caller's teacher stays as it is: the copy may change device and memory layout."""
    copy = deepcopy(teacher).to(device).eval().requires_grad_(False)
    return lay_out(copy, torch.channels_last) if device.type == "cuda" else copy


def _check(
    models: list[nn.Module], data: Data, recipes: list[Recipe], teachers: list[nn.Module | None]
) -> torch.device:
    """Refuse what cannot be trained together; returns the device of all models."""
    if not models or len({len(models), len(recipes), len(teachers)}) != 1:
        raise HapError(
            f"{len(models)} models, {len(recipes)} recipes and {len(teachers)} teachers: expected one recipe "
            "and one teacher (or None) for each of at least one model"
        )
    if len({id(model) for model in models}) != len(models):
        raise HapError("the same model stands twice in the list: models trained side by side must be distinct")
    shapes = {(recipe.epochs, recipe.batch) for recipe in recipes}
    if len(shapes) != 1:
        found = "; ".join(f"{epochs} epochs of batch {batch}" for epochs, batch in sorted(shapes))
        raise HapError(f"the recipes differ in epochs or batch ({found}): train such models one after another")
    devices = {device_of(model) for model in models}
    if len(devices) != 1:
        raise HapError(f"the models are on {', '.join(sorted(map(str, devices)))}: move all to one device")
    device = devices.pop()
    for model, recipe, teacher in zip(models, recipes, teachers, strict=True):
        if recipe.distill and teacher is None:
            raise HapError(f"the recipe has distill={recipe.distill} but no teacher is given: give one or set 0")
        for network in (model, teacher):
            if network is not None:
                _check_outputs(network, data)
    return device


def _check_masks(models: list[nn.Module], masks: list[Masks | None]) -> None:
    if len(masks) != len(models):
        raise HapError(f"{len(models)} models and {len(masks)} masks: expected masks, or None, for each model")
    for model, own in zip(models, masks, strict=True):
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, mask in (own or {}).items():
            if shapes.get(name) != tuple(mask.shape):
                raise HapError(
                    f"the mask of {name} has shape {tuple(mask.shape)}: expected {shapes.get(name, 'no such mask')}, "
                    "that of the parameter of this name"
                )


def _check_outputs(model: nn.Module, data: Data) -> None:
    """A label beyond the outputs would end as an obscure failure inside the device."""
    images = next(data.batches("train", 1))[0].to(device_of(model))
    with eval_mode(model), torch.no_grad():
        shape = tuple(model(images).shape)
    if shape != (1, data.classes):
        raise HapError(
            f"the model turns one image of {data.name} into {shape}: expected (1, {data.classes}), "
            "one logit for each class"
        )

"""Training several networks side by side on one device, each as `hap.train` would alone.

The loop is that of `hap.training.loop` for a list of runs. On CUDA the steps of all of them are recorded on parallel
branches of one graph, so that networks too small to fill the device share it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hap.data import Data
from hap.errors import HapError
from hap.training import History
from hap.training.cuda_graph import RecordedStep, Step
from hap.training.evaluation import device_of
from hap.training.loop import STEPS_BETWEEN_CHECKS, check_networks, frozen_copy, near, prepared, seed_epoch
from hap.training.recipes import Recipe
from hap.training.resume import TrainingState, read_state, write_state
from hap.training.run import Run, under
from hap_reproduction.streams import in_turn, side_by_side

STATE = "training.safetensors"
"""The file in a folder of checkpoints."""
Masks = Mapping[str, Tensor]
"""By name of a parameter, ones where it trains and zeros where it stays zero. Parameters without one train whole."""


class NotFinite(HapError):
    """The weights or the loss of the model at this `position` are not finite."""

    def __init__(self, message: str, position: int):
        super().__init__(message)
        self.position = position


@dataclass
class Together(History):
    """A history that also tells, of the last call alone, of how many models the network was that ran, and whether it
    was compiled."""

    stack: int = 1
    compiled: bool = False


class MaskedRun(Run):
    """A run of which parameters are zero throughout where `masks` are."""

    def __init__(self, model: nn.Module, data: Data, recipe: Recipe, teacher: nn.Module | None, masks: Masks) -> None:
        masked = {n: p for n, p in model.named_parameters() if p.requires_grad and n in masks}
        self.masks = own = {n: _like(p, masks[n]) for n, p in masked.items()}

        @torch.no_grad()
        def hold(*_: object) -> None:
            """Momentum and weight decay may move what is masked: it goes back to zero after every update."""
            if own:
                torch._foreach_mul_(list(masked.values()), list(own.values()))

        hold()
        super().__init__(model, data, recipe, teacher)
        self.history: Together = Together()
        self.optimizer.register_step_post_hook(hold)

    def wiring(self) -> bytes:
        masks = (n.encode() + m.bool().contiguous().cpu().numpy().tobytes() for n, m in self.masks.items())
        return super().wiring() + b"".join(masks)


RunsAsOne = Callable[[Sequence[MaskedRun]], AbstractContextManager[Sequence[Run]]]
"""How runs are carried out: a context manager, inside which the runs that it yields take the steps of all of them."""


def train_many(
    models: Sequence[nn.Module],
    data: Data,
    recipes: Sequence[Recipe],
    *,
    teachers: Sequence[nn.Module | None] | None = None,
    masks: Sequence[Masks | None] | None = None,
    checkpoint_dir: str | Path | None = None,
    seconds: float | None = None,
    graphs: bool = True,
    updates_of: RunsAsOne | None = None,
) -> list[Together]:
    """Train independent models side by side on one device, each as `hap.train` would alone but for what dropout draws.

    All recipes need the same batch size and number of epochs. `masks` holds, for each model that has them, 0/1 tensors
    by name of a parameter; where they are 0 the parameter is zero throughout. The state of all models stands in one
    file in `checkpoint_dir`. With `seconds`, training ends, its checkpoint written, after the last epoch expected to
    fit (but after one at least), and the same call goes on from there; `History.epochs` tells.

    `updates_of` may carry out several runs as one, such as one network that stands for several models. It gets all
    runs and returns a context manager, inside which what it yields takes the steps. `None`: each run by itself.
    """
    begun = time.monotonic()
    given = [None] * len(models) if teachers is None else teachers
    held = [None] * len(models) if masks is None else masks
    device = _check(models, data, recipes, given)
    _check_masks(models, held)
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(prepared(model, device))
        copies, data = {id(t): frozen_copy(t, device) for t in given if t is not None}, near(data, device)
        runs = [
            MaskedRun(model, data, recipe, copies.get(id(teacher)), mask or {})
            for model, recipe, teacher, mask in zip(models, recipes, given, held, strict=True)
        ]
        for position, run in enumerate(runs if len(runs) > 1 else ()):
            run.which = f" of model {position}"
        updates: Sequence[Run] = runs if updates_of is None else stack.enter_context(updates_of(runs))
        state = TrainingState(None if checkpoint_dir is None else Path(checkpoint_dir) / STATE, runs)
        _run_epochs(runs, updates, state, graphs, None if seconds is None else begun + seconds)
        for run in runs:
            run.use_average()
    return [run.history for run in runs]


def _run_epochs(
    runs: Sequence[Run], updates: Sequence[Run], state: TrainingState, graphs: bool, until: float | None
) -> None:
    """All epochs that are left, or those that end before the clock shows `until`, and one at least."""
    first, epochs = state.restore(), runs[0].recipe.epochs
    _check_each(runs, Run.check_weights)
    steps = [update.step for update in updates]
    step = RecordedStep(side_by_side(steps)) if graphs and runs[0].device.type == "cuda" else in_turn(steps)
    for epoch in range(first, epochs):
        begun = time.monotonic()
        _run_epoch(runs, updates, step, epoch)
        now = time.monotonic()
        late = until is not None and now + (now - begun) > until
        last = late or epoch + 1 == epochs
        for run in runs:
            run.note_accuracy(epoch, always=last)
        state.save(epoch + 1, always=last)
        if late:
            return


def _run_epoch(runs: Sequence[Run], updates: Sequence[Run], step: Step, epoch: int) -> None:
    """All steps of one epoch for all runs; the one wait for the device is at its end."""
    begun, steps = time.monotonic(), runs[0].steps_per_epoch
    seed_epoch(runs[0], epoch)
    for index, batches in enumerate(zip(*(run.epoch(epoch) for run in runs), strict=True)):
        for run, batch in zip(runs, batches, strict=True):
            run.feed(batch)
        for update in updates:
            update.set_rates(epoch * steps + index)
        step()
        if index % STEPS_BETWEEN_CHECKS == STEPS_BETWEEN_CHECKS - 1:
            _check_finite(runs, epoch)
    _check_finite(runs, epoch)
    seconds = time.monotonic() - begun
    for run in runs:
        run.note_epoch(epoch, seconds)


def _check_finite(runs: Sequence[Run], epoch: int) -> None:
    _check_each(runs, lambda run: run.check_loss(epoch))


def _check_each(runs: Sequence[Run], check: Callable[[Run], None]) -> None:
    """Tell which run it is that a check refuses."""
    for position, run in enumerate(runs):
        try:
            check(run)
        except HapError as error:
            raise NotFinite(str(error), position) from error


def _check(
    models: Sequence[nn.Module], data: Data, recipes: Sequence[Recipe], teachers: Sequence[nn.Module | None]
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
    for model, recipe, teacher in zip(models, recipes, teachers, strict=True):
        check_networks(model, data, recipe, teacher)
    return devices.pop()


def _check_masks(models: Sequence[nn.Module], masks: Sequence[Masks | None]) -> None:
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


def _like(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """The values laid out in memory like the parameter, as the update kernels want them."""
    return torch.empty_like(parameter, requires_grad=False).copy_(values)


def divide(path: Path, models: Sequence[int], out: Path) -> None:
    """Write the state of some of the models that trained side by side, which do not depend on each other, as that of
    a training of their own."""
    metadata, tensors = read_state(path)
    own = {key: [metadata[key][index] for index in models] for key in ("wiring", "recipes", "histories")}
    part: dict[str, Tensor] = {}
    for place, index in enumerate(models):
        part |= {f"{place}.{name}": tensor for name, tensor in under(f"{index}.", tensors).items()}
    write_state(out, metadata | own, part)

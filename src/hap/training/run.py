"""One model in training: its data, its history, and its state as a checkpoint keeps it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hap.data import Batch, Data
from hap.errors import HapError
from hap.training.recipes import Recipe
from hap.training.update import Masks, Update
from hap.utils import distributed


@dataclass
class History:
    """What happened in each epoch: one entry an epoch in every list.

    `loss` is the mean training loss, `lr` the rate of the last step, `accuracy` the share of the test split
    that is right (0 to 1, None where it was not evaluated), `seconds` the time of the training steps, and
    `images_per_second` this model's share of the throughput. For the last call alone, `stack` says of how many models
    the network was that ran (1: this one by itself), and `compiled` whether it was compiled.
    """

    loss: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    accuracy: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    images_per_second: list[float] = field(default_factory=list)
    stack: int = 1
    compiled: bool = False

    @property
    def epochs(self) -> int:
        """Epochs done; fewer than the recipe's when a time limit ended the training."""
        return len(self.loss)

    @property
    def final_accuracy(self) -> float | None:
        """Test accuracy after the last epoch done, never the best of several."""
        return self.accuracy[-1] if self.accuracy else None

    def to_dict(self) -> dict[str, list[Any]]:
        """The lists by name."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, list)}


class Run(Update):
    """A model in training, with its data and its history.

    Of several processes each takes its part of every batch, and gradients are averaged over all of them; the batch
    size of the recipe is that of all together.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        recipe: Recipe,
        teacher: nn.Module | None,
        device: torch.device,
        masks: Masks | None = None,
    ) -> None:
        self.model = model
        self.history = History()
        self.stack, self.compiled = 1, False
        self.size = min(recipe.batch, len(data.train))
        self.steps_per_epoch = len(data.train) // self.size
        share = (_own_share(self.size), *data.train.images.shape[1:])
        total = self.steps_per_epoch * recipe.epochs
        super().__init__(_in_step(model, device), model, recipe, teacher, device, masks or {}, share, total)

    def epoch(self, data: Data, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, which depend on the seed and the epoch alone."""
        self.loss_sum.zero_()
        generator = torch.Generator().manual_seed(epoch_seed(self.recipe, epoch))
        batches = data.epoch(self.size, generator, self.recipe.augment)
        own = slice(distributed.rank(), None, distributed.processes())
        return ((x[own], y[own]) for x, y in batches)

    def feed(self, batch: Batch) -> None:
        """Put a batch into the buffers."""
        self.x.copy_(batch[0])
        self.y.copy_(batch[1])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights; in place, since a recorded step knows tensors by address."""
        kept = {name: self.parameters[name].detach().clone() for name in self.average}
        self.use_average()
        try:
            yield
        finally:
            _copy_into(self.parameters, kept)

    def use_average(self) -> None:
        _copy_into(self.parameters, self.average)

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, as the checkpoint keeps it."""
        state = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        state |= {f"average.{name}": t for name, t in self.average.items()}
        for name, parameter in self.parameters.items():
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                state[f"momentum.{name}"] = momentum
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        _copy_into(self.model.state_dict(), _under("model.", state))
        _copy_into(self.average, _under("average.", state))
        for name, momentum in _under("momentum.", state).items():
            parameter = self.parameters[name]
            own = self.optimizer.state[parameter].setdefault("momentum_buffer", torch.empty_like(parameter))
            own.detach().copy_(momentum)


def _in_step(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself, or with several processes the model whose gradients are averaged over all of them."""
    if distributed.processes() == 1:
        return model
    return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def _own_share(batch: int) -> int:
    """This process's part of a batch; parts of one size, so that the mean over processes is that over samples."""
    if batch % distributed.processes():
        raise HapError(
            f"a batch of {batch} cannot be shared evenly by {distributed.processes()} processes; set --batch"
        )
    return batch // distributed.processes()


def epoch_seed(recipe: Recipe, epoch: int) -> int:
    """A seed of its own for every epoch, so that a resumed training needs no generator state."""
    return recipe.seed * 1_000_003 + epoch


@torch.no_grad()
def _copy_into(targets: dict[str, Any], sources: dict[str, Tensor]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

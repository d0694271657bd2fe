"""One model in training: the state that a step reads and writes, and the step itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hap import distributed
from hap.data import Batch, Data
from hap.errors import HapError
from hap.recipes import Recipe

Masks = Mapping[str, Tensor]
"""By name of a parameter, ones where it trains and zeros where it stays zero. Parameters without one train whole."""


@dataclass
class History:
    """What happened in each epoch: one entry an epoch in every list.

    `loss` is the mean training loss, `lr` the rate of the last step, `accuracy` the share of the test split
    that is right (0 to 1, None where it was not evaluated), `seconds` the time of the training steps, and
    `images_per_second` this model's share of the throughput.
    """

    loss: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    accuracy: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    images_per_second: list[float] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        """Epochs done; fewer than the recipe's when a time limit ended the training."""
        return len(self.loss)

    @property
    def final_accuracy(self) -> float | None:
        """Test accuracy after the last epoch done, never the best of several."""
        return self.accuracy[-1] if self.accuracy else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Run:
    """A model, its optimizer, its running average, and the fixed buffers that a step reads and writes.

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
        self.model, self.recipe, self.teacher, self.device = model, recipe, teacher, device
        self.history = History()
        self.size = min(recipe.batch, len(data.train))
        self.steps_per_epoch = len(data.train) // self.size
        self.network = _in_step(model, device)
        size = _own_share(self.size)
        self.total = self.steps_per_epoch * recipe.epochs
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masks = {n: _like(p, masks[n]) for n, p in self.parameters.items() if n in (masks or {})}  # type: ignore[index]
        self._mask()
        self.optimizer = _sgd(list(self.parameters.values()), recipe, device)
        self.average = {n: p.detach().clone() for n, p in self.parameters.items()} if recipe.ema else {}
        self.average_weight = torch.zeros((), device=device)
        self.x = torch.empty((size, *data.train.images.shape[1:]), device=device)
        if device.type == "cuda":
            self.x = self.x.to(memory_format=torch.channels_last)
        self.y = torch.empty(size, dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), device=device)

    def epoch(self, data: Data, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, which depend on the seed and the epoch alone."""
        self.loss_sum.zero_()
        generator = torch.Generator().manual_seed(epoch_seed(self.recipe, epoch))
        batches = data.epoch(self.size, generator, self.recipe.augment)
        own = slice(distributed.rank(), None, distributed.processes())
        return ((x[own], y[own]) for x, y in batches)

    def feed(self, batch: Batch, step: int) -> None:
        """Put a batch and the rates of step `step`, counted from the start of training, into the buffers."""
        self.x.copy_(batch[0])
        self.y.copy_(batch[1])
        rate = self.recipe.learning_rate(step, self.total)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        # A young average follows faster, so that the first weights do not linger in it.
        self.average_weight.fill_(1 - min(self.recipe.ema, (1 + step) / (10 + step)))

    def step(self) -> None:
        """One update from the buffers. Nothing is read back, which would fail while it is recorded."""
        loss = self._loss()
        loss.backward()
        self.optimizer.step()
        self._mask()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.detach()
        if self.average:
            averages = list(self.average.values())
            with torch.no_grad():
                change = torch._foreach_sub(list(self.parameters.values()), averages)
                torch._foreach_mul_(change, self.average_weight)
                torch._foreach_add_(averages, change)

    @torch.no_grad()
    def _mask(self) -> None:
        """Momentum and weight decay may move what is masked: it goes back to zero after every update."""
        if self.masks:
            torch._foreach_mul_([self.parameters[name] for name in self.masks], list(self.masks.values()))

    def _loss(self) -> Tensor:
        recipe = self.recipe
        # Cached casts would outlive the recording of a graph, hence no cache.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.precision == "bf16", cache_enabled=False):
            logits = self.network(self.x)
            with torch.no_grad():
                guide = self.teacher(self.x) if self.teacher is not None and recipe.distill else None
        loss = functional.cross_entropy(logits.float(), self.y, label_smoothing=recipe.label_smoothing)
        if guide is None:
            return loss
        student, target = (functional.log_softmax(t.float() / recipe.temperature, 1) for t in (logits, guide))
        divergence = functional.kl_div(student, target, reduction="batchmean", log_target=True)
        return (1 - recipe.distill) * loss + recipe.distill * recipe.temperature**2 * divergence

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
            self.optimizer.state[parameter]["momentum_buffer"] = _like(parameter, momentum)


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


def _sgd(parameters: list[nn.Parameter], recipe: Recipe, device: torch.device) -> torch.optim.SGD:
    """On CUDA the rate is a tensor, which a recorded step reads anew at every replay."""
    cuda = device.type == "cuda"
    return torch.optim.SGD(
        parameters,
        lr=torch.tensor(recipe.lr, device=device) if cuda else recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov,
        fused=cuda,
    )


def _like(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """The values laid out in memory like the parameter, as the update kernels want them."""
    return torch.empty_like(parameter, requires_grad=False).copy_(values)


@torch.no_grad()
def _copy_into(targets: dict[str, Any], sources: dict[str, Tensor]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

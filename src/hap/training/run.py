"""A network in training: the buffers that one step reads and writes, the step itself, its state, and its history."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hap.data import Batch, Data
from hap.errors import HapError
from hap.training.evaluation import device_of, evaluate
from hap.training.recipes import Recipe
from hap.utils import distributed


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

    def to_dict(self) -> dict[str, list[Any]]:
        """The lists by name."""
        return {entry.name: list(getattr(self, entry.name)) for entry in fields(History)}


class Run:
    """A network with its data, its optimizer, its running average, and the fixed buffers of a step.

    Of several processes each takes its part of every batch, and gradients are averaged over all of them; the batch
    size of the recipe is that of all together.
    """

    which = ""
    """Words of messages that tell this run from others beside it."""

    def __init__(self, model: nn.Module, data: Data, recipe: Recipe, teacher: nn.Module | None) -> None:
        self.model, self.data, self.recipe, self.teacher = model, data, recipe, teacher
        self.device = device_of(model)
        self.history = History()
        self.size = min(recipe.batch, len(data.train))
        self.steps_per_epoch = len(data.train) // self.size
        self.network = _in_step(model, self.device)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = _sgd(list(self.parameters.values()), recipe, self.device)
        self.optimizer.zero_grad(set_to_none=True)  # the caller's gradients are no part of the first step
        self.average = {n: p.detach().clone() for n, p in self.parameters.items()} if recipe.ema else {}
        self.average_weight = torch.zeros((), device=self.device)
        self.x = torch.empty((_own_share(self.size), *data.train.images.shape[1:]), device=self.device)
        if self.device.type == "cuda":
            self.x = self.x.to(memory_format=torch.channels_last)
        self.y = torch.empty(len(self.x), dtype=torch.int64, device=self.device)
        self.loss_sum = torch.zeros((), device=self.device)

    @property
    def total(self) -> int:
        """The steps of the whole training."""
        return self.steps_per_epoch * self.recipe.epochs

    # ---- an epoch -----------------------------------------------------------------------------------------------

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, which depend on the seed and the epoch alone."""
        self.loss_sum.zero_()
        generator = torch.Generator().manual_seed(epoch_seed(self.recipe, epoch))
        batches = self.data.epoch(self.size, generator, self.recipe.augment)
        own = slice(distributed.rank(), None, distributed.processes())
        return ((x[own], y[own]) for x, y in batches)

    def feed(self, batch: Batch) -> None:
        """Put a batch into the buffers."""
        self.x.copy_(batch[0])
        self.y.copy_(batch[1])

    def set_rates(self, step: int) -> None:
        """Put the rates of step `step`, counted from the start of training, where the step reads them."""
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
        loss = self.loss()
        loss.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.detach()
        if self.average:
            averages = list(self.average.values())
            with torch.no_grad():
                change = torch._foreach_sub(list(self.parameters.values()), averages)
                torch._foreach_mul_(change, self.average_weight)
                torch._foreach_add_(averages, change)

    def loss(self) -> Tensor:
        """The mean loss over the batch in the buffers."""
        logits, guide = self.logits()
        recipe = self.recipe
        loss = functional.cross_entropy(logits, self.y, label_smoothing=recipe.label_smoothing)
        if guide is None:
            return loss
        student, target = (functional.log_softmax(t / recipe.temperature, 1) for t in (logits, guide))
        divergence = functional.kl_div(student, target, reduction="batchmean", log_target=True)
        return (1 - recipe.distill) * loss + recipe.distill * recipe.temperature**2 * divergence

    def logits(self) -> tuple[Tensor, Tensor | None]:
        """What the network and, if it is asked, the teacher say of the batch, in single precision."""
        bf16 = self.recipe.precision == "bf16"
        # Cached casts would outlive the recording of a graph, hence no cache.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            logits = self.network(self.x).float()
            if self.teacher is None or not self.recipe.distill:
                return logits, None
            with torch.no_grad():
                return logits, self.teacher(self.x).float()

    def check_weights(self) -> None:
        """A network that is broken from the start is not one whose learning rate is too high."""
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                raise HapError(
                    f"{name}{self.which} is not finite before training: expected finite weights to start from"
                )

    def check_loss(self, epoch: int) -> None:
        """Refuse a loss that is not finite; this waits for the device."""
        loss = distributed.mean(self.loss_sum).item()
        if not math.isfinite(loss):
            raise HapError(
                f"the training loss{self.which} is {loss} in epoch {epoch + 1}: lower the learning "
                f"rate ({self.recipe.lr}) or raise warmup ({self.recipe.warmup}); the last checkpoint is kept"
            )

    def note_epoch(self, epoch: int, seconds: float) -> None:
        """Enter the steps of an epoch in the history."""
        steps = self.steps_per_epoch
        self.history.loss.append(distributed.mean(self.loss_sum).item() / steps)
        self.history.seconds.append(seconds)
        self.history.images_per_second.append(steps * self.size / seconds)
        self.history.lr.append(self.recipe.learning_rate((epoch + 1) * steps - 1, self.total))

    def note_accuracy(self, epoch: int, always: bool) -> None:
        """Enter the accuracy after an epoch in the history: None where the recipe does not ask for it."""
        due = always or (epoch + 1) % self.recipe.eval_every == 0
        distributed.broadcast_(self.model)  # running statistics are each process's own
        with self._averaged():
            self.history.accuracy.append(evaluate(self.model, self.data).accuracy if due else None)

    # ---- state --------------------------------------------------------------------------------------------------

    @contextmanager
    def _averaged(self) -> Iterator[None]:
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
        _copy_into(self.model.state_dict(), under("model.", state))
        _copy_into(self.average, under("average.", state))
        for name, momentum in under("momentum.", state).items():
            parameter = self.parameters[name]
            own = self.optimizer.state[parameter].setdefault("momentum_buffer", torch.empty_like(parameter))
            own.detach().copy_(momentum)

    def wiring(self) -> bytes:
        """What the network computes by beside its state: buffers that no state dict holds, such as where a pruned
        branch meets a stream."""
        stored = self.model.state_dict()
        return json.dumps({n: b.tolist() for n, b in self.model.named_buffers() if n not in stored}).encode()


def _in_step(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself, or with several processes the model whose gradients are averaged over all of them."""
    if distributed.processes() == 1:
        return model
    return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


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


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


@torch.no_grad()
def _copy_into(targets: dict[str, Any], sources: dict[str, Tensor]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)

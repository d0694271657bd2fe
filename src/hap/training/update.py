"""What one training step reads and writes, and the step itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from hap.training.recipes import Recipe

Masks = Mapping[str, Tensor]
"""By name of a parameter, ones where it trains and zeros where it stays zero. Parameters without one train whole."""


class Update:
    """A network, its optimizer, its running average, and the fixed buffers of a step.

    The network may be a stack of `width` models, with their inputs and logits one after another along dimension 1;
    labels are then (width, batch) and losses (width).
    """

    def __init__(
        self,
        network: nn.Module,
        model: nn.Module,
        recipe: Recipe,
        teacher: nn.Module | None,
        device: torch.device,
        masks: Masks,
        shape: tuple[int, ...],
        total: int,
        width: int = 1,
    ) -> None:
        """`network` runs `model`, whose parameters train, on inputs of `shape`, for `total` steps."""
        self.network, self.recipe, self.teacher, self.device = network, recipe, teacher, device
        self.total, self.width = total, width
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masks = {n: like(p, masks[n]) for n, p in self.parameters.items() if n in masks}
        self._mask()
        self.optimizer = _sgd(list(self.parameters.values()), recipe, device)
        self.optimizer.zero_grad(set_to_none=True)  # the caller's gradients are no part of the first step
        self.average = {n: p.detach().clone() for n, p in self.parameters.items()} if recipe.ema else {}
        self.average_weight = torch.zeros((), device=device)
        self.x = torch.empty(shape, device=device)
        if device.type == "cuda":
            self.x = self.x.to(memory_format=torch.channels_last)
        self.y = torch.empty((width, shape[0]), dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros(width, device=device)

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
        losses = self._losses()
        losses.sum().backward()
        self.optimizer.step()
        self._mask()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += losses.detach()
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

    def _losses(self) -> Tensor:
        """The mean loss of each model of the network over its batch."""
        recipe = self.recipe
        # Cached casts would outlive the recording of a graph, hence no cache.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.precision == "bf16", cache_enabled=False):
            logits = self._by_model(self.network(self.x))
            with torch.no_grad():
                guide = self._by_model(self.teacher(self.x)) if self.teacher is not None and recipe.distill else None
        smoothing = recipe.label_smoothing
        each = functional.cross_entropy(
            logits.flatten(0, 1), self.y.flatten(), reduction="none", label_smoothing=smoothing
        )
        losses = each.view_as(self.y).mean(1)
        if guide is None:
            return losses
        student, target = (functional.log_softmax(t / recipe.temperature, 2) for t in (logits, guide))
        divergences = functional.kl_div(student, target, reduction="none", log_target=True).sum(2).mean(1)
        return (1 - recipe.distill) * losses + recipe.distill * recipe.temperature**2 * divergences

    def _by_model(self, logits: Tensor) -> Tensor:
        """(batch, width * classes) as (width, batch, classes) in single precision."""
        return logits.float().unflatten(1, (self.width, -1)).transpose(0, 1)


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


def lay_out(model: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    """Convolution weights in a memory format, in place."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    return model


def like(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """The values laid out in memory like the parameter, as the update kernels want them."""
    return torch.empty_like(parameter, requires_grad=False).copy_(values)

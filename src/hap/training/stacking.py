"""Several networks of one shape as one: convolutions in groups, everything else over all channels at once.

Small networks leave a GPU waiting for kernels to start. In a stack each kernel does the work of all of them. Every
tensor of a stack is those of its models one after another along dimension 0, so a model's own is a part of it: the
models stay what they are, and see their weights change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.examples import evaluating
from hap.training.run import Run
from hap.training.update import Update, lay_out

KINDS = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
"""Layers with tensors of their own that a stack can hold."""
TOLERANCE = 1e-3
"""How far a stack's logits may be from its models', relative to the largest; kernels differ in rounding."""


class Linears(nn.Module):
    """Several Linear layers of one shape, on inputs one after another along the last dimension."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.width, -1))
        out = torch.einsum("...wi,woi->...wo", parts, self.weight.unflatten(0, (self.width, -1))).flatten(-2)
        return out if self.bias is None else out + self.bias


def stack(models: Sequence[nn.Module]) -> nn.Module:
    """One network of copies of the models' tensors. Its inputs and outputs are theirs along dimension 1."""
    width, made = len(models), copy.deepcopy(models[0])
    for name, module in list(made.named_modules()):
        members = [model.get_submodule(name) for model in models]
        if isinstance(module, nn.Conv2d):
            module.in_channels, module.out_channels = module.in_channels * width, module.out_channels * width
            module.groups *= width
        elif isinstance(module, nn.BatchNorm2d):
            module.num_features *= width
        elif isinstance(module, nn.Linear):
            module = Linears(width)
            made.set_submodule(name, module)
        for key, parameter in members[0].named_parameters(recurse=False):
            joined = torch.cat([member.get_parameter(key).detach() for member in members])
            module.register_parameter(key, nn.Parameter(joined, parameter.requires_grad))
        for key, value in members[0]._parameters.items():
            if value is None:
                module.register_parameter(key, None)
        for key, buffer in members[0].named_buffers(recurse=False):
            buffers = [member.get_buffer(key) for member in members]
            module.register_buffer(key, torch.cat(buffers) if buffer.ndim else buffer.clone())
    return made


class Stack(Update):
    """Runs of one shape and recipe that take their steps as one. Their tensors become parts of the stack's."""

    def __init__(self, runs: Sequence[Run], compiled: bool) -> None:
        self.runs, first, width = runs, runs[0], len(runs)
        model = _checked([run.model for run in runs], first.x)
        teachers = [run.teacher for run in runs if run.teacher is not None]
        teacher = _checked(teachers, first.x) if teachers else None
        size, channels, *sides = first.x.shape
        super().__init__(
            _compiled(model) if compiled else model, model, first.recipe,
            _compiled(teacher) if compiled and teacher is not None else teacher,
            first.device, _joined_masks(runs), (size, width * channels, *sides), first.total, width,
        )  # fmt: skip
        for index, run in enumerate(runs):
            self._share(index, run, model)

    def _share(self, index: int, run: Run, model: nn.Module) -> None:
        """Make the tensors of a run parts of the stack's."""

        def part(whole: Tensor) -> Tensor:
            return whole.detach().chunk(self.width)[index] if whole.ndim else whole

        for name, parameter in run.model.named_parameters():
            parameter.data = part(model.get_parameter(name))
        for name, _ in list(run.model.named_buffers()):
            _set_buffer(run.model, name, part(model.get_buffer(name)))
        run.x, run.y = self.x.chunk(self.width, 1)[index], self.y[index : index + 1]
        run.loss_sum = part(self.loss_sum)
        run.average = {name: part(self.average[name]) for name in run.average}
        if self.recipe.momentum:
            for name, whole in self.parameters.items():
                state = self.optimizer.state[whole]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(whole, requires_grad=False))
                run.optimizer.state[run.parameters[name]]["momentum_buffer"] = part(momentum)

    def release(self) -> None:
        """Give every model tensors of its own again."""
        for run in self.runs:
            for parameter in run.model.parameters():
                parameter.data = parameter.data.clone()
            for name, buffer in list(run.model.named_buffers()):
                _set_buffer(run.model, name, buffer.clone())


@contextmanager
def stacked_runs(runs: Sequence[Run], most: int, compiled: bool) -> Iterator[list[Update]]:
    """The runs as updates: up to `most` of one shape and recipe as a stack, the others each for itself."""
    alike: dict[object, list[Run]] = {}
    for run in runs:
        alike.setdefault(_kind(run) if most > 1 else id(run), []).append(run)
    parts = [group[i : i + most] for group in alike.values() for i in range(0, len(group), most)]
    updates: list[Update] = [Stack(part, compiled) if len(part) > 1 else part[0] for part in parts]
    try:
        yield updates
    finally:
        for update in updates:
            if isinstance(update, Stack):
                update.release()


def _kind(run: Run) -> object:
    """What runs of one stack have in common; a run that fits in no stack has a kind of its own."""
    networks = [run.model] if run.teacher is None else [run.model, run.teacher]
    if not all(_fits(module) for network in networks for module in network.modules()):
        return id(run)
    shapes = tuple((type(n), *((name, t.shape) for name, t in n.state_dict().items())) for n in networks)
    return shapes, replace(run.recipe, seed=0)


def _fits(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return type(module) in KINDS or not own


def _checked(models: Sequence[nn.Module], like: Tensor) -> nn.Module:
    """The stack of some models, after comparing what it computes with what they do."""
    made = stack(models)
    if like.is_cuda:
        lay_out(made, torch.channels_last)
    x = torch.randn(2, len(models) * like.shape[1], *like.shape[2:], device=like.device)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False), evaluating(made):
        found, expected = made(x), []
        for model, part in zip(models, x.chunk(len(models), 1), strict=True):
            with evaluating(model):
                expected.append(model(part))
    wanted = torch.cat(expected, 1)
    if found.shape != wanted.shape or not (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
        raise HapError(
            f"{type(models[0]).__name__} does not compute the same when {len(models)} of it are stacked, as where "
            "channels are mixed outside of layers: train with stack=1"
        )
    return made


def _joined_masks(runs: Sequence[Run]) -> dict[str, Tensor]:
    masked = {name for run in runs for name in run.masks}
    return {
        name: torch.cat([run.masks.get(name, torch.ones_like(run.parameters[name])).detach() for run in runs])
        for name in masked
    }


def _compiled(network: nn.Module) -> nn.Module:
    return torch.compile(network, dynamic=False)  # type: ignore[return-value]


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    model.get_submodule(owner)._buffers[key] = value

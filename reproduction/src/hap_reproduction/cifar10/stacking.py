"""Several networks of one shape as one: convolutions in groups, everything else over all channels at once.

Small networks leave a GPU waiting for kernels to start. In a stack each kernel does the work of all of them. Every
tensor of a stack is those of its models one after another along dimension 0, so a model's own is a part of it: the
models stay what they are, and see their weights change.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hap.data import Data
from hap.errors import HapError
from hap.training.loop import lay_out
from hap.training.recipes import Recipe
from hap.training.run import Run
from hap.utils.module_tree import named_tensors
from hap_reproduction.cifar10.training import MaskedRun, Together, train_many

KINDS = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
"""Layers with tensors of their own that a stack can hold."""
TOLERANCE = 1e-3
"""How far a stack's logits may be from a model's, relative to its largest; kernels differ in rounding."""
IMAGES = 8
"""How many images of noise a stack and its models are compared on."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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


def train_stacked(
    models: Sequence[nn.Module],
    data: Data,
    recipes: Sequence[Recipe],
    *,
    stack: int = 1,
    compiled: bool = False,
    **options: Any,
) -> list[Together]:
    """Train as `train_many` does, with up to `stack` models as one network.

    Models are stacked that differ in their weights alone, and whose recipes differ in the seed alone. Their tensors
    must be those of Conv2d, BatchNorm2d and Linear, without hooks; other models run as they are. `compiled` compiles
    stacks and nothing else. `Together.stack` and `Together.compiled` tell what was done.
    """
    if stack < 1:
        raise HapError(f"stack is {stack}; expected how many models may run as one network, 1 for none")
    updates_of = partial(stacked_runs, most=stack, compiled=compiled)
    return train_many(models, data, recipes, updates_of=updates_of, **options)


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
            module.register_buffer(key, torch.cat(buffers) if buffer.ndim else torch.stack(buffers))
    return made


class Stack(MaskedRun):
    """Runs of one kind and recipe that take their steps as one, while their tensors are `shared`.

    Inputs of the `width` models and their logits stand one after another along dimension 1; labels are (width, batch)
    and losses (width).
    """

    def __init__(self, runs: Sequence[MaskedRun], compiled: bool) -> None:
        self.runs, self.compiled, self.width, first = runs, compiled, len(runs), runs[0]
        model = _checked([run.model for run in runs], first.x)
        teachers = [run.teacher for run in runs if run.teacher is not None]
        teacher = _checked(teachers, first.x) if teachers else None
        super().__init__(model, first.data, first.recipe, teacher, _joined_masks(runs))
        if compiled:
            self.network = _compiled(model)
            self.teacher = None if teacher is None else _compiled(teacher)
        memory_format = torch.channels_last if first.x.is_cuda else torch.contiguous_format
        self.x = torch.cat([run.x for run in runs], 1).contiguous(memory_format=memory_format)
        self.y = torch.stack([run.y for run in runs])
        self.loss_sum = torch.stack([run.loss_sum for run in runs])

    def loss(self) -> Tensor:
        """The mean loss of each model over its batch."""
        recipe = self.recipe
        logits, guide = (None if t is None else self._by_model(t) for t in self.logits())
        assert logits is not None
        each = functional.cross_entropy(
            logits.flatten(0, 1), self.y.flatten(), reduction="none", label_smoothing=recipe.label_smoothing
        )
        losses = each.view_as(self.y).mean(1)
        if guide is None:
            return losses
        student, target = (functional.log_softmax(t / recipe.temperature, 2) for t in (logits, guide))
        divergences = functional.kl_div(student, target, reduction="none", log_target=True).sum(2).mean(1)
        return (1 - recipe.distill) * losses + recipe.distill * recipe.temperature**2 * divergences

    def _by_model(self, logits: Tensor) -> Tensor:
        """(batch, width * classes) as (width, batch, classes)."""
        return logits.unflatten(1, (self.width, -1)).transpose(0, 1)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the tensors of the runs are parts of the stack's; after it, every model has its own again."""
        try:
            for index, run in enumerate(self.runs):
                self._share(index, run)
            yield
        finally:
            for run in self.runs:
                _give_back(run.model)

    def _share(self, index: int, run: MaskedRun) -> None:
        def part(whole: Tensor) -> Tensor:
            return whole.detach().chunk(self.width)[index]

        run.history.stack, run.history.compiled = self.width, self.compiled
        for name, parameter in run.model.named_parameters():
            parameter.data = part(self.model.get_parameter(name))
        for name, buffer in list(run.model.named_buffers()):
            _set_buffer(run.model, name, part(self.model.get_buffer(name)).view_as(buffer))
        run.x, run.y = self.x.chunk(self.width, 1)[index], self.y[index]
        run.loss_sum = self.loss_sum[index]
        run.average = {name: part(self.average[name]) for name in run.average}
        if self.recipe.momentum:
            for name, whole in self.parameters.items():
                state = self.optimizer.state[whole]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(whole, requires_grad=False))
                run.optimizer.state[run.parameters[name]]["momentum_buffer"] = part(momentum)


@contextmanager
def stacked_runs(runs: Sequence[MaskedRun], most: int, compiled: bool) -> Iterator[list[Run]]:
    """The runs as fewer ones: up to `most` of one kind and recipe as a stack, the others each for itself.

    What was compiled before is forgotten: of one forward torch compiles a few shapes, and runs others as they are.
    """
    if compiled:
        torch.compiler.reset()
    alike: dict[object, list[MaskedRun]] = {}
    for run in runs:
        alike.setdefault(_kind(run) if most > 1 else id(run), []).append(run)
    parts = [group[i : i + most] for group in alike.values() for i in range(0, len(group), most)]
    with ExitStack() as held:
        updates: list[Run] = []
        for part in parts:
            if len(part) > 1:
                made = Stack(part, compiled)
                held.enter_context(made.shared())
                updates.append(made)
            else:
                updates.append(part[0])
        yield updates


def _kind(run: Run) -> object:
    """What runs of one stack have in common: all but weights and seed. What fits in no stack has a kind of its own."""
    networks = [run.model] if run.teacher is None else [run.model, run.teacher]
    if not all(_fits(network) for network in networks):
        return id(run)
    return tuple(_description(network) for network in networks), replace(run.recipe, seed=0)


def _fits(network: nn.Module) -> bool:
    """Whether a stack can stand for a network.

    Not with tensors in layers of other types or under two names, with hooks, which may do anything, or with statistics
    that need the number of batches so far.
    """
    for module in network.modules():
        if type(module) not in KINDS and _own_tensors(module):
            return False
        if isinstance(module, nn.BatchNorm2d) and module.momentum is None:
            return False
        if any(getattr(module, hooks) for hooks in HOOKS):
            return False
    tensors = list(named_tensors(network).values())
    hooked = any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors)
    return len({t.data_ptr() for t in tensors}) == len(tensors) and not hooked


def _description(network: nn.Module) -> object:
    """All that a network is but the values of its tensors: modules with their plain attributes, and tensors' shapes."""
    inner = vars(nn.Module()).keys() - {"training"}
    modules = tuple(
        (name, type(m), repr({key: value for key, value in vars(m).items() if key not in inner}))
        for name, m in network.named_modules()
    )
    return modules, tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in named_tensors(network).items())


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _checked(models: Sequence[nn.Module], like: Tensor) -> nn.Module:
    """The stack of some models, after a check that it computes what they do.

    Copies with random weights are compared, because weights such as a head of zeros would hide a difference: first in
    the mode in which the models are, then in eval mode, with the statistics that this left.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    copies = [_random_copy(model, generator) for model in models]
    shape = IMAGES, len(models) * like.shape[1], *like.shape[2:]
    x = torch.randn(shape, generator=generator, device=like.device)
    whole = stack(copies)
    _compare(whole, copies, x)
    _compare(whole.eval(), [model.eval() for model in copies], x)
    made = stack(models)
    return lay_out(made, torch.channels_last) if like.is_cuda else made


@torch.no_grad()
def _compare(whole: nn.Module, models: Sequence[nn.Module], x: Tensor) -> None:
    """Refuse a stack whose logits are not those of its models."""
    width = len(models)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wanted = torch.cat([model(part) for model, part in zip(models, x.chunk(width, 1), strict=True)], 1)
        try:
            found = whole(x)
        except RuntimeError as error:
            raise HapError(f"{type(models[0]).__name__} cannot be stacked ({error}): train with stack=1") from error
    if found.shape == wanted.shape:
        off, largest = (t.abs().unflatten(1, (width, -1)).amax((0, 2)) for t in (found - wanted, wanted))
        if (largest.isfinite() & (off < TOLERANCE * largest)).all():
            return
    raise HapError(
        f"{type(models[0]).__name__} does not compute the same when {width} of it are stacked, as where channels are "
        "mixed, or values dropped at random, outside of layers: train with stack=1"
    )


@torch.no_grad()
def _random_copy(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy with random weights and statistics, which keep the size of what they act on, and without dropout."""
    made = copy.deepcopy(model)
    for module in made.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, tensor in _own_tensors(module).items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
                about = 1.0 if name in ("weight", "running_var") else 0.0
                tensor.copy_(noise * (2 / tensor[0].numel()) ** 0.5 if tensor.ndim > 1 else about + 0.1 * noise)
    return made


def _joined_masks(runs: Sequence[MaskedRun]) -> dict[str, Tensor]:
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


def _give_back(model: nn.Module) -> None:
    """Give a model tensors of its own."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for name, buffer in list(model.named_buffers()):
        _set_buffer(model, name, buffer.clone())

"""EigenDamage (Wang et al., 2019): pruning in the eigenbasis of the Kronecker-factored curvature, as a peer of HAP.

Every convolution's curvature is taken to be A (x) S, A the second moments of its input channels and S those of the
gradients of its output channels. In the eigenbases of A and S the weight is Q_S^T W Q_A, and its rows and columns there
go by how much the loss is expected to rise, the least important of all layers first. What is left computes in three
steps: 1x1 into the eigenbasis, k x k inside it, 1x1 back.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.calling import eval_mode
from hap.execution.gram_regression import pairs
from hap.planning.budget import Budget
from hap.planning.cost import cost

Ranks = dict[str, tuple[int, int]]
"""By convolution: how many directions stay of its inputs and of its outputs."""
PER_AXIS = 0.95
"""The largest share of an axis that may go, as in HAP."""
CHUNK = 128


@dataclass(frozen=True)
class Rotated:
    """A convolution in its eigenbasis. `inputs` (c_in, c_in) and `outputs` (c_out, c_out) have eigenvectors as columns;
    `weight` is the rotated one; `columns` and `rows` are the importances of input and output directions."""

    inputs: Tensor
    outputs: Tensor
    weight: Tensor
    columns: Tensor
    rows: Tensor


def eigendamage_(
    model: nn.Module, example: Any, batches: Iterable[Any], *, params: float | None = None, flops: float | None = None
) -> Ranks:
    """Prune a classifier in place to one budget, the fraction LEFT of params or flops; returns the ranks that stay.

    `batches` are (input, target) pairs; the curvature is that of the cross-entropy in expectation over the model's own
    predictions, so the targets are not read. Grouped convolutions and linear layers are left alone. `rebuild_` with
    the ranks gives a fresh model the same shape.
    """
    rotated = rotate(model, batches)
    ranks, keep = _search(model, example, rotated, Budget(params=params, flops=flops))
    for name in ranks:
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        _replace(model, name, _filled(conv, rotated[name], *keep[name]))
    return ranks


def rebuild_(model: nn.Module, ranks: Mapping[str, Iterable[int]]) -> nn.Module:
    """The shape of the pruned model, in place, with weights that a checkpoint is about to overwrite."""
    for name, (inputs, outputs) in ranks.items():
        conv = model.get_submodule(name)
        if not isinstance(conv, nn.Conv2d):
            raise HapError(f"{name} is a {type(conv).__name__}; expected the dense model's convolution")
        _replace(model, name, _stack(conv, inputs, outputs))
    return model


def eligible(model: nn.Module) -> dict[str, nn.Conv2d]:
    """The convolutions that can be written as a bottleneck."""
    found = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.groups == 1)
    return {n: m for n, m in found if not isinstance(m.padding, str) and m.padding_mode == "zeros"}


def rotate(model: nn.Module, batches: Iterable[Any]) -> dict[str, Rotated]:
    """Every eligible convolution in the eigenbasis of its factors, in float64."""
    found = {}
    for name, (a, s) in factors(model, batches).items():
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        (la, qa), (ls, qs) = torch.linalg.eigh(a), torch.linalg.eigh(s)
        weight = torch.einsum("os,oikl,ij->sjkl", qs, conv.weight.detach().double(), qa)
        damage = 0.5 * weight.square().sum((2, 3)) * ls.clamp_min(0)[:, None] * la.clamp_min(0)
        found[name] = Rotated(qa, qs, weight, damage.sum(0), damage.sum(1))
    return found


def factors(model: nn.Module, batches: Iterable[Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and S of each eligible convolution: means over the samples of (mean over positions of a a^T) and of (sum over
    positions and classes of g g^T), so that A (x) S stands for the curvature of the mean loss at each kernel tap.

    The expectation over the model's predictions q is taken in full: with s_c = sqrt(q_c) (e_c - q) the Hessian of the
    cross-entropy in the logits is the sum of s_c s_c^T, so one backward pass per class gives all gradients g.
    """
    convs = eligible(model)
    device = next(model.parameters()).device
    sums = {n: (_square(m.in_channels, device), _square(m.out_channels, device)) for n, m in convs.items()}
    count = 0
    with eval_mode(model):
        for batch, _ in pairs(batches, device):
            for x in batch.split(CHUNK):
                _add(model, convs, x, sums)
                count += len(x)
    return {n: (a / count, s / count) for n, (a, s) in sums.items()}


def _square(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, size, dtype=torch.float64, device=device)


def _add(model: nn.Module, convs: dict[str, nn.Conv2d], x: Tensor, sums: dict[str, tuple[Tensor, Tensor]]) -> None:
    with torch.enable_grad(), _recording(convs) as (inputs, outputs):
        logits = model(x.detach().requires_grad_())  # then every convolution's output has a gradient
    names = list(outputs)
    for name in names:
        rows = inputs[name].movedim(1, -1).flatten(0, -2).double()
        sums[name][0].add_(rows.t() @ rows, alpha=len(x) / len(rows))
    predicted = logits.detach().softmax(1)
    for c in range(logits.shape[1]):
        vector = predicted[:, c, None].sqrt() * (F.one_hot(torch.tensor(c), logits.shape[1]).to(predicted) - predicted)
        back = torch.autograd.grad(logits, [outputs[n] for n in names], vector, retain_graph=True)
        for name, gradient in zip(names, back, strict=True):
            rows = gradient.movedim(1, -1).flatten(0, -2).double()
            sums[name][1].addmm_(rows.t(), rows)


@contextmanager
def _recording(convs: dict[str, nn.Conv2d]) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """What enters and leaves each convolution in the forward pass inside."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), output

        return hook

    hooks = [conv.register_forward_hook(note(name)) for name, conv in convs.items()]
    try:
        yield inputs, outputs
    finally:
        for hook in hooks:
            hook.remove()


# ---- how far to go ------------------------------------------------------------------------------------------

Keep = dict[str, tuple[Tensor, Tensor]]
"""By convolution: the input and the output directions that stay, as indices."""


def _search(model: nn.Module, example: Any, rotated: dict[str, Rotated], budget: Budget) -> tuple[Ranks, Keep]:
    """The smallest number of directions to remove, least important first, that meets the budget."""
    if len(budget.given) > 1:
        raise HapError(f"the budget is on {' and '.join(budget.given)}; EigenDamage takes either params= or flops=")
    (kind, fraction), *_ = budget.given.items()
    price = _Price(model, example, kind)
    target = math.floor(fraction * price.dense)
    axes = [(n, side) for n in rotated for side in ("columns", "rows")]
    order = _removal_order(rotated, axes)
    low, high = -1, len(order)
    if price(_kept(rotated, axes, order)) > target:
        raise HapError(f"{kind}={fraction} cannot be reached with {PER_AXIS:.0%} of each axis gone")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if price(_kept(rotated, axes, order[:middle])) <= target else (middle, high)
    keep = _kept(rotated, axes, order[:high])
    cheaper = {n: (len(i), len(o)) for n, (i, o) in keep.items() if price.saves(n, len(i), len(o))}
    return cheaper, {n: keep[n] for n in cheaper}


def _removal_order(rotated: dict[str, Rotated], axes: list[tuple[str, str]]) -> list[tuple[int, int]]:
    """(axis, direction) of all that may go, least important first."""
    ranked = []
    for number, (name, side) in enumerate(axes):
        values = getattr(rotated[name], side)
        allowed = min(math.floor(PER_AXIS * len(values)), len(values) - 1)
        ranked += [(float(values[i]), number, i) for i in values.argsort(stable=True)[:allowed].tolist()]
    return [(number, i) for _, number, i in sorted(ranked)]


def _kept(rotated: dict[str, Rotated], axes: list[tuple[str, str]], gone: list[tuple[int, int]]) -> Keep:
    stay = [torch.ones(len(getattr(rotated[name], side)), dtype=torch.bool) for name, side in axes]
    for number, direction in gone:
        stay[number][direction] = False
    left = [mask.nonzero().flatten() for mask in stay]
    return {name: (left[2 * i], left[2 * i + 1]) for i, name in enumerate(rotated)}


class _Price:
    """Parameters or multiply-adds of the model when some convolutions are bottlenecks, each where that is cheaper."""

    def __init__(self, model: nn.Module, example: Any, kind: str):
        count = cost(model, example)
        self.kind, self.convs = kind, eligible(model)
        self.dense = count.params if kind == "params" else count.macs
        with torch.no_grad(), eval_mode(model), _recording(self.convs) as (inputs, outputs):
            model(example)
        self.areas = {n: (inputs[n][:, 0].numel(), outputs[n][:, 0].numel()) for n in outputs}

    def __call__(self, keep: Keep) -> int:
        return self.dense + sum(min(0, self._change(n, len(i), len(o))) for n, (i, o) in keep.items())

    def saves(self, name: str, inputs: int, outputs: int) -> bool:
        return self._change(name, inputs, outputs) < 0

    def _change(self, name: str, inputs: int, outputs: int) -> int:
        conv, (area_in, area_out) = self.convs[name], self.areas[name]
        total = 0
        for shape in [None, *_shapes(conv, inputs, outputs)]:
            c_in, c_out, kernel, first = shape or (conv.in_channels, conv.out_channels, conv.kernel_size, False)
            size = c_in * c_out * math.prod(kernel) * (1 if shape else -1)
            total += size if self.kind == "params" else size * (area_in if first else area_out)
        return total


# ---- the bottleneck -----------------------------------------------------------------------------------------


Shape = tuple[int, int, tuple[int, ...], bool]


def _shapes(conv: nn.Conv2d, inputs: int, outputs: int) -> list[Shape]:
    """Inputs, outputs and kernel of each step, and whether it runs on the input's map. A side that keeps all its
    directions needs no rotation; a 1x1 core is merged into one of the rotations."""
    c_in, c_out, one = conv.in_channels, conv.out_channels, (1, 1)
    if math.prod(conv.kernel_size) == 1:
        rank = min(inputs, outputs)
        if rank == min(c_in, c_out):
            return [(c_in, c_out, one, False)]
        return [(c_in, rank, one, False), (rank, c_out, one, False)]
    before: list[Shape] = [(c_in, inputs, one, True)] if inputs < c_in else []
    after: list[Shape] = [(outputs, c_out, one, False)] if outputs < c_out else []
    return [*before, (inputs, outputs, conv.kernel_size, False), *after]


def _stack(conv: nn.Conv2d, inputs: int, outputs: int) -> nn.Sequential:
    """The steps as convolutions. The one with the kernel has its stride and padding, the last one its bias."""
    shapes = _shapes(conv, inputs, outputs)
    core = 0 if math.prod(conv.kernel_size) == 1 else next(i for i, s in enumerate(shapes) if s[2] == conv.kernel_size)
    biased, steps = conv.bias is not None, []
    for i, (c_in, c_out, kernel, _) in enumerate(shapes):
        step = nn.Conv2d(c_in, c_out, kernel, bias=biased and i == len(shapes) - 1)  # type: ignore[arg-type]
        if i == core:
            step.stride, step.padding, step.dilation = conv.stride, conv.padding, conv.dilation
        steps.append(step)
    return nn.Sequential(*steps).to(conv.weight.device, conv.weight.dtype).train(conv.training)


@torch.no_grad()
def _filled(conv: nn.Conv2d, rotated: Rotated, inputs: Tensor, outputs: Tensor) -> nn.Sequential:
    """The bottleneck that computes what the kept directions do."""
    stack = _stack(conv, len(inputs), len(outputs))
    into, back = rotated.inputs[:, inputs].t(), rotated.outputs[:, outputs]
    core = rotated.weight[outputs][:, inputs]
    if math.prod(conv.kernel_size) == 1:
        core = core[:, :, 0, 0]
        weights = [into, back @ core] if len(inputs) <= len(outputs) else [core @ into, back]
    else:
        if len(inputs) == conv.in_channels:
            core = torch.einsum("sjkl,ij->sikl", core, rotated.inputs)
        if len(outputs) == conv.out_channels:
            core = torch.einsum("os,sjkl->ojkl", rotated.outputs, core)
        weights = [
            *([into] if len(inputs) < conv.in_channels else []),
            core,
            *([back] if len(outputs) < conv.out_channels else []),
        ]
    for step, weight in zip(stack, weights, strict=True):
        assert isinstance(step, nn.Conv2d)
        step.weight.copy_(weight.reshape(step.weight.shape))
    if conv.bias is not None:
        last = stack[-1].bias
        assert isinstance(last, Tensor)
        last.copy_(conv.bias)
    return stack


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)

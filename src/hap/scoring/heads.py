"""Criteria for attention heads: all that a head owns as one group of parameters, or a gate on its output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hap import distributed
from hap.errors import HapError
from hap.groups import Group, Groups, Producer
from hap.scoring.base import (
    Batch,
    Criterion,
    Problem,
    Scores,
    check_alone,
    check_targets,
    fold,
    is_per_sample,
    samples,
)
from hap.scoring.gradients import OBD, DiagonalFisher, Taylor
from hap.scoring.hessian import quadratics
from hap.scoring.simple import L1, Magnitude

METHODS = ("hutchinson", "gauss-newton")


def owned(groups: Groups, group: Group) -> tuple[Producer, ...]:
    """All that a unit owns: the slices that compute it, and the slices that read it. Of a head these are the query,
    key, value and output slices."""
    unit = np.full(groups.classes, -1, dtype=np.int64)
    unit[group.classes] = np.arange(len(group))
    readers = [Producer(weight, dim, unit[groups.axes[weight, dim]]) for weight, dim in group.consumers]
    return (*group.producers, *readers)


def whole(problem: Problem) -> Problem:
    """The same problem in which a unit owns the slices that read it as well as those that compute it."""
    groups = problem.groups
    grown = {n: replace(g, producers=owned(groups, g)) for n, g in groups.items()}
    return replace(problem, groups=replace(groups, groups=grown))


@dataclass(frozen=True)
class Whole(Criterion):
    """Another criterion over all that a unit owns: of a head the query, key, value and output slices. The magnitude is
    the mean square over all of them, however the model stores them.

    Only criteria that look at each weight by itself can be asked about slices along any axis.
    """

    of: Criterion

    name: ClassVar[str] = "whole"

    def __post_init__(self) -> None:
        if not isinstance(self.of, Magnitude | L1 | Taylor | DiagonalFisher | OBD):
            raise HapError(
                f"Whole cannot be of {type(self.of).__name__}; expected Magnitude, L1, Taylor, DiagonalFisher or OBD. "
                "For the Hessian's trace over all of a unit use JointTrace."
            )

    def scores(self, problem: Problem) -> Scores:
        problem = whole(problem)
        return Scores(_mean_squares(problem)) if isinstance(self.of, Magnitude) else self.of.scores(problem)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "of": self.of.to_dict()}


@dataclass(frozen=True)
class JointTrace(Criterion):
    """Equation 6, trace(H_pp) / (2 |p|) * ||w_p||^2, with all that a unit owns as one group of parameters p: of a head
    the query, key, value and output slices, as in the paper's experiment on heads.

    "hutchinson"    the Hessian, by `probes` random sign vectors. One graph of one batch and one probe are held at a
                    time, so the size of the batches bounds the memory. Gives standard errors. `deflate` is that of
                    `HessianTrace`: less noise, for the memory of two copies of the weights for each direction.
    "gauss-newton"  J^T B J instead of the Hessian, B the curvature of the cross-entropy in the outputs: `draws` random
                    sign combinations of the columns of a root of B for each sample, where Fisher's way would draw
                    labels; unbiased like that, but without its rare large values on confident samples. Gradients are
                    squared sample by sample, and their memory is that of one layer at a time.
    """

    method: str = "hutchinson"
    probes: int = 100
    draws: int = 1
    seed: int = 0
    deflate: int = 0

    name: ClassVar[str] = "joint"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise HapError(f"method is {self.method!r}; expected one of {', '.join(map(repr, METHODS))}")
        if self.probes < 2 or self.draws < 1 or self.deflate < 0:
            raise HapError(
                f"probes={self.probes}, draws={self.draws}, deflate={self.deflate}; "
                "expected at least 2 probes, 1 draw and 0 directions"
            )

    def scores(self, problem: Problem) -> Scores:
        inner = _input_axes(problem)
        problem = whole(problem)
        if self.method == "hutchinson":
            _refuse_half(problem)
            probed = _deflated if self.deflate else _probed
            count, traces = self.probes, probed(problem, self)
        else:
            count, traces = self.draws, _drawn(problem, inner, self.draws, self.seed)
        _check_finite(traces, "a Hessian product" if self.method == "hutchinson" else "a squared gradient")
        values = traces * torch.cat(list(_mean_squares(problem).values())) / 2
        sizes = [len(g) for g in problem.groups.values()]
        mean = dict(zip(problem.groups, values.mean(0).split(sizes), strict=True))
        about = {"method": self.method, "probes" if self.method == "hutchinson" else "draws": count}
        if self.method != "hutchinson":
            return Scores(mean, about=about)
        error = values.std(0) / count**0.5
        about |= {"deflate": self.deflate} if self.deflate else {}
        return Scores(mean, dict(zip(problem.groups, error.split(sizes), strict=True)), about)


def _refuse_half(problem: Problem) -> None:
    """Second derivatives in half precision are mostly rounding."""
    for name, weight in problem.weights.items():
        if weight.dtype in (torch.float16, torch.bfloat16):
            kind = str(weight.dtype).removeprefix("torch.")
            raise HapError(
                f"{name} is in {kind}, too coarse for second derivatives; call model.float() first, or use "
                'JointTrace("gauss-newton")'
            )


def _check_finite(values: Tensor, what: str) -> None:
    if not torch.isfinite(values).all():
        raise HapError(f"{what} is not finite; check the model's weights, or score in float32")


def _mean_squares(problem: Problem) -> dict[str, Tensor]:
    """||w_p||^2 / |p| for each unit, over all its slices together."""
    norms = problem.assemble(partial(problem.sum_of, torch.square))
    sizes = problem.assemble(problem.sizes)
    return {n: norms[n] / sizes[n].clamp_min(1) for n in norms}


def _deflated(problem: Problem, how: JointTrace) -> Tensor:
    """Estimates as those of `_probed`, with what the Hessian's leading directions contribute known exactly."""
    blocks = quadratics(problem, how.probes, 1, how.seed, how.deflate)
    probes = ({n: q[i] for n, q in block.items()} for block in blocks for i in range(len(next(iter(block.values())))))
    return torch.stack(
        [_per_unit(problem, lambda g, p, e=elements: problem.per_unit(g, p, e[p.weight])) for elements in probes]
    )


def _probed(problem: Problem, how: JointTrace) -> Tensor:
    """v^T H_pp v for every probe and unit (probes, units): a double backward per probe and batch.

    Products are summed along the axes of units, and folded into units once, since that waits for the device.
    """
    device = next(iter(problem.weights.values())).device
    axes = dict.fromkeys((p.weight, p.dim) for g in problem.groups.values() for p in g.producers)
    sums = {
        (name, dim): torch.zeros(how.probes, problem.weights[name].shape[dim], dtype=torch.float64, device=device)
        for name, dim in axes
    }
    for batch, share in zip(problem.batches, problem.shares(), strict=True):
        weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            _, loss = problem.evaluate(weights, batch)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
        for probe in range(how.probes):
            signs = _signs(weights, device, how.seed * 1_000_003 + probe)
            products = torch.autograd.grad(slopes, list(weights.values()), signs, True, materialize_grads=True)
            elements = {n: v * p for n, v, p in zip(weights, signs, products, strict=True)}
            for (name, dim), total in sums.items():
                total[probe] += share * _sum_along(elements[name], dim)
    distributed.sum_(sums.values())
    return _per_unit(problem, lambda g, p: fold(g, p, sums[p.weight, p.dim]))


def _sum_along(values: Tensor, dim: int) -> Tensor:
    """The sum over all other axes, in float64."""
    rest = [d for d in range(values.ndim) if d != dim]
    return values.sum(rest, dtype=torch.float64) if rest else values.double()


def _signs(weights: dict[str, Tensor], device: torch.device, seed: int) -> list[Tensor]:
    """The same probe for every batch, drawn again each time instead of being kept."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randint(0, 2, w.shape, generator=generator, device=device).to(w).mul_(2).sub_(1) for w in weights.values()
    ]


def _per_unit(problem: Problem, formula: Any) -> Tensor:
    """One value per unit on the last axis, the units of all groups one after the other."""
    return torch.cat(list(problem.assemble(formula).values()), dim=-1)


# ---- the Gauss-Newton trace -----------------------------------------------------------------------------------


def _input_axes(problem: Problem) -> dict[str, int]:
    """Which axis of each matrix its layer reads with: the one across from that of the units it computes."""
    axes: dict[str, int] = {}
    for group in problem.groups.values():
        axes |= {p.weight: 1 - p.dim for p in group.producers} | dict(group.consumers)
    return axes


def _drawn(problem: Problem, inner: dict[str, int], draws: int, seed: int) -> Tensor:
    """Unbiased estimates of trace(J_p^T B J_p), B of the mean cross-entropy, for every draw and unit."""
    device = next(iter(problem.weights.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.zeros(draws, problem.groups.units, dtype=torch.float64, device=device)
    for batch, share in zip(problem.batches, problem.shares(), strict=True):
        check_targets(batch)
        weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
        with torch.enable_grad(), _watching(problem) as seen:
            output, loss = problem.evaluate(weights, batch)
        _check_seen(weights, seen.inputs, 'use JointTrace(method="hutchinson")')
        if batch is problem.batches[0]:
            with _watching(problem) as alone:
                problem.last_alone(batch)
            _check_samples_first(batch, seen.inputs, alone.inputs)
        logits = _logits(output, loss, batch)
        for draw in range(draws):
            squares = _row_squares(problem, inner, seen, logits, _root_times_signs(logits, generator))
            units = _per_unit(problem, lambda g, p, s=squares: fold(g, p, s[p.weight, p.dim]))
            values[draw] += share / len(logits) * units
    distributed.sum_([values])
    return values


def _logits(output: Any, loss: Tensor, batch: Batch) -> Tensor:
    """The model's outputs, one vector per sample, if the loss is their cross-entropy."""
    logits = getattr(output, "logits", output)
    target = batch[1]
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not isinstance(target, Tensor):
        raise HapError('the output is not one vector per sample; use JointTrace(method="hutchinson")')
    slope = torch.autograd.grad(loss, logits, retain_graph=True, materialize_grads=True)[0].double()
    plain = [_slope_of_cross_entropy(logits, target, dtype).double() for dtype in {loss.dtype, torch.float32}]
    off = min(float((slope - p).norm() / p.norm().clamp_min(1e-30)) for p in plain)
    if off > max(1e-4, torch.finfo(loss.dtype).eps / 2):
        raise HapError(
            f"the loss is not the cross-entropy of the outputs: its gradient in them is off by {off:.2g}, relative; "
            'this method knows the cross-entropy alone. Use JointTrace(method="hutchinson").'
        )
    return logits


@torch.enable_grad()
def _slope_of_cross_entropy(logits: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient in the outputs of their cross-entropy, computed in a dtype. It tells apart losses whose values are
    close, as those with and without label smoothing are where all classes are about as probable."""
    outputs = logits.detach().requires_grad_()
    loss = F.cross_entropy(outputs.to(dtype), target.to(dtype) if target.is_floating_point() else target)
    return torch.autograd.grad(loss, outputs)[0]


def _root_times_signs(logits: Tensor, generator: torch.Generator) -> Tensor:
    """S e for random signs e, with S S^T = diag(q) - q q^T and q the probabilities: S = (1 - q 1^T) diag(sqrt(q))."""
    q = logits.detach().double().softmax(-1)
    signs = torch.randint(0, 2, q.shape, generator=generator, device=q.device).to(q) * 2 - 1
    root = q.sqrt() * signs
    return (root - q * root.sum(-1, keepdim=True)).to(logits.dtype)


@dataclass
class _Seen:
    """What went in and out of layers during one forward pass, by the layer's name."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def _watching(problem: Problem) -> Iterator[_Seen]:
    """Notes what enters and leaves the layers that own the problem's weights."""
    modules, seen, hooks = dict(problem.model.named_modules()), _Seen(), []
    for name in dict.fromkeys(weight.rpartition(".")[0] for weight in problem.weights):

        def note(module: Any, args: Any, output: Any, name: str = name) -> None:
            if name in seen.inputs:
                raise HapError(f"{name} runs more than once in a forward pass, so its samples cannot be told apart")
            if args and isinstance(output, Tensor):
                seen.inputs[name], seen.outputs[name] = args[0], output

        hooks.append(modules[name].register_forward_hook(note, prepend=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _check_seen(weights: Iterable[str], inputs: Mapping[str, Tensor], instead: str) -> None:
    """Some modules use the weight of another one, or are called in a way that a hook cannot follow."""
    for weight in weights:
        if weight not in inputs and weight.rpartition(".")[0] not in inputs:
            raise HapError(f"what {weight} is applied to is hidden from the layer that owns it; {instead}")


def _check_samples_first(batch: Batch, inputs: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> None:
    """Refuse layers whose input does not hold one sample at each index of its first axis, where sizes do not tell."""
    count = samples(batch)
    whole = {f"what {name} reads": x for name, x in inputs.items() if is_per_sample(x, count)}
    check_alone(whole, {f"what {name} reads": x for name, x in alone.items()})


def _row_squares(
    problem: Problem, inner: dict[str, int], seen: _Seen, logits: Tensor, vector: Tensor
) -> dict[tuple[str, int], Tensor]:
    """For each slice's (weight, axis): sum over samples of the squared gradient, for every index of that axis."""
    layers = {weight: weight.rpartition(".")[0] for weight in problem.weights}
    back = torch.autograd.grad(
        logits, [seen.outputs[layers[w]] for w in layers], vector, retain_graph=True, materialize_grads=True
    )
    squares = {}
    for weight, gradient in zip(layers, back, strict=True):
        x, axis = seen.inputs[layers[weight]].detach(), inner[weight]
        _check_matrix(weight, tuple(problem.weights[weight].shape), axis, x, gradient, len(logits))
        each = x.flatten(1, -2).transpose(1, 2) @ gradient.flatten(1, -2)  # a sample's gradient: (inputs, outputs)
        square = each.to(torch.promote_types(each.dtype, torch.float32)).square_().sum(0, dtype=torch.float64)
        squares[weight, axis], squares[weight, 1 - axis] = square.sum(1), square.sum(0)
    return squares


def _check_matrix(weight: str, shape: tuple[int, ...], axis: int, x: Tensor, gradient: Tensor, count: int) -> None:
    expected = (x.shape[-1], gradient.shape[-1]) if axis == 0 else (gradient.shape[-1], x.shape[-1])
    if x.ndim < 3 or len(x) != count or len(gradient) != count or shape != expected:
        raise HapError(
            f"{weight} of shape {shape} turns {tuple(x.shape)} into {tuple(gradient.shape)}, which is no matrix "
            'applied to the last axis of every sample; use JointTrace(method="hutchinson")'
        )


# ---- the gradient of a gate -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateGradient(Criterion):
    """Mean over samples of |dL/dgate|, the gate a factor 1 on what a unit hands on (Michel et al., 2019).

    `per_layer` divides the scores of each group by their Euclidean norm, as its authors do.
    """

    per_layer: bool = True

    name: ClassVar[str] = "gate-gradient"

    def scores(self, problem: Problem) -> Scores:
        totals = {
            n: torch.zeros(len(g), dtype=torch.float64, device=next(iter(problem.weights.values())).device)
            for n, g in problem.groups.items()
        }
        for batch, share in zip(problem.batches, problem.shares(), strict=True):
            for name, value in self._batch(problem, batch).items():
                totals[name] += share * value
        distributed.sum_(totals.values())
        _check_finite(torch.cat(list(totals.values())), "the gradient of a gate")
        if self.per_layer:
            totals = {n: v / v.norm().clamp_min(1e-300) for n, v in totals.items()}
        return Scores(totals, about={"per_layer": self.per_layer})

    @staticmethod
    def _batch(problem: Problem, batch: Batch) -> dict[str, Tensor]:
        weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
        readers = {(n, r.weight, r.dim): r for n, g in problem.groups.items() for r in _readers(problem, n, g)}
        count = samples(batch)
        check_targets(batch)
        with torch.enable_grad(), _reading(problem, [weight for _, weight, _ in readers]) as inputs:
            _, loss = problem.evaluate(weights, batch)
            _check_seen((weight for _, weight, _ in readers), inputs, "use another criterion")
            slopes = dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))
        if batch is problem.batches[0]:
            with _reading(problem, list(inputs)) as alone:
                problem.last_alone(batch)
            _check_samples_first(batch, inputs, alone)
        gates: dict[str, Tensor] = {}
        for (name, weight, _), reader in readers.items():
            x, slope, group = inputs[weight].detach(), slopes[weight], problem.groups[name]
            if x.ndim < 2 or len(x) != count or x.shape[-1] != len(reader.unit):
                raise HapError(f"{weight} does not read {name} on the last axis of every sample: {tuple(x.shape)}")
            gate = fold(group, reader, (x * slope).flatten(1, -2).sum(1) if x.ndim > 2 else x * slope)
            gates[name] = gates.get(name, torch.zeros_like(gate)) + gate
        return {n: count * g.abs().mean(0) for n, g in gates.items()}  # the loss is a mean over the samples


def _readers(problem: Problem, name: str, group: Group) -> tuple[Producer, ...]:
    readers = owned(problem.groups, group)[len(group.producers) :]
    if not readers:
        raise HapError(f"no layer reads group {name!r}, so a gate on it has no gradient; use another criterion")
    return readers


@contextmanager
def _reading(problem: Problem, weights: list[str]) -> Iterator[dict[str, Tensor]]:
    """What enters the layers that own these weights, with its graph."""
    modules, inputs, hooks = dict(problem.model.named_modules()), {}, []
    for weight in weights:

        def note(module: Any, args: Any, weight: str = weight) -> None:
            if weight in inputs:
                raise HapError(f"{weight} is used more than once in a forward pass, so its gate has no one gradient")
            if args:
                inputs[weight] = args[0]

        hooks.append(modules[weight.rpartition(".")[0]].register_forward_pre_hook(note))
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()

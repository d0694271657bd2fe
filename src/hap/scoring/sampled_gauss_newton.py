"""Traces of the Gauss-Newton matrix by sampled outputs, for units with several slices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.errors import HapError
from hap.scoring.base import ScoringContext
from hap.scoring.batch import Batch
from hap.scoring.input_checks import check_targets
from hap.scoring.layer_calls import Calls, check_recorded, check_samples_first, recorded_calls
from hap.utils import distributed


def drawn_squares(
    problem: ScoringContext, inner: dict[str, int], draws: int, seed: int
) -> dict[tuple[str, int], Tensor]:
    """Unbiased estimates of trace(J_p^T B J_p), B of the mean cross-entropy, for every draw and index p of an axis of a
    weight: (draws, length). `inner` is the axis that a weight's layer reads with."""
    device = problem.device
    generator = torch.Generator(device).manual_seed(seed)
    axes = [(name, dim) for name in problem.weights for dim in (0, 1)]
    totals = {
        (n, d): problem.weights[n].new_zeros(draws, problem.weights[n].shape[d], dtype=torch.float64) for n, d in axes
    }
    for batch, share in zip(problem.batches, problem.shares(), strict=True):
        check_targets(batch)
        weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
        with torch.enable_grad(), recorded_calls(problem.model, weights) as calls:
            output, loss = problem.evaluate(weights, batch)
        check_recorded(weights, calls, 'use JointTrace(method="hutchinson")')
        if batch is problem.batches[0]:
            with recorded_calls(problem.model, weights) as alone:
                problem.last_alone(batch)
            check_samples_first(batch, calls, alone)
        logits = _logits(output, loss, batch)
        for draw in range(draws):
            squares = _row_squares(problem, inner, calls, logits, _root_times_signs(logits, generator))
            for axis, values in squares.items():
                totals[axis][draw] += share / len(logits) * values
    distributed.sum_(totals.values())
    return totals


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


def _row_squares(
    problem: ScoringContext, inner: dict[str, int], calls: Calls, logits: Tensor, vector: Tensor
) -> dict[tuple[str, int], Tensor]:
    """For each slice's (weight, axis): sum over samples of the squared gradient, for every index of that axis."""
    outputs = [calls.outputs[weight] for weight in problem.weights]
    back = torch.autograd.grad(logits, outputs, vector, retain_graph=True, materialize_grads=True)
    squares = {}
    for weight, gradient in zip(problem.weights, back, strict=True):
        x, axis = calls.inputs[weight].detach(), inner[weight]
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

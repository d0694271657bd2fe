"""The Hessian B of the loss in each sample's outputs, as vectors s_k with B = sum_k sign_k s_k s_k^T.

Exact traces take one backward pass per vector; random combinations of the vectors, sum_k z_k s_k with signs z, have
B as their second moment and give unbiased estimates from a few.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from hap.errors import Argument, ForPython, HapError
from hap.scoring.base import ScoringContext
from hap.scoring.batch import DETACHED, Batch

CLOSE = 1e-6


def use_probes(use: str) -> ForPython:
    """The advice to estimate by random probes."""
    return ForPython(f'{use} HessianTrace(method="hutchinson")', ("Give ", Argument("probes"), ", such as 300"))


class CannotSample(HapError):
    """There are no vectors to draw whose second moment is the loss's curvature."""


class OutputCurvature(ABC):
    """B of every sample of a batch."""

    @abstractmethod
    def factors(self, part: slice) -> tuple[Tensor, Tensor]:
        """Vectors (K, samples, outputs) and their signs (K, samples) for a part of the samples."""

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random vectors (count, samples, outputs) and signs (count, samples) with E[sign r r^T] = B, all samples."""


@dataclass(frozen=True)
class Softmax(OutputCurvature):
    """B = w (diag(q) - q q^T), s_c = sqrt(w q_c) (e_c - q): cross-entropy, whatever its targets and weights."""

    q: Tensor
    w: Tensor

    def factors(self, part: slice) -> tuple[Tensor, Tensor]:
        q, w = self.q[part], self.w[part]
        roots = (w.abs()[:, None] * q).sqrt()
        vectors = torch.diag_embed(roots) - roots[:, :, None] * q[:, None]
        return vectors.transpose(0, 1), w.sign().expand(q.shape[1], -1)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        combined = (self.w.abs()[:, None] * self.q).sqrt() * _signs((count, *self.q.shape), generator, self.q)
        return combined - self.q * combined.sum(-1, keepdim=True), self.w.sign().expand(count, -1)


@dataclass(frozen=True)
class Diagonal(OutputCurvature):
    """B = diag(d): squared error, binary cross-entropy."""

    d: Tensor

    def factors(self, part: slice) -> tuple[Tensor, Tensor]:
        d = self.d[part]
        return torch.diag_embed(d.abs().sqrt()).transpose(0, 1), d.sign().t()

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        low, high = self.d.amin(1), self.d.amax(1)
        if (low * high < 0).any():
            raise CannotSample("the loss bends both ways in one sample's outputs")
        vectors = self.d.abs().sqrt() * _signs((count, *self.d.shape), generator, self.d)
        return vectors, (low + high).sign().expand(count, -1)


@dataclass(frozen=True)
class Blocks(OutputCurvature):
    """Any B (samples, outputs, outputs), by its eigenvectors."""

    b: Tensor

    def factors(self, part: slice) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.b[part])
        scaled = vectors * values.abs().sqrt()[:, None]
        return scaled.permute(2, 0, 1), values.sign().t()

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        raise CannotSample("the loss is neither a cross-entropy nor one that treats the outputs apart")


def output_curvature(problem: ScoringContext, output: Tensor, batch: Batch) -> OutputCurvature | None:
    """The curvature at a batch's outputs (samples, K), in float64; None where the loss has none.

    Which form it has is read off two products with random vectors, so that losses need not be known by name.
    """
    assert problem.loss is not None
    output = output.detach().double().requires_grad_()
    target = batch[1].double() if isinstance(batch[1], Tensor) and batch[1].is_floating_point() else batch[1]
    with torch.enable_grad():
        loss = problem.loss(output, target)
        if not loss.requires_grad:
            raise HapError(DETACHED)
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
    if not slope.requires_grad:  # linear in the outputs
        return None

    def product(vector: Tensor) -> Tensor:
        return torch.autograd.grad(slope, output, vector, retain_graph=True)[0]

    generator = torch.Generator().manual_seed(0)
    probes = [torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device) for _ in range(2)]
    seen = [product(v) for v in probes]
    rounding = 1e-13 * (1 + float(slope.detach().norm()))
    q = output.detach().softmax(1)
    centred = [q * v - q * (q * v).sum(1, keepdim=True) for v in probes]
    w = (seen[0] * centred[0]).sum(1) / centred[0].square().sum(1).clamp_min(1e-300)
    if all(_close(a, w[:, None] * b, rounding) for a, b in zip(seen, centred, strict=True)):
        return Softmax(q, w)
    d = product(torch.ones_like(probes[0]))
    if all(_close(a, d * v, rounding) for a, v in zip(seen, probes, strict=True)):
        return Diagonal(d)
    blocks = torch.stack([product(_column(output, k)) for k in range(output.shape[1])], dim=1)
    if not all(_close(a, torch.einsum("nab,nb->na", blocks, v), rounding) for a, v in zip(seen, probes, strict=True)):
        raise HapError("the loss mixes the samples of a batch; ", use_probes("use"))
    return Blocks(blocks)


def _close(a: Tensor, b: Tensor, rounding: float) -> bool:
    return bool((a - b).norm() <= CLOSE * a.norm() + rounding)


def _column(output: Tensor, k: int) -> Tensor:
    column = torch.zeros_like(output)
    column[:, k] = 1
    return column


def _signs(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    return (torch.randint(0, 2, shape, generator=generator, device=generator.device) * 2 - 1).to(like)

"""The Hessian B of the loss in each sample's outputs, as vectors s_k with B = sum_k sign_k s_k s_k^T.

Exact traces take one backward pass per vector; random combinations of the vectors, sum_k z_k s_k with signs z, have
B as their second moment and give unbiased estimates from a few.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hap.errors import Argument, ForPython, HapError
from hap.scoring.base import DETACHED, Batch, ScoringContext

CLOSE = 1e-6


def use_probes(use: str) -> ForPython:
    """The advice to estimate by random probes."""
    return ForPython(f'{use} HessianTrace(method="hutchinson")', ("Give ", Argument("probes"), ", such as 300"))


class CannotTrace(HapError):
    """Gauss-Newton traces cannot be taken of this network and loss; the message says why."""


@dataclass(frozen=True)
class OutputCurvature:
    """B of every sample of a batch: `root` turns coefficients (K, samples, outputs) of the s_k into vectors of the same
    shape; `signs` (samples, outputs) are those of the s_k."""

    root: Callable[[Tensor], Tensor]
    signs: Tensor
    why_not: str = ""

    def factors(self) -> tuple[Tensor, Tensor]:
        """The s_k (K, samples, outputs) and their signs (K, samples)."""
        count, outputs = self.signs.shape
        each = torch.eye(outputs, dtype=self.signs.dtype, device=self.signs.device)
        return self.root(each[:, None].expand(-1, count, -1)), self.signs.t()

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random vectors (count, samples, outputs) and signs (count, samples) with E[sign r r^T] = B."""
        if self.why_not:
            raise CannotTrace(self.why_not)
        shape = (count, *self.signs.shape)
        drawn = torch.randint(0, 2, shape, generator=generator, device=generator.device) * 2 - 1
        return self.root(drawn.to(self.signs)), self.signs.sum(1).sign().expand(count, -1)


def softmax_curvature(q: Tensor, w: Tensor) -> OutputCurvature:
    """B = w (diag(q) - q q^T), s_c = sqrt(w q_c) (e_c - q): cross-entropy, whatever its targets and weights."""

    def root(coefficients: Tensor) -> Tensor:
        scaled = (w.abs()[:, None] * q).sqrt() * coefficients
        return scaled - q * scaled.sum(-1, keepdim=True)

    return OutputCurvature(root, w.sign()[:, None].expand_as(q))


def _diagonal_curvature(d: Tensor) -> OutputCurvature:
    """B = diag(d): squared error, binary cross-entropy."""
    both = bool((d.amin(1) * d.amax(1) < 0).any())
    why = "the loss bends both ways in one sample's outputs" if both else ""
    return OutputCurvature(lambda coefficients: d.abs().sqrt() * coefficients, d.sign(), why)


def _any_curvature(b: Tensor) -> OutputCurvature:
    """Any B (samples, outputs, outputs), by its eigenvectors."""
    values, vectors = torch.linalg.eigh(b)
    scaled = vectors * values.abs().sqrt()[:, None]
    why = "the loss is neither a cross-entropy nor one that treats the outputs apart"
    return OutputCurvature(lambda coefficients: (scaled @ coefficients[..., None])[..., 0], values.sign(), why)


def output_curvature(problem: ScoringContext, output: Tensor, batch: Batch) -> OutputCurvature:
    """The curvature at a batch's outputs (samples, K), in float64.

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
        return _diagonal_curvature(torch.zeros_like(output))

    def product(vector: Tensor) -> Tensor:
        return torch.autograd.grad(slope, output, vector, retain_graph=True)[0]

    generator = torch.Generator().manual_seed(0)
    probes = [torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device) for _ in range(2)]
    seen = [product(v) for v in probes]
    rounding = 1e-13 * (1 + float(slope.detach().norm()))

    def fits(form: Callable[[Tensor], Tensor]) -> bool:
        pairs = [(product, form(probe)) for product, probe in zip(seen, probes, strict=True)]
        return all(bool((a - b).norm() <= CLOSE * a.norm() + rounding) for a, b in pairs)

    q = output.detach().softmax(1)

    def centred(vector: Tensor) -> Tensor:
        return q * vector - q * (q * vector).sum(1, keepdim=True)

    first = centred(probes[0])
    w = (seen[0] * first).sum(1) / first.square().sum(1).clamp_min(1e-300)
    if fits(lambda v: w[:, None] * centred(v)):
        return softmax_curvature(q, w)
    d = product(torch.ones_like(probes[0]))
    if fits(lambda v: d * v):
        return _diagonal_curvature(d)
    basis = torch.eye(output.shape[1]).to(output)
    blocks = torch.stack([product(e.expand_as(output)) for e in basis], dim=1)
    if not fits(lambda v: torch.einsum("nab,nb->na", blocks, v)):
        raise HapError("the loss mixes the samples of a batch; ", use_probes("use"))
    return _any_curvature(blocks)

"""Least squares with a pull towards the weights that are there: sums over positions, and the map that follows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hap.utils import distributed


@dataclass(frozen=True)
class Affine:
    """x -> weight x + bias, for several groups side by side, in float64.

    Shapes: weight (groups, outputs, inputs), bias (groups, outputs); x (groups, positions, inputs).
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias[:, None].to(x), x, self.weight.mT.to(x))


@dataclass(frozen=True)
class Targets:
    """The mean of what a map is to return, and the centred sum over positions of x targets^T."""

    mean: Tensor
    product: Tensor


class Moments:
    """Means and second moments of what a map reads, x, over positions and processes, in float64.

    Shapes: x (groups, positions, inputs), targets (groups, positions, outputs). `centred`: about the means, as a map
    with a bias needs it.
    """

    def __init__(self, x: Tensor, centred: bool):
        self.x, self.centred = x, centred
        count = torch.tensor(float(x.shape[1]), dtype=torch.float64, device=x.device)
        distributed.sum_([count])
        self.count, self.mean = count, x.new_zeros(x.shape[0], x.shape[2], dtype=torch.float64)
        self.mean = self._mean(x) if centred else self.mean
        self.shifted = x - self.mean[:, None].to(x)
        self.second = (self.shifted.mT @ self.shifted).double()
        distributed.sum_([self.second])

    def _mean(self, values: Tensor) -> Tensor:
        total = values.sum(1).double()
        distributed.sum_([total])
        return total / self.count

    def with_targets(self, targets: Tensor) -> Targets:
        """What least squares needs to know of the targets."""
        mean = self._mean(targets) if self.centred else torch.zeros_like(targets[:, 0], dtype=torch.float64)
        product = (self.shifted.mT @ (targets - mean[:, None].to(targets))).double()
        distributed.sum_([product])
        return Targets(mean, product)

    def of_results(self, made: Affine) -> tuple[Tensor, Tensor]:
        """Mean and variance of what a map returns, for each of its outputs."""
        mean = (made.weight @ self.mean[:, :, None])[:, :, 0] + made.bias
        variance = ((made.weight @ self.second) * made.weight).sum(2) / self.count
        return mean.flatten(), variance.flatten().clamp_min(0)


class RidgeSolver:
    """The map that minimises the sum over positions of |weight x + bias - target|^2, plus pull |weight - old|^2.

    The pull is `ridge` times the mean over inputs of the sum of their squares, so that inputs that never vary, or that
    others determine, leave the weights where they were.
    """

    def __init__(self, moments: Moments, old: Affine, ridge: float):
        self.moments, self.old = moments, old
        second = moments.second
        scale = second.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float64).tiny)
        self.pull = (ridge * scale)[:, None, None]
        self.factor = torch.linalg.cholesky(second + self.pull * torch.eye(second.shape[1]).to(second))

    def solve(self, targets: Targets) -> Affine:
        right = targets.product + self.pull * self.old.weight.mT
        weight = torch.cholesky_solve(right, self.factor).mT
        if not self.moments.centred:
            return Affine(weight, self.old.bias)
        return Affine(weight, targets.mean - (weight @ self.moments.mean[:, :, None])[:, :, 0])

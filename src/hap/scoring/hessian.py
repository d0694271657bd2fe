"""The paper's criterion, equation 6: trace(H_pp) / (2 |p|) * ||w_p||^2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hap.errors import HapError
from hap.groups import Group, Producer
from hap.scoring.base import Criterion, Problem, Scores, fold
from hap.scoring.curvature import Hessian, gauss_newton_traces, why_not_exact, why_not_gauss_newton

METHODS = ("auto", "exact", "hutchinson", "gauss-newton")
BLOCK = 25
UNDECIDED = 0.01


def rademacher(weights: dict[str, Tensor], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """`count` vectors of independent signs, shaped like the weights."""
    return {
        n: torch.randint(0, 2, (count, *w.shape), generator=generator, device=generator.device).to(w) * 2 - 1
        for n, w in weights.items()
    }


def quadratics(problem: Problem, probes: int, chunk: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """The elements of v * Hv for random sign vectors v, a block of probes (the first axis) at a time."""
    operator = Hessian(problem)
    generator = torch.Generator(next(iter(problem.weights.values())).device).manual_seed(seed)
    for start in range(0, probes, BLOCK):
        vectors = rademacher(problem.weights, min(BLOCK, probes - start), generator)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                message="There is a performance drop because we have not yet implemented the batching rule",
            )
            products = operator.products(vectors, chunk)
        yield {n: v.mul_(products[n]) for n, v in vectors.items()}


@dataclass(frozen=True)
class HessianTrace(Criterion):
    """How the trace is found:

    "hutchinson"    mean of v^T H v over `probes` random sign vectors, `chunk` of them at a time, as in the paper. Gives
                    standard errors. With `settle`, the share of units to be kept, it stops as soon as all but 1% of
                    the units are more than two standard errors away from the cut.
    "exact"         without probes or variance, one backward pass per output. Valid where the network is piecewise
                    linear in each single weight (convolutions, BatchNorm in eval mode, ReLU, pooling, sums).
    "gauss-newton"  the same computation for any network; not the Hessian there, and so not called that.
    "auto"          exact where it is valid, else hutchinson.
    """

    method: str = "auto"
    probes: int = 300
    chunk: int = 1
    seed: int = 0
    settle: float | None = None

    name: ClassVar[str] = "hessian"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise HapError(f"method is {self.method!r}; expected one of {', '.join(map(repr, METHODS))}")
        if self.probes < 2 or self.chunk < 1:
            raise HapError(
                f"probes={self.probes}, chunk={self.chunk}; expected at least 2 probes and chunks of at least 1"
            )
        if self.settle is not None and not 0 < self.settle < 1:
            raise HapError(f"settle={self.settle}; expected the share of units to be kept, between 0 and 1")

    def scores(self, problem: Problem) -> Scores:
        method = self.method
        if method == "auto":
            method = "hutchinson" if why_not_exact(problem) else "exact"
        if method == "hutchinson":
            return self._hutchinson(problem)
        why = why_not_exact(problem) if method == "exact" else why_not_gauss_newton(problem)
        if why is not None:
            raise HapError(f'method="{method}" does not apply: {why}. Use HessianTrace(method="hutchinson").')
        traces = gauss_newton_traces(problem)
        values = problem.assemble(lambda g, p: factor(problem, g, p) * fold(g, p, traces[p.weight]))
        return Scores(values, about={"method": method})

    def _hutchinson(self, problem: Problem) -> Scores:
        """Welford's mean and variance of the score itself, probe by probe, so that errors cover the whole sum."""
        count, mean, square = 0, torch.zeros(0), torch.zeros(0)
        for sample in self.estimates(problem):
            count += 1
            if count == 1:
                mean, square = sample.clone(), torch.zeros_like(sample)
            else:
                step = sample - mean
                mean += step / count
                square += step * (sample - mean)
            if self.settle is not None and count % BLOCK == 0 and self._settled(mean, square, count):
                break
        error = (square / (count - 1) / count).sqrt()
        if not torch.isfinite(mean).all():
            raise HapError("a Hessian product is not finite; check the model's weights, or score in float32")
        sizes = [len(g) for g in problem.groups.values()]
        values, errors = (dict(zip(problem.groups, t.split(sizes), strict=True)) for t in (mean, error))
        return Scores(values, errors, {"method": "hutchinson", "probes": count})

    def estimates(self, problem: Problem) -> Iterator[Tensor]:
        """One unbiased estimate of all scores (float64, groups one after the other) per probe."""
        factors = {n: [factor(problem, g, p) for p in g.producers] for n, g in problem.groups.items()}
        for block in quadratics(problem, self.probes, self.chunk, self.seed):
            yield from self._estimates(problem, factors, block)

    @staticmethod
    def _estimates(problem: Problem, factors: dict[str, list[Tensor]], quadratic: dict[str, Tensor]) -> Tensor:
        """Scores (probes, units) from the elements of v * Hv, which have the probes as their first axis."""
        columns = []
        for name, group in problem.groups.items():
            parts = []
            for producer, factor in zip(group.producers, factors[name], strict=True):
                values = quadratic[producer.weight].movedim(producer.dim + 1, 1).flatten(2).sum(2, dtype=torch.float64)
                parts.append(fold(group, producer, values) * factor)
            columns.append(torch.stack(parts).sum(0))
        return torch.cat(columns, dim=1)

    def _settled(self, mean: Tensor, square: Tensor, count: int) -> bool:
        assert self.settle is not None
        error = (square / (count - 1) / count).sqrt()
        cut = torch.quantile(mean, 1 - self.settle)
        return float(((mean - cut).abs() < 2 * error).double().mean()) <= UNDECIDED


def factor(problem: Problem, group: Group, producer: Producer) -> Tensor:
    """What turns a trace into equation 6, per unit of one producer: ||w_p||^2 / (2 |p|)."""
    norm = problem.per_unit(group, producer, problem.weights[producer.weight].double().square())
    return norm / (2 * problem.sizes(group, producer).clamp_min(1))

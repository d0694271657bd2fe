"""The paper's criterion, equation 6: trace(H_pp) / (2 |p|) * ||w_p||^2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hap.errors import Argument, HapError
from hap.groups.types import Group, Producer
from hap.scoring.base import Criterion, Scores, ScoringContext, fold
from hap.scoring.deflation import Deflated
from hap.scoring.gauss_newton import Survey, gauss_newton_traces, survey
from hap.scoring.hessian_operator import Hessian
from hap.scoring.outputs import CannotSample, use_probes
from hap.scoring.running_mean import Running

METHODS = ("auto", "exact", "sampled", "hutchinson", "gauss-newton")
BLOCK = 25
UNDECIDED = 0.01
MOST_OUTPUTS = 20
"""Beyond this many outputs a few random combinations tell as much as one backward pass per output."""


def rademacher(weights: dict[str, Tensor], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """`count` vectors of independent signs, shaped like the weights."""
    return {
        n: torch.randint(0, 2, (count, *w.shape), generator=generator, device=generator.device).to(w) * 2 - 1
        for n, w in weights.items()
    }


def quadratics(
    problem: ScoringContext, probes: int, chunk: int | None, seed: int, deflate: int = 0
) -> Iterator[dict[str, Tensor]]:
    """The elements of v * Hv for random sign vectors v, a block of probes (the first axis) at a time.

    With `deflate`, of so many directions H is known exactly, and v meets the rest alone: the same mean, less noise.
    """
    generator = torch.Generator(next(iter(problem.weights.values())).device).manual_seed(seed)
    hessian = Hessian(problem)
    operator: Hessian | Deflated = hessian
    if deflate:
        with quiet():
            operator = Deflated(hessian, rademacher(problem.weights, deflate, generator), chunk)
    for start in range(0, probes, BLOCK):
        vectors = rademacher(problem.weights, min(BLOCK, probes - start), generator)
        with quiet():
            products = operator.products(vectors, chunk)
        found = {n: v.mul_(products[n]) for n, v in vectors.items()}
        yield {n: q + operator.diagonal[n] for n, q in found.items()} if isinstance(operator, Deflated) else found


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks on operators that it runs one vector after the other."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="There is a performance drop because we have not yet implemented the batching rule"
        )
        yield


@dataclass(frozen=True)
class HessianTrace(Criterion):
    """How the trace is found:

    "hutchinson"    mean of v^T H v over `probes` random sign vectors, as in the paper, `chunk` of them at a time or as
                    many as memory allows. Gives standard errors. With `settle`, the share of units to be kept, it stops
                    as soon as all but 1% of the units are more than two standard errors away from the cut. With
                    `deflate`, the Hessian is known exactly along so many directions that it stretches most, and the
                    probes estimate the rest: far less noise, for two more products and two copies of the weights each.
    "exact"         without probes or variance, one backward pass per output. Valid where the network is piecewise
                    linear in each single weight (convolutions, BatchNorm in eval mode, ReLU, pooling, sums).
    "sampled"       an unbiased estimate of the same for networks with many outputs, from `draws` random combinations
                    of each sample's outputs. Gives standard errors.
    "gauss-newton"  the computation of "exact" (of "sampled" beyond 20 outputs) for any network; not the Hessian there,
                    and so not called that.
    "auto"          where it is valid exact up to 20 outputs and sampled beyond, else hutchinson.
    """

    method: str = "auto"
    probes: int = 300
    chunk: int | None = None
    draws: int = 8
    seed: int = 0
    settle: float | None = None
    deflate: int = 0

    name: ClassVar[str] = "hessian"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise HapError(f"method is {self.method!r}; expected one of {', '.join(map(repr, METHODS))}")
        if self.probes < 2 or self.draws < 2 or (self.chunk is not None and self.chunk < 1):
            raise HapError(
                Argument("probes", self.probes),
                f", draws={self.draws}, chunk={self.chunk}; "
                "expected at least 2 probes, at least 2 draws and chunks of at least 1 (or None)",
            )
        if self.deflate < 0:
            raise HapError(f"deflate={self.deflate}; expected 0, or a number of directions such as 32")
        if self.settle is not None and not 0 < self.settle < 1:
            raise HapError(f"settle={self.settle}; expected the share of units to be kept, between 0 and 1")

    def scores(self, problem: ScoringContext) -> Scores:
        curved = problem.groups.curved
        if self.method == "hutchinson" or (self.method == "auto" and curved is not None):
            return self._hutchinson(problem)
        found = survey(problem)
        why = found.why_not
        if self.method != "gauss-newton" and curved is not None:
            why = f"the network is not piecewise linear in each weight ({curved})"
        if why is None:
            try:
                return self._gauss_newton(problem, found)
            except CannotSample as error:
                if self.method != "auto":
                    raise
                why = str(error)
        if self.method == "auto":
            return self._hutchinson(problem)
        raise HapError(f'method="{self.method}" does not apply: {why}. ', use_probes("Use"), ".")

    def _gauss_newton(self, problem: ScoringContext, found: Survey) -> Scores:
        """Equation 6 from exact traces, or from the mean of sampled ones with its standard error."""
        sampled = self.method == "sampled" or (self.method != "exact" and found.outputs > MOST_OUTPUTS)
        method = {"auto": "sampled" if sampled else "exact"}.get(self.method, self.method)
        traces = gauss_newton_traces(problem, found, self.draws if sampled else 0, self.seed)
        samples = problem.assemble(lambda g, p: factor(problem, g, p) * fold(g, p, traces[p.weight]))
        if not sampled:
            return Scores({n: v[0] for n, v in samples.items()}, about={"method": method})
        errors = {n: v.std(0) / self.draws**0.5 for n, v in samples.items()}
        return Scores({n: v.mean(0) for n, v in samples.items()}, errors, {"method": method, "draws": self.draws})

    def _hutchinson(self, problem: ScoringContext) -> Scores:
        """Mean and error of the score itself, probe by probe, so that errors cover the whole sum."""
        running = Running()
        for sample in self.estimates(problem):
            running.add(sample)
            if self.settle is not None and running.count % BLOCK == 0 and self._settled(running):
                break
        mean, error = running.mean, running.error()
        if not torch.isfinite(mean).all():
            raise HapError("a Hessian product is not finite; check the model's weights, or score in float32")
        sizes = [len(g) for g in problem.groups.values()]
        values, errors = (dict(zip(problem.groups, t.split(sizes), strict=True)) for t in (mean, error))
        about = {"method": "hutchinson", "probes": running.count} | ({"deflate": self.deflate} if self.deflate else {})
        return Scores(values, errors, about)

    def estimates(self, problem: ScoringContext) -> Iterator[Tensor]:
        """One unbiased estimate of all scores (float64, groups one after the other) per probe."""
        factors = {n: [factor(problem, g, p) for p in g.producers] for n, g in problem.groups.items()}
        for block in quadratics(problem, self.probes, self.chunk, self.seed, self.deflate):
            yield from self._estimates(problem, factors, block)

    @staticmethod
    def _estimates(problem: ScoringContext, factors: dict[str, list[Tensor]], quadratic: dict[str, Tensor]) -> Tensor:
        """Scores (probes, units) from the elements of v * Hv, which have the probes as their first axis."""
        columns = []
        for name, group in problem.groups.items():
            parts = []
            for producer, factor in zip(group.producers, factors[name], strict=True):
                values = quadratic[producer.weight].movedim(producer.dim + 1, 1).flatten(2).sum(2, dtype=torch.float64)
                parts.append(fold(group, producer, values) * factor)
            columns.append(torch.stack(parts).sum(0))
        return torch.cat(columns, dim=1)

    def _settled(self, running: Running) -> bool:
        assert self.settle is not None
        cut = torch.quantile(running.mean, 1 - self.settle)
        return float(((running.mean - cut).abs() < 2 * running.error()).double().mean()) <= UNDECIDED


def factor(problem: ScoringContext, group: Group, producer: Producer) -> Tensor:
    """What turns a trace into equation 6, per unit of one producer: ||w_p||^2 / (2 |p|)."""
    norm = problem.sum_of(torch.square, group, producer)
    return norm / (2 * problem.sizes(group, producer).clamp_min(1))

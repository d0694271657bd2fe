"""The paper's criterion (Yu et al., Hessian-Aware Pruning and Optimal Neural Implant, 2021), equation 6.

The rise of the loss when the weights w_p of a unit go is 1/2 w_p^T H_pp w_p to second order; with the mean over all
directions of w_p in its place, trace(H_pp) / (2 |p|) * ||w_p||^2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hap.errors import Argument, HapError
from hap.groups.types import Group, Producer
from hap.scoring.base import Criterion, Scores, ScoringContext, check_finite_scores, fold
from hap.scoring.gauss_newton import gauss_newton_traces, survey
from hap.scoring.hutchinson import Deflated, Operator, Tensors, diagonal_estimates, hessian_terms, signs
from hap.scoring.outputs import CannotTrace, use_probes
from hap.utils import distributed

METHODS = ("auto", "exact", "sampled", "hutchinson", "gauss-newton")
BLOCK = 25
UNDECIDED = 0.01
MOST_OUTPUTS = 20
"""Beyond this many outputs a few random combinations tell as much as one backward pass per output."""


@dataclass(frozen=True)
class HessianTrace(Criterion):
    """trace(H_pp) / (2 |p|) * ||w_p||^2, equation 6 of the paper, summed over the weights that compute a unit. How the
    trace is found, by `method`:

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

    >>> import hap
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
    >>> batches, loss = [(torch.randn(8, 2), torch.randint(0, 2, (8,)))], torch.nn.functional.cross_entropy
    >>> groups = hap.trace(model, torch.randn(1, 2))
    >>> hap.score(model, groups, batches, loss, hap.HessianTrace()).about
    {'method': 'exact'}
    >>> scores = hap.score(model, groups, batches, loss, hap.HessianTrace("hutchinson", probes=10))
    >>> scores.about, scores.errors["0"].shape
    ({'method': 'hutchinson', 'probes': 10}, torch.Size([3]))
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
        if self.method == "hutchinson":
            return hutchinson(problem, self)
        try:
            if self.method != "gauss-newton" and (curved := problem.groups.curved) is not None:
                raise CannotTrace(f"the network is not piecewise linear in each weight ({curved})")
            found = survey(problem)
            sampled = self.method == "sampled" or (self.method != "exact" and found.outputs > MOST_OUTPUTS)
            method = {"auto": "sampled" if sampled else "exact"}.get(self.method, self.method)
            traces = gauss_newton_traces(problem, found, self.draws if sampled else 0, self.seed)
            values = equation_6(problem, lambda g, p: fold(g, p, traces[p.weight]))
            return mean_scores(values, {"method": method} | ({"draws": self.draws} if sampled else {}))
        except CannotTrace as error:
            if self.method != "auto":
                raise HapError(f'method="{self.method}" does not apply: {error}. ', use_probes("Use"), ".") from error
        return hutchinson(problem, self)

    def estimates(self, problem: ScoringContext) -> Tensor:
        """Unbiased estimates of all scores by Hutchinson's method: (probes, units), groups one after the other."""
        return torch.cat(list(next(_estimates(problem, self, self.probes)).values()), dim=1)


def equation_6(problem: ScoringContext, trace: Callable[[Group, Producer], Tensor]) -> dict[str, Tensor]:
    """trace(H_pp) / (2 |p|) * ||w_p||^2, summed over each p of a unit."""
    if problem.joint:
        traces, squares = problem.assemble(trace), problem.mean_squares()
        return {n: traces[n] * squares[n] / 2 for n in traces}
    return problem.assemble(lambda g, p: trace(g, p) * problem.mean_square(g, p) / 2)


def hutchinson(problem: ScoringContext, how: HessianTrace) -> Scores:
    """Equation 6 from random probes, with standard errors."""
    values: dict[str, Tensor] = {}
    for block in _estimates(problem, how, BLOCK if how.settle else how.probes):
        values = {n: torch.cat([values[n], v]) if values else v for n, v in block.items()}
        if how.settle is not None and _settled(torch.cat(list(values.values()), dim=1), how.settle):
            break
    check_finite_scores(values, "a Hessian product")
    count = len(next(iter(values.values())))
    deflated = {"deflate": how.deflate} if how.deflate else {}
    return mean_scores(values, {"method": "hutchinson", "probes": count} | deflated)


def _estimates(problem: ScoringContext, how: HessianTrace, block: int) -> Iterator[dict[str, Tensor]]:
    """Estimates (block, units) of equation 6 by group, so many probes at a time."""
    weights, known = problem.weights, Tensors()
    operator: Operator = partial(hessian_terms, problem)
    if how.deflate:
        deflated = Deflated(operator, signs(weights, range(how.deflate), how.seed), how.chunk)
        operator, known = deflated.terms, deflated.diagonal
    axes = dict.fromkeys((p.weight, p.dim) for g in problem.groups.values() for p in g.producers)
    last = how.deflate + how.probes
    for first in range(how.deflate, last, block):
        probes = range(first, min(first + block, last))
        sums = {(n, d): weights[n].new_zeros(len(probes), weights[n].shape[d], dtype=torch.float64) for n, d in axes}
        for part, values in diagonal_estimates(operator, weights, probes, how.seed, how.chunk):
            for (name, dim), total in sums.items():  # folded into units later, since that waits for the device
                total[part] += _sum_along(values[name], dim)
        distributed.sum_(sums.values())
        for name, dim in axes if known else ():
            sums[name, dim] += _sum_along(known[name][None], dim)

        def trace(group: Group, producer: Producer, sums: dict[tuple[str, int], Tensor] = sums) -> Tensor:
            return fold(group, producer, sums[producer.weight, producer.dim])

        yield equation_6(problem, trace)


def _sum_along(values: Tensor, dim: int) -> Tensor:
    """Sums (count, length) of values (count, *shape) over all axes but `dim` of the shape, in float64."""
    return values.movedim(dim + 1, 1).flatten(2).sum(2, dtype=torch.float64) if values.ndim > 2 else values.double()


def _settled(estimates: Tensor, kept: float) -> bool:
    """Whether all but a few units are two standard errors away from the cut that keeps such a share of them."""
    mean = estimates.mean(0)
    off = (mean - torch.quantile(mean, 1 - kept)).abs()
    return float((off < 2 * estimates.std(0) / len(estimates) ** 0.5).double().mean()) <= UNDECIDED


def mean_scores(estimates: dict[str, Tensor], about: dict[str, Any]) -> Scores:
    """Means over independent estimates (count, units), and their standard errors if there are several."""
    errors = {n: v.std(0) / len(v) ** 0.5 for n, v in estimates.items() if len(v) > 1}
    return Scores({n: v.mean(0) for n, v in estimates.items()}, errors, about)

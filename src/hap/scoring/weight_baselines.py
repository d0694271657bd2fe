"""Baselines that look at the weights alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from hap.errors import Argument, ForPython, HapError
from hap.groups.types import Group, Producer
from hap.scoring.base import Criterion, Scores, ScoringContext, fold, unit_of_class


@dataclass(frozen=True)
class Magnitude(Criterion):
    """||w_p||_2^2 / |p|, the paper's magnitude baseline.

    >>> import hap
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)).eval()
    >>> model[0].weight.data = torch.tensor([[3.0, -4.0], [1.0, 0.0]])
    >>> hap.score(model, hap.trace(model, torch.randn(1, 2)), None, None, hap.Magnitude())["0"].tolist()
    [12.5, 0.5]
    """

    name: ClassVar[str] = "magnitude"
    elementwise: ClassVar[bool] = True

    def scores(self, problem: ScoringContext) -> Scores:
        return Scores(problem.assemble(problem.mean_square))


@dataclass(frozen=True)
class L1(Criterion):
    """||w_p||_1, the sum of absolute weights (Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017)."""

    name: ClassVar[str] = "l1"
    elementwise: ClassVar[bool] = True

    def scores(self, problem: ScoringContext) -> Scores:
        return Scores(problem.assemble(partial(problem.sum_of, torch.abs)))


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform random scores in [0, 1): the chance level."""

    seed: int = 0

    name: ClassVar[str] = "random"

    def scores(self, problem: ScoringContext) -> Scores:
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.rand, generator=generator, dtype=torch.float64)
        return Scores({n: draw(len(g)) for n, g in problem.groups.items()})


@dataclass(frozen=True)
class GeometricMedian(Criterion):
    """mean over units q of ||w_p - w_q||_2, by the root of |p|: the redundant go first (He et al., Filter Pruning via
    Geometric Median, CVPR 2019)."""

    name: ClassVar[str] = "geometric-median"

    def scores(self, problem: ScoringContext) -> Scores:
        def formula(group: Group, producer: Producer) -> torch.Tensor:
            rows = problem.weights[producer.weight].double().movedim(producer.dim, 0).flatten(1)
            return fold(group, producer, torch.cdist(rows, rows).mean(1) / rows.shape[1] ** 0.5)

        return Scores(problem.assemble(formula))


@dataclass(frozen=True)
class BNScale(Criterion):
    """|gamma| of the BatchNorm behind a unit, summed over several (Liu et al., Network Slimming, ICCV 2017)."""

    name: ClassVar[str] = "bn-scale"

    def scores(self, problem: ScoringContext) -> Scores:
        parameters = dict(problem.model.named_parameters())
        values = {}
        for name, group in problem.groups.items():
            unit = unit_of_class(problem.groups, group)
            scales = [Producer(w, 0, unit[problem.groups.axes[w, 0]]) for w in problem.groups.batchnorm_weights]
            own = [scale for scale in scales if (scale.unit >= 0).any()]
            if not own:
                advice = f"trace with ignore=({name!r},) or use another criterion"
                typed = ("use another ", Argument("criterion"))
                raise HapError(f"group {name!r} has no batch normalisation of its own; ", ForPython(advice, typed))
            gammas = [fold(group, scale, parameters[scale.weight].detach().abs()) for scale in own]
            values[name] = torch.stack(gammas).sum(0)
        return Scores(values)

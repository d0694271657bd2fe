"""Baselines that look at the weights alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from hap.errors import Argument, ForPython, HapError
from hap.groups.types import Group, Producer
from hap.scoring.base import Criterion, Scores, ScoringContext, fold


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
        return Scores(
            {n: torch.rand(len(g), generator=generator, dtype=torch.float64) for n, g in problem.groups.items()}
        )


@dataclass(frozen=True)
class GeometricMedian(Criterion):
    """mean over units q of ||w_p - w_q||_2, by the root of |p|: the redundant go first (He et al., Filter Pruning via
    Geometric Median, CVPR 2019)."""

    name: ClassVar[str] = "geometric-median"

    def scores(self, problem: ScoringContext) -> Scores:
        def formula(group: Group, producer: Producer) -> torch.Tensor:
            rows = problem.weights[producer.weight].double().movedim(producer.dim, 0).flatten(1)
            values = torch.cdist(rows, rows).mean(1) / rows.shape[1] ** 0.5
            return fold(group, producer, values)

        return Scores(problem.assemble(formula))


@dataclass(frozen=True)
class BNScale(Criterion):
    """|gamma| of the BatchNorm behind a unit, summed over several (Liu et al., Network Slimming, ICCV 2017)."""

    name: ClassVar[str] = "bn-scale"

    def scores(self, problem: ScoringContext) -> Scores:
        parameters = dict(problem.model.named_parameters())
        values = {}
        for name, group in problem.groups.items():
            total = torch.zeros(len(group), dtype=torch.float64)
            place = {c: u for u, c in enumerate(group.classes.tolist())}
            found = False
            for scale in problem.groups.batchnorm_weights:
                unit = np.array([place.get(c, -1) for c in problem.groups.axes[scale, 0].tolist()])
                if (unit >= 0).any():
                    found = True
                    gamma = parameters[scale].detach().double().abs().cpu()
                    total.index_add_(0, torch.from_numpy(unit[unit >= 0]), gamma[unit >= 0])
            if not found:
                advice = f"trace with ignore=({name!r},) or use another criterion"
                typed = ("use another ", Argument("criterion"))
                raise HapError(f"group {name!r} has no batch normalisation of its own; ", ForPython(advice, typed))
            values[name] = total
        return Scores(values)

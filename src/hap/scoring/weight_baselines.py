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
    """||w_p||_2^2 / |p|, the paper's magnitude baseline."""

    name: ClassVar[str] = "magnitude"

    def scores(self, problem: ScoringContext) -> Scores:
        return Scores(problem.assemble(problem.mean_square))


@dataclass(frozen=True)
class L1(Criterion):
    """||w_p||_1, the sum of absolute weights (Li et al., 2017)."""

    name: ClassVar[str] = "l1"

    def scores(self, problem: ScoringContext) -> Scores:
        return Scores(problem.assemble(partial(problem.sum_of, torch.abs)))


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform random scores."""

    seed: int = 0

    name: ClassVar[str] = "random"

    def scores(self, problem: ScoringContext) -> Scores:
        generator = torch.Generator().manual_seed(self.seed)
        return Scores(
            {n: torch.rand(len(g), generator=generator, dtype=torch.float64) for n, g in problem.groups.items()}
        )


@dataclass(frozen=True)
class GeometricMedian(Criterion):
    """Mean distance to the layer's other units, per root weight: the redundant go first (He et al., 2019)."""

    name: ClassVar[str] = "geometric-median"

    def scores(self, problem: ScoringContext) -> Scores:
        def formula(group: Group, producer: Producer) -> torch.Tensor:
            rows = problem.weights[producer.weight].double().movedim(producer.dim, 0).flatten(1)
            values = torch.cdist(rows, rows).mean(1) / rows.shape[1] ** 0.5
            return fold(group, producer, values)

        return Scores(problem.assemble(formula))


@dataclass(frozen=True)
class BNScale(Criterion):
    """|gamma| of the normalisation behind a unit, summed where there are several (slimming, Liu et al., 2017)."""

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

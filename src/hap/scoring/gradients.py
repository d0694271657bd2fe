"""Baselines from gradients and from the diagonal of the curvature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hap import distributed
from hap.examples import call_arguments, call_with
from hap.scoring.base import Batch, Criterion, Problem, Scores, samples
from hap.scoring.hessian import quadratics
from hap.scoring.memory import Pieces


@dataclass(frozen=True)
class Taylor(Criterion):
    """(g_p . w_p)^2, the squared first-order change of the loss (Molchanov et al., 2019)."""

    name: ClassVar[str] = "taylor"

    def scores(self, problem: Problem) -> Scores:
        total = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in problem.weights.items()}
        for batch, share in zip(problem.batches, problem.shares(), strict=True):
            weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
            with torch.enable_grad():
                _, loss = problem.evaluate(weights, batch)
                gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
            for name, gradient in zip(weights, gradients, strict=True):
                total[name] += share * gradient.double()
        distributed.sum_(total.values())
        return Scores(
            problem.assemble(lambda g, p: problem.per_unit(g, p, total[p.weight] * problem.weights[p.weight]).square())
        )


@dataclass(frozen=True)
class DiagonalFisher(Criterion):
    """1/2 sum over the unit's weights of E[g^2] w^2, g a sample's gradient: the diagonal of the empirical Fisher."""

    chunk: int = 32

    name: ClassVar[str] = "fisher"

    def scores(self, problem: Problem) -> Scores:
        squares = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in problem.weights.items()}
        for batch, share in zip(problem.batches, problem.shares(), strict=True):
            count = samples(batch)
            problem.evaluate({}, batch)  # for its checks

            def work(part: slice, batch: Batch = batch) -> dict[str, Tensor]:
                gradients = self._per_sample(problem, pytree.tree_map(lambda t: t[part], batch))
                return {n: g.double().square().sum(0) for n, g in gradients.items()}

            for _, sums in Pieces(self.chunk).of(count, work):
                for name, values in sums.items():
                    squares[name] += share / count * values
        distributed.sum_(squares.values())
        return Scores(
            problem.assemble(
                lambda g, p: problem.per_unit(g, p, squares[p.weight] * problem.weights[p.weight].double().square()) / 2
            )
        )

    @staticmethod
    def _per_sample(problem: Problem, batch: Any) -> dict[str, Tensor]:
        assert problem.loss is not None
        loss = problem.loss

        def one(weights: dict[str, Tensor], x: Any, y: Any) -> Tensor:
            x, y = pytree.tree_map(lambda t: t[None], (x, y))
            args, kwargs = call_arguments(x)
            output = call_with(problem.model, weights, args, kwargs)
            return loss(output, y)

        return torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(problem.weights, *batch)


@dataclass(frozen=True)
class OBD(Criterion):
    """1/2 sum over the unit's weights of H_ii w_i^2 (optimal brain damage), H_ii estimated as the mean of v * Hv."""

    probes: int = 300
    chunk: int | None = None
    seed: int = 0

    name: ClassVar[str] = "obd"

    def scores(self, problem: Problem) -> Scores:
        diagonal = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in problem.weights.items()}
        for block in quadratics(problem, self.probes, self.chunk, self.seed):
            for name, values in block.items():
                diagonal[name] += values.sum(0, dtype=torch.float64) / self.probes
        return Scores(
            problem.assemble(
                lambda g, p: (
                    problem.per_unit(g, p, diagonal[p.weight] * problem.weights[p.weight].double().square()) / 2
                )
            )
        )

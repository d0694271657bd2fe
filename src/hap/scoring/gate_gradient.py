"""The mean size of the gradient of a gate on each head (Michel et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hap.errors import HapError
from hap.groups.types import Group, Producer
from hap.scoring.base import Criterion, Scores, ScoringContext, fold
from hap.scoring.batch import Batch, samples
from hap.scoring.input_checks import check_finite_scores, check_targets
from hap.scoring.over_all_slices import all_slices
from hap.scoring.sampled_gauss_newton import check_samples_first, check_seen
from hap.utils import distributed


@dataclass(frozen=True)
class GateGradient(Criterion):
    """Mean over samples of |dL/dgate|, the gate a factor 1 on what a unit hands on (Michel et al., 2019).

    `per_layer` divides the scores of each group by their Euclidean norm, as its authors do.
    """

    per_layer: bool = True

    name: ClassVar[str] = "gate-gradient"

    def scores(self, problem: ScoringContext) -> Scores:
        totals = {
            n: torch.zeros(len(g), dtype=torch.float64, device=next(iter(problem.weights.values())).device)
            for n, g in problem.groups.items()
        }
        for batch, share in zip(problem.batches, problem.shares(), strict=True):
            for name, value in self._batch(problem, batch).items():
                totals[name] += share * value
        distributed.sum_(totals.values())
        check_finite_scores(torch.cat(list(totals.values())), "the gradient of a gate")
        if self.per_layer:
            totals = {n: v / v.norm().clamp_min(1e-300) for n, v in totals.items()}
        return Scores(totals, about={"per_layer": self.per_layer})

    @staticmethod
    def _batch(problem: ScoringContext, batch: Batch) -> dict[str, Tensor]:
        weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
        readers = {(n, r.weight, r.dim): r for n, g in problem.groups.items() for r in _readers(problem, n, g)}
        count = samples(batch)
        check_targets(batch)
        with torch.enable_grad(), _reading(problem, [weight for _, weight, _ in readers]) as inputs:
            _, loss = problem.evaluate(weights, batch)
            check_seen((weight for _, weight, _ in readers), inputs, "use another criterion")
            slopes = dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))
        if batch is problem.batches[0]:
            with _reading(problem, list(inputs)) as alone:
                problem.last_alone(batch)
            check_samples_first(batch, inputs, alone)
        gates: dict[str, Tensor] = {}
        for (name, weight, _), reader in readers.items():
            x, slope, group = inputs[weight].detach(), slopes[weight], problem.groups[name]
            if x.ndim < 2 or len(x) != count or x.shape[-1] != len(reader.unit):
                raise HapError(f"{weight} does not read {name} on the last axis of every sample: {tuple(x.shape)}")
            gate = fold(group, reader, (x * slope).flatten(1, -2).sum(1) if x.ndim > 2 else x * slope)
            gates[name] = gates.get(name, torch.zeros_like(gate)) + gate
        return {n: count * g.abs().mean(0) for n, g in gates.items()}  # the loss is a mean over the samples


def _readers(problem: ScoringContext, name: str, group: Group) -> tuple[Producer, ...]:
    readers = all_slices(problem.groups, group)[len(group.producers) :]
    if not readers:
        raise HapError(f"no layer reads group {name!r}, so a gate on it has no gradient; use another criterion")
    return readers


@contextmanager
def _reading(problem: ScoringContext, weights: list[str]) -> Iterator[dict[str, Tensor]]:
    """What enters the layers that own these weights, with its graph."""
    modules, inputs, hooks = dict(problem.model.named_modules()), {}, []
    for weight in weights:

        def note(module: Any, args: Any, weight: str = weight) -> None:
            if weight in inputs:
                raise HapError(f"{weight} is used more than once in a forward pass, so its gate has no one gradient")
            if args:
                inputs[weight] = args[0]

        hooks.append(modules[weight.rpartition(".")[0]].register_forward_pre_hook(note))
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()

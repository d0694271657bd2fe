"""The mean size of the gradient of a gate on each head (Michel et al., Are Sixteen Heads Really Better than One?)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hap.errors import HapError
from hap.groups.types import Group, Producer
from hap.scoring.base import Criterion, Scores, ScoringContext, fold
from hap.scoring.batch import Batch, samples
from hap.scoring.input_checks import check_finite_scores, check_targets
from hap.scoring.layer_calls import check_recorded, check_samples_first, recorded_calls
from hap.scoring.over_all_slices import all_slices
from hap.utils import distributed


@dataclass(frozen=True)
class GateGradient(Criterion):
    """Mean over samples of |dL/dgate|, the gate a factor 1 on what a unit hands on (Michel et al., 2019).

    `per_layer` divides the scores of each group by their Euclidean norm, as its authors do.

    >>> GateGradient(per_layer=False).to_dict()
    {'name': 'gate-gradient', 'per_layer': False}
    """

    per_layer: bool = True

    name: ClassVar[str] = "gate-gradient"

    def scores(self, problem: ScoringContext) -> Scores:
        totals = {n: torch.zeros(len(g), dtype=torch.float64, device=problem.device) for n, g in problem.groups.items()}
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
        read = dict.fromkeys(weight for _, weight, _ in readers)
        with torch.enable_grad(), recorded_calls(problem.model, read) as calls:
            _, loss = problem.evaluate(weights, batch)
            check_recorded(read, calls, "use another criterion")
            slopes = dict(zip(read, torch.autograd.grad(loss, [calls.inputs[n] for n in read]), strict=True))
        if batch is problem.batches[0]:
            with recorded_calls(problem.model, read) as alone:
                problem.last_alone(batch)
            check_samples_first(batch, calls, alone)
        gates: dict[str, Tensor] = {}
        for (name, weight, _), reader in readers.items():
            x, slope, group = calls.inputs[weight].detach(), slopes[weight], problem.groups[name]
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

"""Several rounds: a part of the units goes, what is left is repaired, and scores are taken anew."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import Argument, HapError
from hap.groups.groups import Groups
from hap.implants import Implant
from hap.planning.budget import Budget, Limits
from hap.planning.choose_units import plan
from hap.planning.order import Order
from hap.planning.plan import Plan
from hap.pruning.plan_for_latency import plan_for_latency
from hap.pruning.repair import repaired_copy
from hap.scoring import Criterion, Scores, score
from hap.scoring.base import Loss
from hap.surgery.cut import masked_copy


@dataclass(frozen=True)
class Choice:
    """How the units that go are chosen: what `hap.score`, `hap.plan` and `hap.plan_for_latency` are asked for."""

    model: nn.Module
    groups: Groups
    example: Any
    batches: list[Any] | None
    loss: Loss | None
    criterion: Criterion | str
    implant: Implant | None
    limits: Limits
    per_cost: bool
    backend: str = "eager"
    threads: int | None = None
    known: Scores | None = None
    """Scores of the model that are there already."""

    def dense_scores(self) -> Scores:
        return self.scores(self.model) if self.known is None else self.known

    def scores(self, model: nn.Module) -> Scores:
        return score(model, self.groups, self.batches, self.loss, self.criterion)

    def plan(self, scores: Scores, budget: Budget, implant: Implant | None) -> Plan:
        if budget.latency is None:
            return plan(self.groups, scores, budget, implant, self.limits, per_cost=self.per_cost)
        how: dict[str, Any] = {"per_cost": self.per_cost, "backend": self.backend, "threads": self.threads}
        given = self.model, self.groups, scores, self.example, budget, implant, self.limits
        return plan_for_latency(*given, **how).plan


def plan_in_rounds(choice: Choice, budget: Budget, rounds: int, repair: str | None) -> tuple[Plan, nn.Module | None]:
    """The plan of the last round, on the dense model, and a model of the dense shape with the values to start from.

    After each round but the last, the pruned and repaired network is written back into the dense shape, with zeros for
    what is gone, and scored again. Its budgets fall by the same factor each; the last one is `budget` itself. Implants
    are placed in the last round.
    """
    start: nn.Module | None = None
    scores = choice.dense_scores()
    for number in range(1, rounds):
        made = choice.plan(scores, _share(budget, number / rounds), None)
        start = masked_copy(choice.model, repaired_copy(choice.model, made, choice.batches, repair, start), made)
        scores = below_all(choice.scores(start), made.removed)
    return choice.plan(scores, budget, choice.implant), start


def check_rounds(rounds: int, latency: float | None, implant: Implant | None, order: Order | None = None) -> None:
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise HapError(Argument("rounds", rounds), "; expected a whole number of at least 1")
    if rounds > 1 and latency is not None:
        why = " takes one round, since it is met by timing copies; ask for "
        raise HapError(Argument("latency", latency), why, Argument("flops"), " instead, or leave out rounds")
    if rounds > 1 and order is not None:
        why = " takes scores anew after each, and an order has those of the dense model alone; leave out one of them"
        raise HapError(Argument("rounds", rounds), why)
    if rounds > 1 and implant is not None and implant.needs_head_spaces:
        raise HapError(
            f"{type(implant).__name__} turns heads of the dense model, which takes one round; leave out rounds"
        )


def below_all(scores: Scores, gone: dict[str, list[int]]) -> Scores:
    """The scores, with those of units that are gone far below all others, so that they go first again."""
    least = -1e12 * (1 + max((float(v.abs().max()) for v in scores.values() if len(v)), default=0.0))

    def without(name: str, values: Tensor) -> Tensor:
        lost = torch.tensor(gone.get(name, []), dtype=torch.int64)
        return values.index_fill(0, lost, least)

    return Scores({name: without(name, values) for name, values in scores.items()}, scores.errors, scores.about)


def _share(budget: Budget, done: float) -> Budget:
    """What is left after a share of the rounds."""
    return replace(budget, **{kind: float(left**done) for kind, left in budget.given.items()})

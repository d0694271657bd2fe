"""Several rounds: a part of the units goes, what is left is repaired, and scores are taken anew."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import Argument, HapError
from hap.implants import Implant
from hap.planning.budget import Budget
from hap.planning.plan import Plan
from hap.pruning.repair import repaired_copy
from hap.scoring import Scores
from hap.surgery.cut import masked_copy

ScoreModel = Callable[[nn.Module], Scores]
Choose = Callable[[Scores, Budget, bool], Plan]
"""From scores and a budget to a plan; whether it is the last round, in which implants are placed."""


def plan_in_rounds(
    model: nn.Module,
    score: ScoreModel,
    choose: Choose,
    budget: Budget,
    rounds: int,
    batches: list[Any] | None,
    repair: str | None,
) -> tuple[Plan, nn.Module | None]:
    """The plan of the last round, on the dense model, and a model of the dense shape with the values to start from.

    After each round but the last, the pruned and repaired network is written back into the dense shape, with zeros for
    what is gone, and scored again. Its budgets fall by the same factor each; the last one is `budget` itself.
    """
    start: nn.Module | None = None
    gone: dict[str, list[int]] = {}
    for number in range(1, rounds + 1):
        last = number == rounds
        scores = below_all(score(model if start is None else start), gone)
        plan = choose(scores, budget if last else _share(budget, number / rounds), last)
        if not last:
            repaired = repaired_copy(model, plan, batches, repair, start)
            start, gone = masked_copy(model, repaired, plan), plan.removed
    return plan, start


def check_rounds(rounds: int, budget: Budget, implant: Implant | None) -> None:
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise HapError(Argument("rounds", rounds), "; expected a whole number of at least 1")
    if rounds > 1 and budget.latency is not None:
        why = " takes one round, since it is met by timing copies; ask for "
        raise HapError(Argument("latency", budget.latency), why, Argument("flops"), " instead, or leave out rounds")
    if rounds > 1 and implant is not None and implant.needs_head_spaces:
        raise HapError(f"{type(implant).__name__} turns heads of the dense model, which takes one round; leave out rounds")


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

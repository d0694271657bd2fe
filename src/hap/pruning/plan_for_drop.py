"""Plan for a tolerated loss of quality: the smallest network that is at most so much worse, found by trying."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import Argument, HapError
from hap.execution.calibration_inputs import held_out
from hap.execution.calling import call_arguments, copied, eval_mode
from hap.execution.gram_regression import pairs
from hap.planning.budget import Budget
from hap.planning.choose_units import least_flops
from hap.planning.plan import Plan, Tried
from hap.pruning.prune_in_rounds import Choice, plan_in_rounds
from hap.pruning.repair import repaired_copy
from hap.scoring.base import Loss, samples
from hap.scoring.sample_axis import samples_of
from hap.utils import distributed

TRIALS = 7
"""So many networks are tried: the share of FLOPs that is left is then known to less than one in a hundred."""
CONFIDENCE = 0.95

Evaluate = Callable[[nn.Module], Tensor | float]
"""How good a model is, higher is better: one value for each of some samples, or one number."""


@dataclass(frozen=True)
class Tolerance:
    """How much worse a pruned network may be than the dense one: `most`, by what `evaluate` returns."""

    name: str
    most: float
    evaluate: Evaluate

    def __post_init__(self) -> None:
        if isinstance(self.most, bool) or not isinstance(self.most, int | float) or not 0 < self.most < math.inf:
            raise HapError(Argument(self.name, self.most), "; expected a number above 0")

    def values(self, model: nn.Module) -> Tensor:
        """What `evaluate` returns, as a vector."""
        with eval_mode(model), torch.no_grad():
            found = self.evaluate(model)
        values = torch.as_tensor(found, dtype=torch.float64).detach().cpu().flatten()
        if not len(values) or not bool(values.isfinite().all()):
            who = "evaluate" if self.name == "max_drop" else "the negative loss of each sample held out"
            raise HapError(f"{who} returns {found!r:.80}; expected a finite number, or one for each of some samples")
        return values


def goal_of(
    limits: dict[str, float | None],
    max_drop: float | None,
    max_rise: float | None,
    evaluate: Evaluate | None,
    batches: list[Any] | None,
    loss: Loss | None,
) -> Budget | Tolerance:
    """What `prune_` is to reach: a budget, or a tolerance in place of one."""
    if evaluate is not None and max_drop is None:
        raise HapError("evaluate is for max_drop, which is not given: nothing else would call it")
    if max_drop is None and max_rise is None:
        return Budget(**limits)
    check_alone({"max_drop": max_drop, "max_rise": max_rise, **limits})
    if max_drop is not None:
        if evaluate is None:
            wanted = "evaluate, a function of the model that returns how good it is on data held out, higher is better"
            raise HapError(Argument("max_drop", max_drop), f" needs {wanted}")
        return Tolerance("max_drop", max_drop, evaluate)
    if batches is None or loss is None:
        raise HapError(Argument("max_rise", max_rise), " needs batches, an iterable of (input, target), and a loss")
    return Tolerance("max_rise", max_rise, lambda model: -held_out_losses(model, batches, loss))  # type: ignore[arg-type]


def check_alone(asked: dict[str, float | None]) -> None:
    """Refuse several goals, of which one is a tolerance."""
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) > 1:
        raise HapError(*Argument.listed(given), "; give a tolerated drop or a budget, not both")


@torch.no_grad()
def held_out_losses(model: nn.Module, batches: list[Any], loss: Loss) -> Tensor:
    """The loss of each sample that a refit holds out: every fourth one."""
    found, before = [], 0
    for batch in pairs(batches, next(model.parameters()).device):
        args, kwargs = copied(call_arguments(batch[0]))
        both = model(*args, **kwargs), batch[1]
        count = samples(batch)
        if samples(both) != count:
            seen = f"{count} samples go in and {samples(both)} come out on the first axis"
            raise HapError(f"losses of single samples cannot be told apart: {seen}; use max_drop with evaluate")
        for place in torch.arange(count)[held_out(before + torch.arange(count))].tolist():
            found.append(loss(*samples_of(both, slice(place, place + 1))))
        before += count
    if not found:
        raise HapError(f"batches have {before} samples, of which every fourth is held out; give at least four")
    return torch.stack(found)


def reach(choice: Choice, goal: Budget | Tolerance, rounds: int, repair: str | None) -> tuple[Plan, nn.Module | None]:
    """A plan, and the network that it leaves, repaired; None where that is nothing but cut."""
    if isinstance(goal, Tolerance):
        return plan_for_drop(choice, goal, rounds, repair)
    plan, start = plan_in_rounds(choice, goal, rounds, repair)
    if repair is None and start is None:
        return plan, None
    return plan, repaired_copy(choice.model, plan, choice.batches, repair, start)


def plan_for_drop(
    choice: Choice, allowed: Tolerance, rounds: int = 1, repair: str | None = "refit"
) -> tuple[Plan, nn.Module]:
    """The plan that leaves the fewest FLOPs within the tolerance, and the pruned and repaired network.

    Bisection over budgets of FLOPs. Each network is pruned and repaired on a copy, and counts as within the tolerance
    if its mean drop is so with 95% confidence, all trials together: paired over samples, where `evaluate` returns one
    value for each. The plan's `curve` has all that was tried.
    """
    if distributed.processes() > 1:
        raise HapError(Argument(allowed.name, allowed.most), " is met by one process; start without torchrun")
    if repair not in (None, "refit"):
        why = f" is met by refits, which hold samples out; expected repair 'refit' or 'none', not {repair!r}"
        raise HapError(Argument(allowed.name, allowed.most), why)
    dense = allowed.values(choice.model)
    choice = replace(choice, known=(scores := choice.dense_scores()))
    low = least_flops(choice.groups, scores, choice.implant, choice.limits, choice.per_cost)
    high, tried, best = 1.0, list[tuple[Plan, Tried]](), None
    for _ in range(TRIALS):
        share = (low + high) / 2
        plan, start = plan_in_rounds(choice, Budget(flops=share), rounds, repair)
        about = next((about for other, about in tried if other == plan), None)
        if about is None:
            network = repaired_copy(choice.model, plan, choice.batches, repair, start)
            drop, bound = drop_and_bound(dense, allowed.values(network))
            left = plan.after.macs / plan.before.macs, plan.after.params / plan.before.params
            about = Tried(*left, drop, bound, bound <= allowed.most)
            tried.append((plan, about))
            best = (plan, network) if about.within else best
        low, high = (low, share) if about.within else (share, high)
    curve = sorted((about for _, about in tried), key=lambda about: about.flops)
    if best is None:
        nearest = curve[-1]
        more = f", and may be {nearest.bound:.4g} with {CONFIDENCE:.0%} confidence"
        unsure = more if len(dense) > 1 else ""
        raise HapError(
            Argument(allowed.name, allowed.most),
            f" cannot be held: with {nearest.flops:.1%} of the FLOPs left the drop is {nearest.drop:.4g}{unsure}. "
            "Tolerate more, or evaluate on more samples.",
        )
    return replace(best[0], curve=tuple(curve)), best[1]


def drop_and_bound(dense: Tensor, pruned: Tensor) -> tuple[float, float]:
    """The mean drop, and what it is at most with 95% confidence over all trials.

    The drops of samples are taken as normal, and one sample more is counted that loses as much as a sample can: so few
    samples, or equal ones, do not look certain. Of a single number the drop itself is all that is known.
    """
    if dense.shape != pruned.shape:
        raise HapError(f"evaluate returns {len(pruned)} values for a pruned model and {len(dense)} for the dense one")
    drops = dense - pruned
    mean = float(drops.mean())
    if len(drops) == 1:
        return mean, mean
    worst = torch.stack([dense.max() - dense.min(), dense.abs().max(), drops.abs().max()]).max()
    more = torch.cat([drops, worst[None]])
    z = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / TRIALS)
    return mean, float(more.mean() + z * more.std() / len(more) ** 0.5)

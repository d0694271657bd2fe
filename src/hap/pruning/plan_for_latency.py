"""plan_for_latency: a plan that meets a budget of measured time. Networks are pruned, timed, and planned anew."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hap.errors import Argument, HapError
from hap.execution.fast_copy import deepcopied
from hap.groups.groups import Groups
from hap.implants import Implant, as_implant
from hap.planning.budget import DEFAULT_LIMITS, Budget, Limits
from hap.planning.choose_units import least_flops, plan
from hap.planning.plan import Plan
from hap.pruning.latency import Stopwatch
from hap.surgery.cut import rebuild_

ROUNDINGS = (1, 8, 16, 32, 64)
"""Widths that hardware may like multiples of; measuring decides which."""
AIM, NEAR = 0.9875, 0.975
"""A search aims a little below the budget, and ends once it is between this share of it and all of it: with what
measuring is off by, that is within 3%."""
STEPS = 6
RUNS, MOST_RUNS, WARMUP, ERROR = 15, 90, 3, 0.005
"""Rounds are added until the standard error of the median ratio is below this share of it."""


@dataclass(frozen=True)
class Trial:
    """A plan that was carried out on a copy and timed: `ratio` is its time as a share of the dense model's."""

    flops: float
    round_to: int
    ratio: float
    plan: Plan


@dataclass(frozen=True)
class TimedPlan:
    """The plan found, the share of the dense model's time that was measured for it and how, and all that was tried."""

    plan: Plan
    ratio: float
    round_to: int
    backend: str
    threads: int
    device: str
    trials: tuple[Trial, ...]


def plan_for_latency(
    model: nn.Module,
    groups: Groups,
    scores: Mapping[str, Tensor],
    example: Any,
    budget: Budget,
    implant: Implant | float | None = None,
    limits: Limits = DEFAULT_LIMITS,
    *,
    per_cost: bool = False,
    backend: str = "eager",
    threads: int | None = None,
) -> TimedPlan:
    """Choose what to keep so that the pruned model takes at most `budget.latency` of the dense one's time.

    >>> net, x = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).eval(), torch.randn(64, 64)
    >>> groups = hap.trace(net, x)
    >>> scores = hap.score(net, groups, None, None, "magnitude")
    >>> hap.plan_for_latency(net, groups, scores, x, hap.Budget(latency=0.9)).ratio <= 0.9
    True

    Copies of the model are pruned to other shares of the multiply-adds and timed in turns with the dense one, as
    `hap.compare_latency` does, until the time is at most the budget and within 3% of it.

    Arguments: those of `hap.plan` and `hap.latency`. `example` is what is timed; it may have another batch than the
    traced one. With `limits.round_to` left at 1, widths are multiples of that of 1, 8, 16, 32 and 64 with which the
    least score is lost for the time.
    Returns: the plan, with what was measured for it and all that was tried.
    """
    if budget.latency is None:
        seen = " and ".join(budget.given)
        raise HapError(f"the budget is on {seen}; expected Budget(latency=...). hap.plan knows the others")
    with Stopwatch(example, backend, threads) as watch:
        search = _Search(model, groups, scores, watch, budget.latency, as_implant(implant), limits, per_cost)
        found = search.run()
    how = (backend, watch.threads, str(watch.device))
    return TimedPlan(found.plan, found.ratio, found.round_to, *how, tuple(search.trials))


@dataclass
class _Search:
    """Trials so far, and where to look next. All shares of FLOPs and of time are of the dense model's."""

    model: nn.Module
    groups: Groups
    scores: Mapping[str, Tensor]
    watch: Stopwatch
    target: float
    implant: Implant | None
    limits: Limits
    per_cost: bool
    trials: list[Trial] = field(default_factory=list)
    least: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = replace(self.groups, costs=replace(self.groups.costs, uncounted=()))  # time is measured instead
        self.dense = self.watch.add(self.model)

    def run(self) -> Trial:
        """The trial that meets the budget, closely if any does, with the least score lost."""
        for round_to in self._roundings():
            self._close_in(round_to)
            if self._near(self.trials):
                break
        met = [t for t in self.trials if t.ratio <= self.target]
        if not met:
            fastest = min(self.trials, key=lambda t: t.ratio)
            raise HapError(
                Argument("latency", self.target),
                " cannot be reached: the fastest network that these limits allow takes "
                f"{fastest.ratio:.3f} of the dense model's time ({self.watch.backend}, {self.watch.threads} threads on "
                f"{self.watch.device}). Ask for that or more, raise ",
                Argument("per_layer", text="Limits.per_layer"),
                ", or time a larger batch.",
            )
        return min(met, key=lambda t: (not self._near([t]), self._lost(t.plan)))

    def _roundings(self) -> list[int]:
        """What to round widths to, best first: that with the least score lost, then all finer ones. All are timed at
        the same FLOPs, and the FLOPs at which each would meet the budget follow from that."""
        choices = ROUNDINGS if self.limits.round_to == 1 else (self.limits.round_to,)
        for round_to in choices:
            limits = replace(self.limits, round_to=round_to)
            least = least_flops(self.groups, self.scores, self.implant, limits, per_cost=self.per_cost)
            self.least[round_to] = min(least + 1e-9, 1.0)  # as a fraction it may be rounded to less than that
        able = [r for r in choices if self.least[r] < 1]
        if not able:
            raise HapError(Argument("round_to", self.limits.round_to), " leaves nothing to remove; lower it")
        self._time([(r, self._plan(self.target, r)) for r in able])
        needed = {t.round_to: _line((1.0, 1.0), (t.flops, t.ratio), AIM * self.target) for t in self.trials}
        best = min(needed, key=lambda r: (needed[r] < self.least[r], self._lost(self._plan(needed[r], r))))
        return [r for r in reversed(able) if r <= best]

    def _close_in(self, round_to: int) -> None:
        """Time plans between the slowest that meets the budget and the fastest that does not."""
        for _ in range(STEPS):
            trials = [t for t in self.trials if t.round_to == round_to]
            if self._near(trials):
                return
            missed = [(t.flops, t.ratio) for t in trials if t.ratio > self.target]
            above = min(missed, default=(1.0, 1.0))
            below = max(((t.flops, t.ratio) for t in trials if t.ratio <= self.target), default=None)
            if below is None:  # go on from here, and after two such steps as far as the limits allow
                flops = _line((1.0, 1.0), above, AIM * self.target) if len(missed) < 3 else 0.0
            else:
                flops = _line(above, below, AIM * self.target)
                if not below[0] < flops < above[0]:
                    flops = (below[0] + above[0]) / 2
            tried = self._plan(flops, round_to)
            if any(t.plan.kept == tried.kept and t.plan.implanted == tried.implanted for t in trials):
                return
            self._time([(round_to, tried)])

    def _near(self, trials: list[Trial]) -> bool:
        return any(NEAR * self.target <= t.ratio <= self.target for t in trials)

    def _plan(self, flops: float, round_to: int) -> Plan:
        budget = Budget(flops=min(max(flops, self.least[round_to]), 1.0))
        limits = replace(self.limits, round_to=round_to)
        return plan(self.groups, self.scores, budget, self.implant, limits, per_cost=self.per_cost)

    def _lost(self, tried: Plan) -> float:
        """The scores of all units that go or are implanted: what the loss is expected to rise by."""
        gone = {n: tried.removed[n] + tried.implanted[n] for n in tried.removed}
        return sum(float(self.scores[n][units].double().sum()) for n, units in gone.items() if units)

    def _time(self, plans: list[tuple[int, Plan]]) -> None:
        """Time plans, each with what it rounds to, in turns with the dense model."""
        calls = [self.dense, *(self.watch.add(rebuild_(deepcopied(self.model, {}).eval(), p)) for _, p in plans)]
        ratios: list[list[float]] = [[] for _ in plans]
        most = MOST_RUNS if len(plans) == 1 else RUNS  # several are only compared, to go on with one
        while len(ratios[0]) < most and any(_error(r) > ERROR for r in ratios):
            dense, *pruned = self.watch.time(calls, RUNS, 0 if ratios[0] else WARMUP)
            for seen, found in zip(ratios, pruned, strict=True):
                seen += found.ratios_to(dense)
        for (round_to, tried), seen in zip(plans, ratios, strict=True):
            flops = tried.after.macs / tried.before.macs
            self.trials.append(Trial(flops, round_to, statistics.median(seen), tried))


def _error(values: list[float]) -> float:
    """The standard error of the median as a share of it, taken from the quartiles: a few wild values do not matter."""
    if not values:
        return math.inf
    low, median, high = statistics.quantiles(values, n=4)
    return 0.93 * (high - low) / math.sqrt(len(values)) / median


def _line(a: tuple[float, float], b: tuple[float, float], y: float) -> float:
    """Where the straight line through two points of (flops, time) has time `y`; 0 if it does not fall."""
    (x0, y0), (x1, y1) = a, b
    return x0 + (y - y0) * (x1 - x0) / (y1 - y0) if (x1 - x0) * (y1 - y0) > 0 else 0.0

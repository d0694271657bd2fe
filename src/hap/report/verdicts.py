"""Whether one method is above another, as far as the seeds that have run can tell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hap.report.rows import Row

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 15: 2.131,
        20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}  # fmt: skip
"""By degrees of freedom, how many standard errors to either side hold 95% of Student's t."""
HELD, NOT_HELD, NOISE, UNKNOWN = "held", "not held", "within the noise", "no spread known"


@dataclass(frozen=True)
class Comparison:
    """One method above another at one budget. `difference` is in points of accuracy and with 95% confidence right to
    `margin`, which a single seed does not tell; `seeds` says which were compared, and how."""

    kind: str
    percent: float
    difference: float
    margin: float | None
    seeds: str

    @property
    def verdict(self) -> str:
        if self.margin is None:
            return UNKNOWN
        if abs(self.difference) <= self.margin:
            return NOISE
        return HELD if self.difference > 0 else NOT_HELD


def compare(above: str, below: str, rows: Sequence[Row]) -> tuple[list[Comparison], int]:
    """The label `above` against `below` at every budget at which both have run, and how many budgets both have."""
    first, second = ({row.budget: row for row in rows if row.label == name} for name in (above, below))
    common = [budget for budget in first if budget in second]
    found = []
    for kind, percent in common:
        sides = first[kind, percent].by_seed, second[kind, percent].by_seed
        if all(sides):
            found.append(Comparison(kind, percent, *difference(*sides)))
    return found, len(common)


def difference(above: dict[int, float], below: dict[int, float]) -> tuple[float, float | None, str]:
    """The difference of two methods whose accuracies are known by seed, its margin, and what was compared.

    Networks of one seed come from one dense network: where two seeds at least are shared, their differences are taken
    seed by seed. Otherwise Welch's interval, which needs two seeds of each.
    """
    shared = [seed for seed in above if seed in below]
    pairs = [above[seed] - below[seed] for seed in shared]
    if len(pairs) > 1:
        return statistics.fmean(pairs), margin(pairs), f"{len(pairs)} seeds in pairs"
    if len(above) > 1 and len(below) > 1:
        return _welch(list(above.values()), list(below.values()))
    if shared:
        return pairs[0], None, "1 seed"
    return statistics.fmean(above.values()) - statistics.fmean(below.values()), None, "1 seed, not the same"


def _welch(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, str]:
    squares = [statistics.variance(side) / len(side) for side in (above, below)]
    weights = [square**2 / (len(side) - 1) for square, side in zip(squares, (above, below), strict=True)]
    freedom = sum(squares) ** 2 / sum(weights) if any(weights) else 1.0
    within = _margin(sum(squares), freedom)
    return statistics.fmean(above) - statistics.fmean(below), within, f"{len(above)} and {len(below)} seeds"


def margin(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of a mean over seeds; of one seed it is not known."""
    return None if len(values) < 2 else _margin(statistics.variance(values) / len(values), len(values) - 1)


def _margin(squared_error: float, freedom: float) -> float:
    """Half of the 95% interval. Degrees of freedom between those of the table count as the fewer."""
    return T_95[max(n for n in T_95 if n <= max(freedom, 1))] * squared_error**0.5

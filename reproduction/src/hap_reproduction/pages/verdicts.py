"""Whether one method is above another, as far as the seeds that have run can tell."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hap_reproduction.pages.rows import Noise, Row

HELD, NOT_HELD, NOISE, UNKNOWN = "held", "not held", "within the noise", "no spread known"


@dataclass(frozen=True)
class Comparison:
    """One method above another at one budget. `difference` is in points of accuracy and with 95% confidence right to
    `margin`, which is not known where nothing has run with several seeds; `seeds` says how many were compared."""

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
        one, other = first[kind, percent], second[kind, percent]
        if one.records and other.records:
            found.append(Comparison(kind, percent, *difference(one.accuracies, other.accuracies, one.noise)))
    return found, len(common)


def difference(above: Sequence[float], below: Sequence[float], noise: Noise | None) -> tuple[float, float | None, str]:
    """The difference of two methods whose accuracies are known by seed, its margin, and how many seeds they have."""
    counts = len(above), len(below)
    words = (
        f"{counts[0]} seed{'s' * (counts[0] > 1)}" if counts[0] == counts[1] else f"{counts[0]} and {counts[1]} seeds"
    )
    points = statistics.fmean(above) - statistics.fmean(below)
    return points, None if noise is None else noise.margin(*counts), words

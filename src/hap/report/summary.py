"""Results of the same network put together: one row per method, over its seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hap.workflow.results import Result


@dataclass(frozen=True)
class Row:
    """One method. `deviation` (of the accuracy over seeds) is None for a single seed; shares are against the dense
    network. `speed` is the median over the runs of how many times faster than the dense network, timed in turns with
    it; `latency`, in milliseconds, is the dense network's divided by that, so the two never disagree."""

    name: str
    accuracies: tuple[float, ...]
    one_shot: float | None
    params: int
    params_left: float
    macs: int
    macs_left: float
    latency: float
    speed: float
    dense: bool

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def summarise(results: Sequence[Result]) -> list[Row]:
    """One row per method, in the order of the results."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    # The dense network was timed again beside each pruned one; all of that goes into its figure.
    latency = statistics.median(result.dense.latency for result in results)
    return [_row(name, members, latency) for name, members in by_name.items()]


def _row(name: str, members: list[Result], dense_latency: float) -> Row:
    first = members[0]
    side, dense = first.measured, first.dense
    speed = statistics.median(r.dense.latency / r.measured.latency for r in members)
    return Row(
        name=name,
        accuracies=tuple(r.measured.accuracy for r in members),
        one_shot=first.one_shot,
        params=side.params,
        params_left=side.params / dense.params,
        macs=side.macs,
        macs_left=side.macs / dense.macs,
        latency=dense_latency / speed,
        speed=speed,
        dense=first.pruned is None,
    )

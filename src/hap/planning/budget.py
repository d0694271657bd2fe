"""What may be left of a model, and what a plan may not do to get there."""

import math
from dataclasses import dataclass

import numpy as np

from hap.errors import NO_VALUE, Argument, ForPython, HapError
from hap.groups.types import Ints
from hap.planning.cost import Cost

AMOUNTS = {"flops": "macs", "heads": "channels", "mlp": "channels"}
"""What of a cost a limit is on, where that has another name."""


@dataclass(frozen=True)
class Budget:
    """What may be left, as a fraction of the dense model: one or several of these, which all hold then.

    >>> budget = hap.Budget(params=0.5, flops=0.4)

    Arguments: `params`: parameters; `flops`: multiply-adds of layers and matrix products; `channels`: units;
    `activations`: values that convolutions, linear and recurrent layers write, which say more than FLOPs about the time
    on a GPU. Or `latency` alone: measured time, which `hap.prune_` and `hap.plan_for_latency` know how to meet.
    """

    params: float | None = None
    flops: float | None = None
    channels: float | None = None
    latency: float | None = None
    activations: float | None = None

    def __post_init__(self) -> None:
        for kind, value in self.given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise HapError(
                    Argument(kind, value), "; expected the fraction that is LEFT, above 0 and at most 1, such as 0.4"
                )
        if not self.given or (self.latency is not None and len(self.given) > 1):
            seen = Argument.listed(self.given) or ["nothing"]
            several = Argument.listed(dict.fromkeys(("params", "flops", "channels", "activations"), NO_VALUE))
            wanted = ["; expected one or several of ", *several, ", or ", Argument("latency"), " alone"]
            raise HapError("the budget says ", *seen, *wanted)

    @property
    def given(self) -> dict[str, float]:
        """What there is a limit on, and the fraction that may be left of it."""
        return {kind: value for kind, value in vars(self).items() if value is not None}

    def of(self, cost: Cost) -> Ints:
        """The amounts that there are limits on, in the order of `given`."""
        return np.array([getattr(cost, AMOUNTS.get(kind, kind)) for kind in self.given], dtype=np.int64)


@dataclass(frozen=True)
class Limits:
    """How far a plan may go.

    >>> limits = hap.Limits(per_layer=0.5, round_to=8, leave=("stem*",))

    Arguments: at most the share `per_layer` of a group is removed, and at least `minimum` units stay. The number that
    stay is a multiple of `round_to`, or all of them. Groups that match a pattern in `leave` are not touched.
    """

    per_layer: float = 0.95
    minimum: int = 1
    round_to: int = 1
    leave: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.per_layer <= 1:
            raise HapError(Argument("per_layer", self.per_layer), "; expected a fraction between 0 and 1")
        if self.minimum < 1 or self.round_to < 1:
            minimum, both = ForPython(f"minimum={self.minimum}, "), ForPython(" for both")
            raise HapError(minimum, Argument("round_to", self.round_to), "; expected at least 1", both)

    def removable(self, units: int) -> int:
        """How many of a group's units may go."""
        return max(0, min(math.floor(units * self.per_layer), units - self.minimum))


DEFAULT_LIMITS = Limits()

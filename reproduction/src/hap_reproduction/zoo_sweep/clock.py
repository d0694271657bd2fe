"""Seconds spent on named pieces of work, memory that they do not wait for, limits, and reasons for what failed."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hap.errors import HapError
from hap_reproduction.zoo_sweep.models import Missing

T = TypeVar("T")
TOO_LARGE = 77
"""The exit status of a process that needs more memory than it may have."""


class OutOfTime(BaseException):
    """The limit is spent. No Exception, so that code which tries something and goes on when it fails lets it pass."""

    def __init__(self, limit: float):
        super().__init__(f"took longer than {limit:g} s")


class Clock:
    """`clock("trace", work)` runs `work` and adds its seconds under that name.

    Only what is given to the clock counts towards its limit, not building or counting a model in between.
    """

    def __init__(self, limit: float = inf):
        self.limit = limit
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        left, begun = self.limit - self.total, time.perf_counter()
        try:
            with _alarm(left, OutOfTime(self.limit)):
                return work()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@contextmanager
def _alarm(seconds: float, error: BaseException) -> Iterator[None]:
    """Raise `error` inside when the seconds are over."""
    if seconds == inf:
        yield
        return

    def ring(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def warm_memory(model: nn.Module) -> None:
    """Get as much memory as the model takes from the system, and keep it: that belongs to no model's seconds either."""
    torch.empty(sum(p.nbytes for p in model.parameters()), dtype=torch.uint8).zero_()


def forget() -> None:
    """What torch.export remembers of the operators it has seen: whoever exports first pays for whoever does it next."""
    FakeTensorMode.cache_clear()


def reason(error: BaseException) -> str:
    """Why something failed, in one line: the error that began it, unless hap has said it in its own words."""
    while error.__cause__ is not None and not isinstance(error, HapError):
        error = error.__cause__
    text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())
    return text if isinstance(error, OutOfTime) else f"{type(error).__name__}: {text}"[:300]


def failure(error: BaseException) -> dict[str, Any]:
    """What a record says of a model that was not pruned for this."""
    return {"verified": False, "why": reason(error)} | ({"missing": True} if isinstance(error, Missing) else {})

"""The descent itself: a learning rate found by short runs, then one long run that ends at rate zero."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hap.distil.hints import Hints
from hap.distil.objective import Objective
from hap.distil.samples import Samples, Wanted
from hap.errors import HapError
from hap.execution.calling import call_arguments, copied
from hap.utils.module_tree import named_tensors

FIRST_RATE = 3e-4
FACTOR = 10**0.5
"""Between the learning rates that are tried."""
TRIED = 4
"""So many rates are tried at most."""
NEARLY = 1.05
"""Of rates that came to nearly as little the largest is taken: short runs prefer smaller rates than long ones do."""
SEARCH = 0.2
"""The share of the budget for finding the rate."""
WARMUP = 0.05
"""The share of a run in which the rate rises."""
LOOKS = 12
"""How often the samples held out are looked at in the long run, less where that would take long."""
LOOKING = 0.1
"""The share of the time that looking takes at most."""
PATIENCE = 0.35
"""The descent ends when nothing has improved for this share of the budget."""


class Clock:
    """How much of a budget of minutes or of steps is used."""

    def __init__(self, minutes: float | None, steps: int | None):
        self.minutes, self.most_steps, self.steps, self.begun = minutes, steps, 0, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    @property
    def share(self) -> float:
        if self.most_steps is not None:
            return self.steps / self.most_steps
        assert self.minutes is not None
        return self.seconds / (60 * self.minutes)


def next_number(values: dict[int, float]) -> int | None:
    """Which rate to try next: beside the best so far, the larger one first. None after enough, or at the top of a hill.

    `values` holds the objective for the numbers of rates that were tried, infinity where it was not finite.
    """
    finite = [number for number in values if values[number] < math.inf]
    if not values or len(values) == TRIED:
        return None if values else 0
    if not finite:
        return min(values) - 1
    best = min(finite, key=values.__getitem__)
    return next((number for number in (best + 1, best - 1) if number not in values), None)


class Descent:
    """A pruned model on its way to what the dense one returns, in eval mode, by Adam. `tell` hears of progress.

    With `hints` it learns what modules inside return as well: rates are compared by that, too, and the best weights are
    those whose outputs are best.
    `history` holds the share of the budget that was used at each look, and the objective on what is held out.
    """

    def __init__(
        self,
        models: tuple[nn.Module, nn.Module],
        samples: Samples,
        objective: Objective,
        augment: Callable[[Any], Any] | None,
        clock: Clock,
        tell: Callable[[float, float], None],
        hints: bool,
    ):
        self.model, self.dense = models
        self.samples, self.objective, self.augment, self.clock, self.tell = samples, objective, augment, clock, tell
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        every = [torch.arange(pool.count) for pool in samples.pools]
        self.wanted = Wanted(lambda x: self._compute_all(self.dense, x), samples, samples.held if augment else every)
        self.batches = samples.fitted_batches()
        self.hints = self._find_hints() if hints else None
        self.history: list[tuple[float, float]] = []
        self.tried: dict[float, float] = {}
        self.finite = True
        self.best, self.best_state = self.look()[0], self.state()
        self.history.append((clock.share, self.best))
        if not math.isfinite(self.best):
            raise HapError(
                f"the {objective.kind} on what is held out is {self.best} before the first step; look for values that "
                "are not finite in inputs and weights"
            )

    def go(self) -> float:
        """Find a learning rate and follow it. The model then has the best weights seen, after an error the first ones.

        When interrupted, it has the best ones too.
        """
        start = self.best_state
        try:
            rate = self.find_rate()
            self.descend(rate)
        except BaseException as error:
            self.restore_(self.best_state if isinstance(error, KeyboardInterrupt) else start)
            raise
        self.restore_(self.best_state)
        return rate

    # ---- runs ---------------------------------------------------------------------------------------------------

    def find_rate(self) -> float:
        """The largest of a few learning rates that is nearly as good as the best, each tried from one start.

        The model goes on from where the best one ended.
        """
        start = end = self.best_state
        values: dict[int, float] = {}
        while (number := next_number(values)) is not None:
            self.restore_(start)
            values[number] = self._try(FIRST_RATE * FACTOR**number, self.clock.share + SEARCH / TRIED)
            end = self.state() if values[number] <= min(values.values()) else end
        self.tried = {FIRST_RATE * FACTOR**number: value for number, value in values.items()}
        least = min(self.tried.values())
        if least == math.inf:
            raise HapError(
                f"the {self.objective.kind} is not finite at any of the learning rates tried, "
                f"{', '.join(f'{rate:.2g}' for rate in self.tried)}; all weights are as before. Look for values "
                "that are not finite in inputs and in what augment makes of them"
            )
        self.restore_(end)
        return max(rate for rate, value in self.tried.items() if value <= NEARLY * least)

    def _try(self, rate: float, end: float) -> float:
        for _ in self._steps(rate, end):
            pass
        return self._note() if self.finite else math.inf

    def descend(self, rate: float) -> None:
        """Go on with this rate until the budget is used, or nothing improves any more."""
        begun = looked = improved = self.clock.share
        gap, least = (1 - begun) / LOOKS, math.inf
        for share in self._steps(rate, 1.0):
            if share - looked < gap:
                continue
            loss = self._note()
            looked = self.clock.share
            gap = max(gap, (looked - share) / LOOKING)
            improved, least = (looked, loss) if loss < least else (improved, least)
            if looked - improved > PATIENCE:
                return
        if not self.finite:
            raise HapError(
                f"the {self.objective.kind} is not finite after {self.clock.steps} steps, at a learning rate of "
                f"{rate:.2g}; all weights are as before. Look for values that are not finite in what augment returns"
            )
        self._note()

    def _steps(self, rate: float, end: float) -> Iterator[float]:
        """Steps until this share of the budget is used, or the loss is not finite: the share after each. The rate
        rises, and falls to zero."""
        optimizer = torch.optim.Adam(self.parameters, lr=rate)
        begun, self.finite = self.clock.share, True
        while (share := self.clock.share) < end and self.finite:
            done = (share - begun) / (end - begun)
            rise = min(1.0, (done + 1e-2) / WARMUP)
            for group in optimizer.param_groups:
                group["lr"] = rate * rise * 0.5 * (1 + math.cos(math.pi * done))
            self.finite = self._step(optimizer)
            self.tell(self.clock.share, self.best)
            yield self.clock.share

    # ---- a step -------------------------------------------------------------------------------------------------

    def _step(self, optimizer: torch.optim.Optimizer) -> bool:
        """One update on a mini-batch. False, and no update, where its loss is not finite."""
        batch = next(self.batches)
        with torch.no_grad():
            x = batch.input if self.augment is None else self.augment(batch.input)
            wanted = self.wanted.of(batch) if self.augment is None else self._compute_all(self.dense, x)
        with torch.enable_grad():
            objective, hints = self._errors(self._compute_all(self.model, x), wanted)
            loss = objective + hints
        self.clock.steps += 1
        if not loss.requires_grad:
            raise HapError(
                f"what {type(self.model).__name__} returns in eval mode does not depend on what may be trained"
            )
        if not math.isfinite(loss.item()):
            return False
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return True

    def _compute(self, model: nn.Module, x: Any) -> list[Tensor]:
        args, kwargs = copied(call_arguments(x))
        return self.objective.read(model(*args, **kwargs))

    def _compute_all(self, model: nn.Module, x: Any) -> list[Tensor]:
        """Outputs, and behind them the hints where there are any."""
        if self.hints is None:
            return self._compute(model, x)
        return self.hints.after(model, lambda model: self._compute(model, x))

    def _errors(self, found: list[Tensor], wanted: list[Tensor]) -> tuple[Tensor, Tensor | float]:
        """The objective, and the error of the hints. Their sum is the loss."""
        if self.hints is None:
            return self.objective(found, wanted), 0.0
        outputs = self.objective(self.hints.outputs(found), self.hints.outputs(wanted))
        return outputs, self.hints.error(found, wanted)

    def _find_hints(self) -> Hints | None:
        batch = next(self.samples.held_batches())
        fewer = self.samples.without_the_last(batch)
        return None if fewer is None else Hints((self.model, self.dense), self._compute, (batch.input, fewer.input))

    # ---- what is held out ---------------------------------------------------------------------------------------

    def _note(self) -> float:
        """Look at what is held out, keep the weights if their outputs are the best so far, and return the loss."""
        value, loss = self.look()
        self.history.append((self.clock.share, value))
        if value < self.best:
            self.best, self.best_state = value, self.state()
        return loss if math.isfinite(loss) else math.inf

    @torch.no_grad()
    def look(self) -> tuple[float, float]:
        """The objective on the samples held out, and the loss, which counts the hints as well."""
        total, count = torch.zeros(2, dtype=torch.float64), 0
        for batch in self.samples.held_batches():
            found, wanted = self._compute_all(self.model, batch.input), self.wanted.of(batch)
            objective, hints = map(float, self._errors(found, wanted))
            total += len(batch.index) * torch.tensor([objective, objective + hints], dtype=torch.float64)
            count += len(batch.index)
        value, loss = (total / count).tolist()
        return value, loss

    # ---- weights ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in named_tensors(self.model).items()}

    def restore_(self, state: dict[str, Tensor]) -> None:
        for name, tensor in named_tensors(self.model).items():
            tensor.data.copy_(state[name])

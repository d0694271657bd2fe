"""distil_: minutes of training towards the dense network's outputs, on calibration inputs and without labels."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from hap.distil.descent import Clock, Descent
from hap.distil.objective import Objective
from hap.distil.samples import Samples
from hap.errors import Argument, HapError
from hap.execution.calling import differentiable, eval_mode, seeded
from hap.execution.gram_regression import pairs
from hap.execution.input_checks import outside_inference
from hap.utils import distributed
from hap.utils.module_tree import named_tensors

MINUTES = 5.0
BATCH = 64


@dataclass(frozen=True)
class Distillation:
    """What `distil_` did. `before` and `after` are the objective on the samples held out.

    `tried` holds the loss, hints included, that each learning rate came to in a short run, and `history` the share of
    the budget at each look and the objective then. `undone`: nothing was better than the start, so that all weights are
    as before.
    """

    rate: float
    steps: int
    seconds: float
    objective: str
    before: float
    after: float
    tried: dict[float, float]
    history: tuple[tuple[float, float], ...]
    undone: bool

    def __str__(self) -> str:
        tried = ", ".join(f"{rate:.2g}: {value:.4f}" for rate, value in sorted(self.tried.items()))
        end = ", all undone" * self.undone
        return (
            f"learning rate {self.rate:.2g} (tried {tried})\n"
            f"{self.steps} steps in {self.seconds:.0f} s: {self.objective} on what is held out "
            f"{self.before:.4f} -> {self.after:.4f}{end}"
        )


def distil_(
    pruned: nn.Module,
    dense: nn.Module,
    inputs: Iterable[Any],
    minutes: float | None = None,
    *,
    augment: Callable[[Any], Any] | None = None,
    objective: str = "error",
    hints: bool = True,
    batch: int = BATCH,
    steps: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Distillation:
    """Train a pruned model for some minutes to return what the dense one returns, without labels.

    It goes on where `refit_` ends, on the same inputs. A quarter of the samples is held out: what is best there decides
    on the learning rate, and which of the weights on the way are kept, at least those of the start. The end comes early
    where nothing improves. Batch normalisations keep their statistics, and what requires no gradient stays as it is.
    When interrupted (KeyboardInterrupt) the model has the best weights so far; after another error, those of the start.

    Arguments:
        pruned: the model to train, which is changed in place.
        dense: the model that it was made from.
        inputs: an iterable of (input, target); targets are not looked at. A few thousand samples do.
        minutes: how long it may take, 5 if nothing is said.
        augment: makes of the input of some samples another one like it, such as random crops (`data.augment`), with
            random numbers of torch, numpy or Python, which are seeded. The dense model is asked anew.
        objective: "error" (squared, relative to the variance), or "divergence" (of softmaxes over the last axis).
        hints: whether to learn what modules inside return as well, where that has one shape in both models.
        batch: samples of a step, fewer where they are large. Those of one shape are drawn at random.
        steps: so many steps instead of minutes: the result is then determined.
        seed: of all that is drawn at random.
        progress: whether to show a bar; None where stderr is a terminal.

    Returns:
        A report; `print` shows the learning rate, and the objective on what is held out before and after.

    >>> import copy
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> dense, inputs = copy.deepcopy(net), [(torch.randn(256, 4), None)]
    >>> plan = hap.prune_(net, torch.randn(2, 4), inputs, criterion="magnitude", flops=0.5, repair="refit")
    >>> report = hap.distil_(net, dense, inputs, steps=50)
    >>> report.after <= report.before
    True
    """
    goal, clock = Objective(objective), _clock(minutes, steps)
    _check(pruned, dense, batch)
    show = sys.stderr.isatty() if progress is None else progress
    with outside_inference(pruned), eval_mode(pruned), eval_mode(dense), seeded(seed), differentiable(pruned):
        samples = Samples((x for x, _ in pairs(inputs, next(pruned.parameters()).device)), batch)
        with _bar(show) as tell, _without_gradients(pruned):
            descent = Descent((pruned, dense), samples, goal, augment, clock, tell, hints)
            rate = descent.go()
    before, after = descent.history[0][1], descent.best
    history, undone = tuple(descent.history), not after < before
    return Distillation(rate, clock.steps, clock.seconds, objective, before, after, descent.tried, history, undone)


def _clock(minutes: float | None, steps: int | None) -> Clock:
    if minutes is not None and steps is not None:
        raise HapError(f"minutes is {minutes} and steps is {steps}; give one of them")
    check_minutes(minutes)
    if steps is not None and steps < 1:
        raise HapError(Argument("steps", steps), "; expected at least 1")
    return Clock(MINUTES if minutes is None else minutes, steps)


def check_minutes(minutes: float | None) -> None:
    """Refuse a time that is none."""
    if minutes is not None and not 0 < minutes < float("inf"):
        raise HapError(Argument("minutes", minutes, text="minutes"), f" is {minutes}; expected a number above 0")


def _check(pruned: nn.Module, dense: nn.Module, batch: int) -> None:
    if distributed.processes() > 1:
        raise HapError("distil_ runs in one process: call it without torchrun, or before torch.distributed is set up")
    if batch < 1:
        raise HapError(Argument("batch", batch), "; expected at least 1 sample")
    own = {tensor.data_ptr(): name for name, tensor in named_tensors(pruned).items() if tensor.numel()}
    if shared := [name for name, tensor in named_tensors(dense).items() if tensor.data_ptr() in own]:
        raise HapError(
            f"{shared[0]} of the dense model is shared with the pruned one, which would train both; keep "
            "copy.deepcopy(model) from before the pruning as the dense one"
        )
    if not any(p.requires_grad for p in pruned.parameters()):
        raise HapError(
            "no parameter of the pruned model requires a gradient; call pruned.requires_grad_() to train all"
        )


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """No gradients at the start inside; outside those that there were."""
    before = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad


@contextmanager
def _bar(show: bool) -> Iterator[Callable[[float, float], None]]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), disable=not show))
        task = bar.add_task("distil", total=1.0)
        yield lambda share, best: bar.update(task, completed=share, description=f"distil  {best:.4f}")

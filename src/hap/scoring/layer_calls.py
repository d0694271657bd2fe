"""What layers read and return in a forward pass, recorded with its graph, where each layer is called once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.module_hooks import hooked
from hap.scoring.batch import Batch, samples
from hap.scoring.input_checks import check_alone, is_per_sample


@dataclass(frozen=True)
class Calls:
    """What layers read and returned, by the name of a weight that they own."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def owner(weight: str) -> str:
    """The name of the module that a parameter belongs to."""
    return weight.rpartition(".")[0]


@contextmanager
def recorded_calls(model: nn.Module, weights: Iterable[str]) -> Iterator[Calls]:
    """Inside, each call of a layer that owns one of these weights is recorded; a second call of it is an error."""
    calls = Calls()

    def before(weight: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if weight in calls.inputs:
            raise HapError(f"{weight} is used more than once in a forward pass, so its calls are not told apart")
        if args:
            calls.inputs[weight] = args[0]

    def after(weight: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        calls.outputs[weight] = output

    names = {weight: owner(weight) for weight in weights}
    read = [(name, partial(before, weight)) for weight, name in names.items()]
    returned = [(name, partial(after, weight)) for weight, name in names.items()]
    with hooked(model, before=read, after=returned, first=True):
        yield calls


def check_recorded(weights: Iterable[str], calls: Calls, instead: str) -> None:
    """Some modules use the weight of another one, or are called in a way that a hook cannot follow."""
    for weight in weights:
        if weight not in calls.inputs:
            raise HapError(f"what {weight} is applied to is hidden from the layer that owns it; {instead}")


def check_samples_first(batch: Batch, calls: Calls, alone: Calls) -> None:
    """Refuse layers whose input does not hold one sample at each index of its first axis, where sizes do not tell."""
    count = samples(batch)
    whole = {f"what {name} reads": x for name, x in calls.inputs.items() if is_per_sample(x, count)}
    check_alone(whole, {f"what {name} reads": x for name, x in alone.inputs.items()})

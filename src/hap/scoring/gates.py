"""Criteria that look at gates: factors, 1 as the network stands, on what units hand on. With 0 the unit is gone."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.calling import hooked
from hap.groups.groups import Groups
from hap.groups.types import Producer
from hap.scoring.base import Batch, Criterion, Scores, ScoringContext, check_finite_scores, fold, samples, unit_map
from hap.scoring.derivatives import Tap, tapped
from hap.scoring.gauss_newton import SURVEYED, Add, computes_as, of_one_sample, over_samples, survey
from hap.scoring.hessian_trace import MOST_OUTPUTS, mean_scores
from hap.scoring.outputs import CannotTrace
from hap.scoring.over_all_slices import readers
from hap.scoring.sample_axis import BATCH_FIRST, run_recorded, samples_of

OTHER = "use another criterion"
INSTEAD = f"{OTHER}, such as HessianTrace"
READERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class GateGradient(Criterion):
    """Mean over samples of |dL/dgate|, the gate a factor 1 on what a unit hands on (Michel et al., 2019).

    `per_layer` divides the scores of each group by their Euclidean norm, as its authors do.

    >>> GateGradient(per_layer=False).to_dict()
    {'name': 'gate-gradient', 'per_layer': False}
    """

    per_layer: bool = True

    name: ClassVar[str] = "gate-gradient"

    def scores(self, problem: ScoringContext) -> Scores:
        totals = problem.sum_over_batches(lambda batch, share: [_mean_slopes(problem, batch, share)])
        check_finite_scores(totals, "the gradient of a gate")
        if self.per_layer:
            totals = {n: v / v.norm().clamp_min(1e-300) for n, v in totals.items()}
        return Scores(totals, about={"per_layer": self.per_layer})


def _mean_slopes(problem: ScoringContext, batch: Batch, share: float) -> dict[str, Tensor]:
    """The mean over a batch of |dL/dgate|, times its share."""
    reading = {name: readers(problem.groups, group) for name, group in problem.groups.items()}
    if unread := [name for name, some in reading.items() if not some]:
        raise HapError(f"no layer reads group {unread[0]!r}, so a gate on it has no gradient; {OTHER}")
    weights = list(dict.fromkeys(reader.weight for some in reading.values() for reader in some))
    _, loss, calls = run_recorded(problem, batch, weights, OTHER)
    slopes = dict(zip(weights, torch.autograd.grad(loss, [calls[n][0] for n in weights]), strict=True))
    count = samples(batch)

    def gate(name: str, reader: Producer) -> Tensor:
        x, slope = calls[reader.weight][0].detach(), slopes[reader.weight]
        if x.ndim < 2 or len(x) != count or x.shape[-1] != len(reader.unit):
            raise HapError(f"{reader.weight} does not read {name} on the last axis of every sample: {tuple(x.shape)}")
        return fold(problem.groups[name], reader, (x * slope).flatten(1, -2).sum(1) if x.ndim > 2 else x * slope)

    gates = {name: reduce(torch.add, [gate(name, reader) for reader in some]) for name, some in reading.items()}
    return {n: share * (count * g.abs().mean(0)) for n, g in gates.items()}  # the loss is a mean over the samples


@dataclass(frozen=True)
class GateCurvature(Criterion):
    """1/2 d2L/dg2 at g = 1, with g a factor on what a unit hands on: the second-order part of the rise of the loss when
    the unit goes. The curvature is Gauss-Newton's, which is the Hessian's where the outputs are piecewise linear in g.

    Equation 6 replaces w^T H w by its mean over all directions of w, and sees only the weights in front of a
    normalisation, though its shift goes with them. This is w^T H w along the direction that is taken, with all that a
    unit hands on. What others gain where a norm or a mean spans the unit's axis is not seen. A pass back per output
    (beyond 20 outputs `draws` random combinations, with standard errors) gives the gates of all units, without the
    norms of gradients that traces need.

    >>> GateCurvature(draws=4).to_dict()
    {'name': 'gate-curvature', 'draws': 4, 'seed': 0}
    """

    draws: int = 8
    seed: int = 0

    name: ClassVar[str] = "gate-curvature"

    def __post_init__(self) -> None:
        if self.draws < 2:
            raise HapError(f"draws={self.draws}; expected at least 2")

    def scores(self, problem: ScoringContext) -> Scores:
        gates = gates_of(problem.model, problem.groups)

        def place(add: Add, tap: Tap) -> AbstractContextManager[None]:
            return _at_gates(problem.model, gates, lambda gate, x, g: add(gate.group, _slope(problem, gate, x, g)), tap)

        try:
            found = survey(problem)
            _check_samples(problem, gates)
            draws = self.draws if found.outputs > MOST_OUTPUTS else 0
            squares = over_samples(problem, found, place, Tensor.square, draws, self.seed)
        except CannotTrace as error:
            raise HapError(f"gate-curvature does not apply: {error}; {INSTEAD}") from error
        about = {"method": "gauss-newton"} | ({"draws": draws} if draws else {})
        return mean_scores({name: squares[name] / 2 for name in problem.groups}, about)


# ---- where units pass ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """Units of a group on axis `axis` of what a module reads, or with `output` of what it returns. `unit` tells the
    unit of each index; the axis may hold it several times over, as that of a grouped convolution does."""

    group: str
    unit: Producer
    axis: int
    output: bool


Gates = Mapping[str, list[Gate]]
"""By name of a module."""


def gates_of(model: nn.Module, groups: Groups) -> Gates:
    """Gates that all that units hand on passes once: where it is read, or, for what joins a sum that other units join
    as well (`union` coupling), which readers cannot tell apart, where it joins."""
    modules, found = dict(model.named_modules()), dict[str, list[Gate]]()
    feeds = {(c, s) for c, s in groups.feeds.tolist()}
    sources = Counter(stream for _, stream in feeds)
    fate = np.arange(groups.classes)
    for c, s in feeds:
        fate[s] = c if sources[s] == 1 else s  # such a stream goes when its unit does
    for name, group in groups.items():
        own, unit_of = set(group.classes.tolist()), unit_map(groups, group)
        if own & set(sources):
            raise HapError(f"group {name!r} is a sum that other groups join, so it has no gate of its own; {INSTEAD}")
        if own & (groups.traits.in_activation_products - groups.traits.whole_matrices):
            raise HapError(f"group {name!r} is read by a product of activations, where no gate can be; {INSTEAD}")
        for s in groups.rewiring.output_scatters:
            passed = ~np.isin(s.narrow, list(groups.traits.zero_padded)) & (fate[s.wide] == s.wide)
            unit = np.where(passed, unit_of[s.narrow], -1)
            if not (unit >= 0).any():
                continue
            if s.inside is not None:
                raise HapError(f"group {name!r} joins a sum where no module returns it; {INSTEAD}")
            found.setdefault(s.module, []).append(Gate(name, Producer(f"{s.module}.weight", s.dim, unit), s.dim, True))
        for weight, dim in group.consumers:
            unit = unit_of[fate[groups.axes[weight, dim]]]
            if not (unit >= 0).any():
                continue
            module = weight.rpartition(".")[0]
            if weight not in groups.used_once or not any(computes_as(modules[module], kind) for kind in READERS):
                raise HapError(
                    f"{weight} reads group {name!r} other than by one call of a linear layer or convolution; {INSTEAD}"
                )
            axis = -1 if isinstance(modules[module], nn.Linear) else 1
            found.setdefault(module, []).append(Gate(name, Producer(weight, dim, unit), axis, False))
    return found


def gated(model: nn.Module, gates: Gates, change: Callable[[Gate, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Inside, what passes a gate is replaced by what `change` makes of it."""

    def before(name: str, gate: Gate, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise HapError(f"{name} is called with its input by name; expected it in first place, or {INSTEAD}")
        return (change(gate, args[0]), *args[1:])

    def after(gate: Gate, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return change(gate, output)

    every = [(name, gate) for name, some in gates.items() for gate in some]
    return hooked(
        model,
        before=[(name, partial(before, name, gate)) for name, gate in every if not gate.output],
        after=[(name, partial(after, gate)) for name, gate in every if gate.output],
    )


# ---- derivatives --------------------------------------------------------------------------------------------


def _check_samples(problem: ScoringContext, gates: Gates) -> None:
    """Refuse gates at which the first axis is not that of the samples: what one sample gives would reach others."""
    batch, mixed = samples_of(problem.batches[0], slice(SURVEYED)), list[str]()

    def see(gate: Gate, value: Tensor, gradient: Tensor) -> None:
        if gradient[:, 1:].any():
            mixed.append(gate.unit.weight)

    with tapped(problem, batch, partial(_at_gates, problem.model, gates, see)) as (output, send_back):
        send_back(of_one_sample(output))
    if mixed:
        raise HapError(f"the first axis of what {mixed[0]} meets is not that of the samples. {BATCH_FIRST}")


def _slope(problem: ScoringContext, gate: Gate, value: Tensor, gradient: Tensor) -> Tensor:
    """The gate's derivative for each vector and sample, (K, samples, units), from a value and its gradient (K, ...)."""
    axis = gate.axis % value.ndim
    x, g = value.movedim(axis, 1), gradient.movedim(axis + 1, 2)
    each = torch.einsum("ncp,kncp->knc", x.reshape(*x.shape[:2], -1), g.reshape(*g.shape[:3], -1))
    group, (times, rest) = problem.groups[gate.group], divmod(each.shape[2], len(gate.unit.unit))
    if rest:
        raise HapError(
            f"{gate.unit.weight} meets {each.shape[2]} indices of group {gate.group!r} on axis {axis}, and "
            f"not {len(gate.unit.unit)} or several times as many; {INSTEAD}"
        )
    return fold(group, gate.unit, each.unflatten(2, (times, -1)).sum(2))


def _at_gates(model: nn.Module, gates: Gates, see: Callable[..., None], tap: Tap) -> AbstractContextManager[None]:
    """Inside, what passes a gate is tapped: `see` is called with the gate, the value, and the gradients (K, *value)."""
    return gated(model, gates, lambda gate, x: tap(x, partial(see, gate, x.detach())))

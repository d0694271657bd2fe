"""The curvature of the loss along the one direction in which a unit goes: that of a gate on what it hands on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.module_hooks import hooked
from hap.groups.groups import Groups
from hap.groups.types import Group, Producer
from hap.scoring.affine import affine_norms
from hap.scoring.base import Criterion, Scores, ScoringContext, fold
from hap.scoring.batch import BATCH_FIRST, Batch
from hap.scoring.gauss_newton import SURVEYED, Tap, backward, of_one_sample, over_samples, samples_of, survey
from hap.scoring.hessian_trace import MOST_OUTPUTS, mean_scores
from hap.scoring.hutchinson import without_vmap_warnings
from hap.scoring.outputs import CannotSample
from hap.scoring.row_norms import computes_as

INSTEAD = "use another criterion, such as HessianTrace"
READERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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
        with without_vmap_warnings():
            return self._scores(problem)

    def _scores(self, problem: ScoringContext) -> Scores:
        gates, found = gates_of(problem.model, problem.groups), survey(problem)
        if found.why_not is not None:
            raise HapError(f"gate-curvature does not apply: {found.why_not}; {INSTEAD}")
        _check_samples(problem, gates)
        draws = self.draws if found.outputs > MOST_OUTPUTS else 0

        def piece(batch: Batch, vectors: Tensor, signs: Tensor, at_once: int) -> dict[str, Tensor]:
            return _piece(problem, gates, batch, vectors, signs, at_once)

        sizes = {name: len(group) for name, group in problem.groups.items()}
        try:
            squares = over_samples(problem, found, sizes, piece, draws, self.seed)
        except CannotSample as error:
            raise HapError(f"gate-curvature does not apply: {error}; {INSTEAD}") from error
        halves = {n: v / 2 for n, v in squares.items()}
        if not draws:
            return Scores({n: v[0] for n, v in halves.items()}, about={"method": "gauss-newton"})
        return mean_scores(halves, {"method": "gauss-newton", "draws": draws})


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
    sources = Counter(stream for _, stream in {(c, s) for c, s in groups.feeds.tolist()})
    alone = {s: c for c, s in groups.feeds.tolist() if sources[s] == 1}  # such a stream goes when its unit does
    for name, group in groups.items():
        own = set(group.classes.tolist())
        if own & set(sources):
            raise HapError(f"group {name!r} is a sum that other groups join, so it has no gate of its own; {INSTEAD}")
        if own & (groups.traits.in_activation_products - groups.traits.whole_matrices):
            raise HapError(f"group {name!r} is read by a product of activations, where no gate can be; {INSTEAD}")
        for s in groups.rewiring.output_scatters:
            pairs = zip(s.narrow.tolist(), s.wide.tolist(), strict=True)
            unit = _unit(group, [-1 if c in groups.traits.zero_padded or wide in alone else c for c, wide in pairs])
            if not (unit >= 0).any():
                continue
            if s.inside is not None:
                raise HapError(f"group {name!r} joins a sum where no module returns it; {INSTEAD}")
            found.setdefault(s.module, []).append(Gate(name, Producer(f"{s.module}.weight", s.dim, unit), s.dim, True))
        for weight, dim in group.consumers:
            unit = _unit(group, [alone.get(c, c) for c in groups.axes[weight, dim].tolist()])
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


def _unit(group: Group, classes: Iterable[int]) -> Any:
    """The unit of each of these classes, -1 where it is none of the group's."""
    place = {c: u for u, c in enumerate(group.classes.tolist())}
    return np.array([place.get(c, -1) for c in classes], dtype=np.int64)


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

See = Callable[[Gate, Tensor, Tensor], None]
"""Called with a gate, the value that passes it, and the gradient (K, *value) there."""


def _check_samples(problem: ScoringContext, gates: Gates) -> None:
    """Refuse gates at which the first axis is not that of the samples: what one sample gives would reach others."""
    batch, mixed = samples_of(problem.batches[0], slice(SURVEYED)), list[str]()

    def see(gate: Gate, value: Tensor, gradient: Tensor) -> None:
        if gradient[:, 1:].any():
            mixed.append(gate.unit.weight)

    with torch.enable_grad(), _tapped(problem, gates, see) as anchor:
        output, _ = problem.evaluate({}, batch)
        backward(output, anchor, of_one_sample(output))
    if mixed:
        raise HapError(f"the first axis of what {mixed[0]} meets is not that of the samples. {BATCH_FIRST}")


def _piece(
    problem: ScoringContext, gates: Gates, batch: Batch, vectors: Tensor, signs: Tensor, at_once: int
) -> dict[str, Tensor]:
    """sum over samples of sign (d(s . output)/dg)^2, (K, units) by group."""
    rows: dict[str, list[Tensor]] = {name: [] for name in problem.groups}
    slopes: dict[str, Tensor] = {}

    def see(gate: Gate, value: Tensor, gradient: Tensor) -> None:
        slope = _slope(problem, gate, value, gradient)
        slopes[gate.group] = slope + slopes[gate.group] if gate.group in slopes else slope

    with torch.enable_grad(), _tapped(problem, gates, see) as anchor:
        output, _ = problem.evaluate({}, batch)
        for start in range(0, len(vectors), at_once):
            slopes.clear()
            backward(output, anchor, vectors[start : start + at_once].to(output.dtype))
            for name, group in problem.groups.items():
                current = signs[start : start + at_once]
                none = torch.zeros(*current.shape, len(group), dtype=torch.float64, device=current.device)
                rows[name].append((slopes.get(name, none).square() * current[:, :, None]).sum(1))
    return {name: torch.cat(some) for name, some in rows.items()}


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


@contextmanager
def _tapped(problem: ScoringContext, gates: Gates, see: See) -> Iterator[Tensor]:
    """Inside, a backward pass to the anchor this gives calls `see` for every gate that it goes by."""
    anchor = torch.zeros((), device=problem.device, requires_grad=True)

    def tap(gate: Gate, value: Tensor) -> Tensor:
        kept = value.detach()
        tapped: Tensor = Tap.apply(value, anchor, lambda gradient: see(gate, kept, gradient))
        return tapped

    with gated(problem.model, gates, tap), affine_norms(problem):
        yield anchor

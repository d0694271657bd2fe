"""The curvature of the loss along the one direction in which a unit goes: that of a gate on what it hands on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.groups import Group, Producer
from hap.scoring.affine import affine_norms
from hap.scoring.base import BATCH_FIRST, Batch, Criterion, Problem, Scores, fold, samples
from hap.scoring.gauss_newton import Tap, backward, over_samples, survey
from hap.scoring.heads import readers_of
from hap.scoring.hessian import MOST_OUTPUTS, quiet

INSTEAD = "use another criterion, such as HessianTrace"


@dataclass(frozen=True)
class GateCurvature(Criterion):
    """1/2 d2L/dg2 at g = 1, with g a factor on what a unit hands on: how far the loss rises, to second order, when the
    unit goes. The Gauss-Newton curvature, which is the Hessian's where the network is piecewise linear in g.

    Equation 6 replaces w^T H w by its mean over all directions of w, and sees only the weights in front of a
    normalisation, though its shift goes with them. This is w^T H w along the direction that is taken, with all that a
    unit hands on. A pass back per output (beyond 20 outputs `draws` random combinations, with standard errors) gives
    the gates of all units, without the norms of gradients that traces need.
    """

    draws: int = 8
    seed: int = 0

    name: ClassVar[str] = "gate-curvature"

    def __post_init__(self) -> None:
        if self.draws < 2:
            raise HapError(f"draws={self.draws}; expected at least 2")

    def scores(self, problem: Problem) -> Scores:
        with quiet():
            return self._scores(problem)

    def _scores(self, problem: Problem) -> Scores:
        gates, found = gates_of(problem), survey(problem)
        if found.why_not is not None:
            raise HapError(f"gate-curvature does not apply: {found.why_not}; {INSTEAD}")
        draws = self.draws if found.outputs > MOST_OUTPUTS else 0

        def piece(batch: Batch, vectors: Tensor, signs: Tensor, at_once: int) -> dict[str, Tensor]:
            return _piece(problem, gates, batch, vectors, signs, at_once)

        sizes = {name: len(group) for name, group in problem.groups.items()}
        halves = {n: v / 2 for n, v in over_samples(problem, found, sizes, piece, draws, self.seed).items()}
        if not draws:
            return Scores({n: v[0] for n, v in halves.items()}, about={"method": "exact"})
        errors = {n: v.std(0) / draws**0.5 for n, v in halves.items()}
        return Scores({n: v.mean(0) for n, v in halves.items()}, errors, {"method": "sampled", "draws": draws})


@dataclass(frozen=True)
class Gate:
    """Units of a group on axis `axis` of what a module reads, or with `output` of what it returns. `unit` tells the
    unit of each index; the axis may hold it several times over, as that of a grouped convolution does."""

    group: str
    unit: Producer
    axis: int
    output: bool


def gates_of(problem: Problem) -> dict[str, list[Gate]]:
    """By module, the gates that let all units through: where units are read, or where they join a sum that other units
    join as well (`union` coupling), which readers cannot tell apart."""
    groups, modules = problem.groups, dict(problem.model.named_modules())
    found: dict[str, list[Gate]] = {}
    for name, group in groups.items():
        own = [(s.module, _unit(group, s.narrow), s.dim, s.inside) for s in groups.scatters]
        joined = [one for one in own if (one[1] >= 0).any()]
        for module, unit, dim, inside in joined:
            if inside is not None:
                raise HapError(f"group {name!r} joins a sum where no module returns it; {INSTEAD}")
            found.setdefault(module, []).append(Gate(name, Producer(f"{module}.weight", dim, unit), dim, True))
        if joined:
            continue
        for reader in readers_of(problem, name, group):
            module = reader.weight.rpartition(".")[0]
            if reader.weight not in groups.direct:
                raise HapError(f"{reader.weight} reads group {name!r} other than by one call of its layer; {INSTEAD}")
            axis = -1 if isinstance(modules[module], nn.Linear) else 1
            found.setdefault(module, []).append(Gate(name, reader, axis, False))
    return found


def _unit(group: Group, classes: Any) -> Any:
    """The unit of each of these classes, -1 where it is none of the group's."""
    place = {c: u for u, c in enumerate(group.classes.tolist())}
    return np.array([place.get(c, -1) for c in classes.tolist()], dtype=np.int64)


def _piece(problem: Problem, gates: dict[str, list[Gate]], batch: Batch, vectors: Tensor, signs: Tensor,
           at_once: int) -> dict[str, Tensor]:  # fmt: skip
    """sum over samples of sign (d(s . output)/dg)^2, (K, units) by group."""
    rows: dict[str, list[Tensor]] = {name: [] for name in problem.groups}
    slopes: dict[str, Tensor] = {}

    def see(gate: Gate, value: Tensor, gradient: Tensor) -> None:
        slope = _slope(problem, gate, value, gradient)
        slopes[gate.group] = slope + slopes[gate.group] if gate.group in slopes else slope

    with torch.enable_grad(), _gated(problem, gates, see, samples(batch)) as anchor:
        output, _ = problem.evaluate({}, batch)
        for start in range(0, len(vectors), at_once):
            slopes.clear()
            backward(output, anchor, vectors[start : start + at_once].to(output.dtype))
            for name, group in problem.groups.items():
                current = signs[start : start + at_once]
                none = torch.zeros(*current.shape, len(group), dtype=torch.float64, device=current.device)
                rows[name].append((slopes.get(name, none).square() * current[:, :, None]).sum(1))
    return {name: torch.cat(some) for name, some in rows.items()}


def _slope(problem: Problem, gate: Gate, value: Tensor, gradient: Tensor) -> Tensor:
    """The gate's derivative for each vector and sample, (K, samples, units), from a value and its gradient (K, ...)."""
    axis = gate.axis % value.ndim
    x, g = value.movedim(axis, 1), gradient.movedim(axis + 1, 2)
    each = torch.einsum("ncp,kncp->knc", x.reshape(*x.shape[:2], -1), g.reshape(*g.shape[:3], -1))
    group, (times, rest) = problem.groups[gate.group], divmod(each.shape[2], len(gate.unit.unit))
    if rest:
        raise HapError(f"{gate.unit.weight} meets {each.shape[2]} indices of group {gate.group!r} on axis {axis}, and "
                       f"not {len(gate.unit.unit)} or several times as many; {INSTEAD}")  # fmt: skip
    return fold(group, gate.unit, each.unflatten(2, (times, -1)).sum(2))


@contextmanager
def _gated(problem: Problem, gates: dict[str, list[Gate]], see: Any, count: int) -> Iterator[Tensor]:
    """Inside, a backward pass to the anchor this gives calls `see` for every gate that it goes by."""
    modules, hooks = dict(problem.model.named_modules()), []
    anchor = torch.zeros((), device=next(iter(problem.weights.values())).device, requires_grad=True)

    def tap(gate: Gate, value: Tensor) -> Tensor:
        if len(value) != count:
            raise HapError(
                f"{gate.unit.weight} meets {tuple(value.shape)} in a batch of {count} samples. {BATCH_FIRST}"
            )
        kept = value.detach()
        tapped: Tensor = Tap.apply(value, anchor, lambda gradient: see(gate, kept, gradient))
        return tapped

    for name, some in gates.items():
        for gate in some:
            if gate.output:
                hooks.append(modules[name].register_forward_hook(lambda m, args, out, gate=gate: tap(gate, out)))
            else:
                hooks.append(modules[name].register_forward_pre_hook(
                    lambda m, args, gate=gate: (tap(gate, args[0]), *args[1:])))  # fmt: skip
    try:
        with affine_norms(problem):
            yield anchor
    finally:
        for hook in hooks:
            hook.remove()

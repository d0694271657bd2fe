"""Reconstruction: what is left of the error when a unit goes and the layers that read it are solved anew.

Equation 5 of the paper, w_p^T (H_pp - H_pl H_ll^-1 H_lp) w_p, for one layer: its H is the second moments of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hap.errors import Argument, HapError
from hap.execution.calling import call_arguments, copied, hooked
from hap.execution.gram_regression import pairs
from hap.execution.windows import can_be_solved, drawn_rows
from hap.groups.types import Group, Producer
from hap.scoring.base import Criterion, Scores, ScoringContext, check_finite_scores, check_mode
from hap.scoring.baselines import Magnitude
from hap.scoring.over_all_slices import readers
from hap.utils import distributed

RIDGE = 1e-3
"""Of the mean square of a layer's inputs: what varies less counts as if it did."""
AT_ONCE = 128
"""Updates of a matrix are carried out together once their ranks add up to that."""


@dataclass(frozen=True)
class Reconstruction(Criterion):
    """The order in which units of a group go is that of the least error left, when the layers that read them are solved
    anew by least squares: equation 5 of the paper layer by layer, one unit after the other, with all interactions.

    Errors of one layer say nothing of another's, so that the values are those of a second criterion, `levels`: the
    k-th unit to go has the k-th lowest of these in its group. Groups that no linear layer or convolution reads by
    itself, such as branches of a sum in `union` coupling, have its scores as they are.

    >>> Reconstruction().to_dict()
    {'name': 'reconstruction', 'levels': {'name': 'magnitude'}, 'positions': 8192, 'seed': 0}

    Arguments: `positions`, how many positions of a layer's result its moments are taken over, drawn by `seed`. The
    batches' targets are not looked at.
    """

    levels: Criterion = field(default_factory=Magnitude)
    positions: int = 8192
    seed: int = 0

    name: ClassVar[str] = "reconstruction"

    def __post_init__(self) -> None:
        if self.positions < 2:
            raise HapError(Argument("positions", self.positions), "; expected at least 2")

    def scores(self, problem: ScoringContext) -> Scores:
        found = self.levels.scores(problem)
        reading = {name: some for name, group in problem.groups.items() if (some := _readers(problem, group))}
        moments = _moments(problem, {r.weight for some in reading.values() for r in some}, self.positions, self.seed)
        values = dict(found)
        for name, some in reading.items():
            layers = [_Layer(problem, r, *moments[r.weight]) for r in some if r.weight in moments]
            if len(layers) == len(some):
                values[name] = _placed(found[name], removal_order(layers))
        ordered = sum(values[name] is not found[name] for name in values)
        return Scores(values, about={**found.about, "groups_in_order": ordered})


def _readers(problem: ScoringContext, group: Group) -> list[Producer]:
    """What reads a group, if least squares can solve all of it, and each unit has as many inputs there."""
    groups, modules = problem.groups, dict(problem.model.named_modules())
    if np.isin(group.classes, groups.feeds).any():  # a sum with others, or a part of one
        return []
    found = list(readers(groups, group))
    for reader in found:
        owned = torch.from_numpy(reader.unit[reader.unit >= 0])
        counts = torch.bincount(owned, minlength=len(group))
        known = reader.dim == 1 and can_be_solved(modules[reader.weight.rpartition(".")[0]])
        if not known or not counts.min() or counts.min() != counts.max() or reader.weight not in groups.used_once:
            return []
    return found


def _placed(levels: Tensor, order: list[int]) -> Tensor:
    """These values in another order: the lowest at the unit that goes first."""
    values = torch.empty_like(levels)
    values[torch.tensor(order, device=levels.device)] = levels.sort().values
    return values


# ---- moments -------------------------------------------------------------------------------------------------


def _moments(problem: ScoringContext, weights: set[str], positions: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """For the layer of each weight: the covariance of its inputs, and what a batch normalisation behind it multiplies
    its results by."""
    check_mode(problem.model)
    modules = dict(problem.model.named_modules())
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    returned: dict[int, tuple[str, Tensor]] = {}

    def read(weight: str, most: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args:  # its input is given by name: the groups that it reads keep their levels
            return
        rows = drawn_rows(module, args[0], most, generator).double()
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        sums[weight] = sums.get(weight, 0) + rows.T @ rows

    def note(weight: str, module: Any, args: Any, output: Tensor) -> None:
        scales[weight] = output.new_ones(len(module.weight), dtype=torch.float64)
        returned[id(output)] = weight, output  # held, so that no other tensor has its id

    def norm(module: Any, args: tuple[Any, ...]) -> None:
        if args and id(args[0]) in returned and module.running_var is not None:
            scale = (module.running_var.double() + module.eps).rsqrt()
            scales[returned[id(args[0])][0]] = scale if module.weight is None else scale * module.weight.double()

    norms = [(name, norm) for name, module in modules.items() if isinstance(module, _BatchNorm)]
    owners = {weight: weight.rpartition(".")[0] for weight in sorted(weights)}
    if problem.data is None:
        raise HapError("this criterion needs data: pass batches, an iterable of (input, target)")
    batches = list(pairs(problem.data, problem.device))
    most = max(2, positions // len(batches))
    before = [(owner, partial(read, weight, most)) for weight, owner in owners.items()]
    after = [(owner, partial(note, weight)) for weight, owner in owners.items()]
    for x, _ in batches:
        args, kwargs = copied(call_arguments(x))
        with hooked(problem.model, before=[*before, *norms], after=after):
            problem.model(*args, **kwargs)
        returned.clear()
    distributed.sum_(sums[weight] for weight in sorted(sums))
    check_finite_scores(sums, "what a layer reads")
    return {weight: (_covariance(total), scales[weight]) for weight, total in sums.items()}


def _covariance(total: Tensor) -> Tensor:
    """From the sum of (x, 1) (x, 1)^T over positions."""
    mean = total[:-1, -1] / total[-1, -1]
    return total[:-1, :-1] / total[-1, -1] - torch.outer(mean, mean)


# ---- which unit goes next ------------------------------------------------------------------------------------


class _Layer:
    """A layer that reads units, as it is once some are gone and it is solved anew: the inverse of the covariance of
    what it reads, and the products of its weights' columns, W^T W. Both are zero where units are gone."""

    def __init__(self, problem: ScoringContext, reader: Producer, covariance: Tensor, scale: Tensor):
        weight = problem.model.get_parameter(reader.weight).detach().double()
        unit = torch.from_numpy(reader.unit).to(weight.device)
        area = weight[0, 0].numel()
        places = torch.arange(weight.shape[1] * area, device=weight.device)
        owner = unit.repeat_interleave(area)
        by_unit = torch.argsort(owner[owner >= 0], stable=True)
        self.columns = places[owner >= 0][by_unit].view(int(unit.max()) + 1, -1)
        """(units, inputs of a unit)"""
        matrix = weight.flatten(1) * scale[:, None]
        ridge = RIDGE * covariance.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        damped = covariance + torch.diag(ridge.expand(len(covariance)))
        self.inverse = _Sum(torch.cholesky_inverse(torch.linalg.cholesky(damped)), self.columns)
        self.products = _Sum(matrix.T @ matrix, self.columns)
        energy = (matrix @ covariance).mul_(matrix).sum()
        self.energy = float(energy) or 1.0

    def errors(self) -> Tensor:
        """For each unit, the share of the layer's result that is lost for good when it goes next."""
        lost = torch.linalg.solve(self.inverse.blocks, self.products.blocks)
        return lost.diagonal(dim1=1, dim2=2).sum(1) / self.energy

    def remove(self, unit: int) -> None:
        """Solve the layer anew without a unit: w becomes w - w_own share, and the inverse loses what it had of it."""
        own = self.columns[unit]
        inverse, products = self.inverse.read(own), self.products.read(own)
        share = torch.linalg.solve(inverse[own], inverse.T)
        both = products[own] @ share - products.T
        self.products.add(torch.cat([share.T, -products], 1), torch.cat([both, share]))
        self.inverse.add(-inverse, share)
        self.products.blocks[unit] = 0
        self.inverse.blocks[unit] = torch.eye(len(own)).to(inverse)


class _Sum:
    """A matrix to which products of narrow matrices are added, many at once: one pass over all of it for each unit
    would take an hour for a layer of 512 channels under a 3x3 kernel. `blocks` are the units' blocks, as of now."""

    def __init__(self, matrix: Tensor, columns: Tensor):
        self.matrix, self.columns = matrix, columns
        self.blocks = matrix[columns[:, :, None], columns[:, None, :]]
        self.left, self.right = matrix.new_empty(len(matrix), AT_ONCE), matrix.new_empty(AT_ONCE, len(matrix))
        self.waiting = 0

    def read(self, places: Tensor) -> Tensor:
        """These columns of the matrix."""
        return self.matrix[:, places].addmm_(self.left[:, : self.waiting], self.right[: self.waiting, places])

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right, of which the inner size is small."""
        self.blocks += left[self.columns] @ right[:, self.columns].movedim(0, 1)
        if self.waiting + len(right) > AT_ONCE:
            self.matrix.addmm_(self.left[:, : self.waiting], self.right[: self.waiting])
            self.waiting = 0
        if len(right) > AT_ONCE:
            self.matrix.addmm_(left, right)
            return
        end = self.waiting + len(right)
        self.left[:, self.waiting : end], self.right[self.waiting : end] = left, right
        self.waiting = end


def removal_order(layers: list[_Layer]) -> list[int]:
    """The units that these layers read, the one that is missed least first, given those that are gone by then."""
    units = len(layers[0].columns)
    gone = torch.zeros(units, dtype=torch.bool, device=layers[0].columns.device)
    order: list[int] = []
    for _ in range(units):
        errors = torch.stack([layer.errors() for layer in layers]).sum(0)
        unit = int(errors.masked_fill(gone, torch.inf).argmin())
        for layer in layers:
            layer.remove(unit)
        gone[unit] = True
        order.append(unit)
    return order

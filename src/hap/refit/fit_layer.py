"""One layer, fitted to what the dense model has at its place, and held against positions that the fit has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hap.errors import HapError
from hap.refit.calibration import Rows
from hap.refit.parameters import LayerParameters
from hap.refit.ridge_regression import Affine, Moments, RidgeSolver
from hap.utils import distributed

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
EXACT = 1e-9
"""A layer whose relative error is less has nothing to gain."""


@dataclass(frozen=True)
class RefittedLayer:
    """What a refit did to one layer: relative squared errors on what was held out, and the ridge that was chosen.

    Where `ridge` is None, the layer has its old weights, which were no worse.
    """

    name: str
    before: float
    after: float
    ridge: float | None


def fit_layer(
    parameters: LayerParameters, fitted: Rows, held: Rows, ridges: Sequence[float], rectified: int
) -> RefittedLayer:
    """Write the best weights for a layer, unless the old ones do as well on the positions held out.

    Where only a ReLU reads the result, what it maps to zero need not be matched: the target is z where z > 0, and the
    smaller of zero and the prediction elsewhere, `rectified` times one after the other.
    """
    name, old = parameters.layer.name, parameters.read()
    relu = parameters.layer.rectified
    energy = _sum((held.target + held.added).relu() if relu else held.target)
    (before,) = _errors([old], held, relu)
    _check_finite(name, torch.tensor([energy, before]))
    if before <= EXACT * energy:
        return RefittedLayer(name, before / energy if energy else 0.0, before / energy if energy else 0.0, None)
    moments = Moments(fitted.x, parameters.centred)
    targets = moments.with_targets(fitted.target)
    _check_finite(name, moments.second, targets.product)
    solvers = [RidgeSolver(moments, old, ridge) for ridge in ridges]
    found = [solver.solve(targets) for solver in solvers]
    errors = _errors(found, held, relu)
    best = min(range(len(found)), key=errors.__getitem__)
    new, after = found[best], errors[best]
    for _ in range(rectified if relu else 0):
        positive = fitted.target + fitted.added > 0
        wanted = torch.where(positive, fitted.target, torch.minimum(new(fitted.x), -fitted.added))
        again = solvers[best].solve(moments.with_targets(wanted))
        (error,) = _errors([again], held, relu)
        if error < after:
            new, after = again, error
    if not after < before:
        return RefittedLayer(name, before / energy, before / energy, None)
    parameters.write(new, moments)
    return RefittedLayer(name, before / energy, after / energy, ridges[best])


def _errors(maps: Sequence[Affine], rows: Rows, relu: bool) -> list[float]:
    """Sums of squared differences to the targets, behind the ReLU where there is one."""
    wanted = (rows.target + rows.added).relu() if relu else rows.target
    return [_sum(((made(rows.x) + rows.added).relu() if relu else made(rows.x)) - wanted) for made in maps]


def _sum(differences: Tensor) -> float:
    total = differences.square().sum().double()
    distributed.sum_([total])
    return float(total)


def _check_finite(name: str, *values: Tensor) -> None:
    if not all(bool(v.isfinite().all()) for v in values):
        what = "what it reads, or what the dense model has at its place,"
        raise HapError(f"{name} cannot be refitted: {what} is not finite; look for NaN in batches and weights")

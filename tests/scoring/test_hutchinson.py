"""Hutchinson's estimator asks nothing of an operator but products with vectors, term by term."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hap.scoring.hutchinson import Deflated, Operator, Tensors, Term, diagonal_estimates, multiply, signs

WEIGHTS = {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}


class Matrix:
    """A symmetric matrix on both weights, as a sum of two."""

    def __init__(self) -> None:
        parts = torch.randn(2, 10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.parts = parts + parts.mT

    def terms(self) -> Iterator[Term]:
        for part in self.parts:

            def products(vectors: Tensors, part: Tensor = part) -> Tensors:
                rows = torch.cat([vectors["a"].flatten(1), vectors["b"]], 1) @ part
                return {"a": rows[:, :6].unflatten(1, (2, 3)), "b": rows[:, 6:]}

            yield Term(products, 7)

    def diagonal(self) -> Tensors:
        diagonal = self.parts.sum(0).diagonal()
        return {"a": diagonal[:6].view(2, 3), "b": diagonal[6:]}


def estimates(operator: Operator, probes: int, chunk: int | None = None) -> Tensors:
    """The estimate of each probe, flattened."""
    sums = {n: torch.zeros(probes, *w.shape, dtype=w.dtype) for n, w in WEIGHTS.items()}
    for part, values in diagonal_estimates(operator, WEIGHTS, range(probes), 0, chunk):
        for name, value in values.items():
            sums[name][part] += value
    return sums


def test_the_mean_is_the_diagonal_of_any_operator() -> None:
    for name, values in estimates(Matrix().terms, 2000).items():
        off = (values.mean(0) - Matrix().diagonal()[name]) / (values.std(0) / 2000**0.5)
        assert off.abs().max() < 4


@pytest.mark.parametrize("chunk", [1, 5, None])
def test_a_probe_does_not_depend_on_what_runs_with_it(chunk: int | None) -> None:
    for name, values in estimates(Matrix().terms, 12, chunk).items():
        torch.testing.assert_close(values, estimates(Matrix().terms, 40)[name][:12])


def test_deflation_splits_the_diagonal() -> None:
    for count in (3, 10):
        rest = Deflated(Matrix().terms, signs(WEIGHTS, range(count), 1))
        each = {
            n: torch.eye(10, dtype=torch.float64)[:, s].unflatten(1, WEIGHTS[n].shape)
            for n, s in (("a", slice(6)), ("b", slice(6, 10)))
        }
        columns = multiply(rest.terms, each)
        for name, values in columns.items():
            left = (values * each[name]).sum(0)
            torch.testing.assert_close(left + rest.diagonal[name], Matrix().diagonal()[name])
            assert (left.abs().max() < 1e-12) == (count == 10)

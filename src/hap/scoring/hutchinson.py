"""Hutchinson's estimator of the diagonal of a linear operator H, and so of the traces of its blocks.

For random signs v, E[v * Hv] = diag(H) (Hutchinson, 1990; Bekas, Kokiopoulou and Saad, 2007). The signs of a probe
follow from a seed and the probe's number alone: they are drawn anew for each term of H and never kept, and results do
not depend on how many probes run at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hap.scoring.hessian_operator import Operator, Tensors, Term
from hap.scoring.memory_chunks import Pieces


def diagonal_estimates(
    operator: Operator, weights: Tensors, probes: Sequence[int], seed: int, chunk: int | None = None
) -> Iterator[tuple[slice, Tensors]]:
    """Estimates v * Hv of the diagonal, shaped like the weights, for the probes of these numbers.

    Yields (part, values), values[name] of shape (part, *weight.shape), for each term of the operator and some probes at
    a time, `chunk` or as many as memory allows: the estimate of a probe is the sum of what is yielded for it.
    """
    for term in operator.terms():

        def work(part: slice, term: Term = term) -> Tensors:
            vectors = signs(weights, probes[part], seed)
            with without_vmap_warnings():
                products = term.products(vectors)
            return {n: v.mul_(products[n]) for n, v in vectors.items()}

        yield from Pieces(chunk or term.at_once).of(len(probes), work)


def signs(weights: Tensors, probes: Sequence[int], seed: int) -> Tensors:
    """A random vector of -1 and 1 for each probe, shaped like the weights."""
    drawn = {n: w.new_empty(len(probes), *w.shape) for n, w in weights.items()}
    device = next(iter(weights.values())).device
    for row, probe in enumerate(probes):
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + probe)
        for name, weight in weights.items():
            drawn[name][row] = torch.randint(0, 2, weight.shape, generator=generator, device=device)
    return {n: v.mul_(2).sub_(1) for n, v in drawn.items()}


@contextmanager
def without_vmap_warnings() -> Iterator[None]:
    """Without torch's remarks on operators that it runs one vector after the other."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="There is a performance drop because we have not yet implemented the batching rule"
        )
        yield

"""Hutchinson's estimator of the diagonal of a linear operator H, and so of the traces of its blocks.

For random signs v, E[v * Hv] = diag(H) (Hutchinson, 1990; Bekas, Kokiopoulou and Saad, 2007). The signs of a probe
follow from a seed and the probe's number alone: they are drawn anew for each term of H and never kept, and results do
not depend on how many probes run at once.

The Hessian of a trained classifier has a few directions that outweigh all others, about as many as there are classes,
and they are what the noise comes from. With P the projection on such directions,

    H = P H + H P - P H P  +  (I - P) H (I - P)

holds for every P. The first three terms are known once H has been applied to the directions, so only the last one
needs probes (Hutch++, Meyer et al. 2021, here for the traces of many blocks at once).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hap.scoring.hessian_operator import Operator, Tensors, Term, multiply
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


class Deflated:
    """(I - P) H (I - P), with P on the directions into which H stretches the vectors `starts`.

    `diagonal` is that of H - (I - P) H (I - P). Costs two products for each direction, and holds a copy of the weights.
    """

    def __init__(self, operator: Operator, starts: Tensors, chunk: int | None = None):
        self.operator = operator
        self.shapes = {n: v.shape[1:] for n, v in starts.items()}
        stretched = self._rows(multiply(operator, starts, chunk))
        self.directions = torch.linalg.qr(stretched.T).Q.T.contiguous()
        images = self._rows(multiply(operator, self._split(self.directions, starts), chunk))
        inner = self.directions @ images.T
        diagonal = self.directions * (2 * images - inner @ self.directions)
        self.diagonal = {n: v[0] for n, v in self._split(diagonal.sum(0, keepdim=True)).items()}

    def terms(self) -> Iterator[Term]:
        for term in self.operator.terms():

            def products(vectors: Tensors, term: Term = term) -> Tensors:
                return self._split(self._rest(term.products(self._split(self._rest(vectors), vectors))))

            yield Term(products, term.at_once)

    def _rest(self, vectors: Tensors) -> Tensor:
        """(I - P) v, as rows."""
        rows = self._rows(vectors)
        return rows - (rows @ self.directions.T) @ self.directions

    def _rows(self, tensors: Tensors) -> Tensor:
        """A row for each vector, its tensors one after the other, in single precision at least."""
        rows = torch.cat([tensors[name].flatten(1) for name in self.shapes], 1)
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def _split(self, rows: Tensor, like: Tensors | None = None) -> Tensors:
        """The tensors that rows are made of, with the dtypes of others."""
        parts = zip(self.shapes.items(), rows.split([s.numel() for s in self.shapes.values()], 1), strict=True)
        return {n: p.unflatten(1, s).to(p if like is None else like[n]) for (n, s), p in parts}

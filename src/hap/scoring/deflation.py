"""An operator split into a part of low rank, known exactly, and a rest that random probes see with little noise.

The Hessian of a trained classifier has a few directions that outweigh all others, about as many as there are classes,
and they are what the noise of Hutchinson's estimate comes from. With P the projection on such directions,

    H = P H + H P - P H P  +  (I - P) H (I - P)

holds for every P. The first three terms are known once H has been applied to the directions, so only the last one
needs probes (Hutch++, Meyer et al. 2021, here for the traces of many blocks at once).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hap.scoring.hessian_operator import Operator, Tensors, Term, multiply


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

"""The Hessian split into a part of low rank, known exactly, and a rest that random probes see with little noise.

The Hessian of a trained classifier has a few directions that outweigh all others, about as many as there are classes,
and they are what the noise of Hutchinson's estimate comes from. With P the projection on such directions,

    H = P H + H P - P H P  +  (I - P) H (I - P)

holds for every P. The first three terms are known once H has been applied to the directions, so only the last one
needs probes (Hutch++, Meyer et al. 2021, here for the traces of many blocks at once).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hap.scoring.hessian_operator import Hessian

Tensors = dict[str, Tensor]


class Deflated:
    """A Hessian with the `directions` that it stretches the `starts` into taken out. Costs two products for each.

    `diagonal` is that of what was taken out, `products` are those of the rest. Two copies of the weights are held for
    every direction.
    """

    def __init__(self, hessian: Hessian, starts: Tensors, chunk: int | None):
        self.hessian = hessian
        self.names = list(starts)
        self.shapes = [v.shape[1:] for v in starts.values()]
        stretched = self._rows(hessian.products(starts, chunk))
        self.directions = torch.linalg.qr(stretched.T).Q.T.contiguous()
        directions = {n: v.to(starts[n]) for n, v in self._split(self.directions).items()}
        self.images = self._rows(hessian.products(directions, chunk))
        inner = self.directions @ self.images.T
        diagonal = self.directions * (2 * self.images - inner @ self.directions)
        self.diagonal = {n: v[0] for n, v in self._split(diagonal.sum(0, keepdim=True)).items()}

    def products(self, vectors: Tensors, chunk: int | None = None) -> Tensors:
        """(I - P) H (I - P) v for many v at once."""
        along = self._rows(vectors) @ self.directions.T
        rest = self._rows(self.hessian.products(vectors, chunk)) - along @ self.images
        return self._split(rest - (rest @ self.directions.T) @ self.directions)

    def _rows(self, tensors: Tensors) -> Tensor:
        """A row for each vector, its tensors one after the other, in single precision at least."""
        rows = torch.cat([tensors[name].flatten(1) for name in self.names], 1)
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def _split(self, rows: Tensor) -> Tensors:
        parts = rows.split([shape.numel() for shape in self.shapes], 1)
        return {n: p.unflatten(1, s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

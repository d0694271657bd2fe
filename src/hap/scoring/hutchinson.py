"""Hutchinson's estimator of the diagonal of a linear operator H, and so of the traces of its blocks; and the Hessian of
the loss in the weights as such an operator, without writing to the model.

For random signs v, E[v * Hv] = diag(H) (Hutchinson, 1990; Bekas, Kokiopoulou and Saad, 2007). The signs of a probe
follow from a seed and the probe's number alone: they are drawn anew for each term of H and never kept, and results do
not depend on how many probes run at once.

The Hessian of a trained classifier has a few directions that outweigh all others, about as many as there are classes,
and they are what the noise comes from. With P the projection on such directions,

    H = P H + H P - P H P  +  (I - P) H (I - P)

holds for every P. The first three terms are known once H has been applied to the directions, so only the last one
needs probes (Hutch++, Meyer et al. 2021, here for the traces of many blocks at once).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hap.errors import HapError
from hap.scoring.base import Batch, ScoringContext, samples
from hap.scoring.derivatives import affine_norms, vmapped
from hap.scoring.memory_chunks import Pieces, at_once, held_by_graph
from hap.utils import distributed

Tensors = dict[str, Tensor]
"""Several vectors: by a weight's name, tensors of shape (count, *weight.shape)."""


class Term(NamedTuple):
    """A linear operator, `products(vectors)`, and how many vectors it takes at once."""

    products: Callable[[Tensors], Tensors]
    at_once: int


Operator = Callable[[], Iterator[Term]]
"""A linear operator on the weights: the sum of these terms, and of those of all processes."""


def multiply(operator: Operator, vectors: Tensors, chunk: int | None = None) -> Tensors:
    """H v for many v, `chunk` of them at once, or as many as memory allows."""
    total = {n: torch.zeros_like(v) for n, v in vectors.items()}
    for term in operator():

        def work(part: slice, term: Term = term) -> Tensors:
            return term.products({n: v[part] for n, v in vectors.items()})

        for part, products in Pieces(chunk or term.at_once).of(len(next(iter(vectors.values()))), work):
            for name, product in products.items():
                total[name][part] += product
    distributed.sum_(total.values())
    return total


def diagonal_estimates(
    operator: Operator, weights: Tensors, probes: Sequence[int], seed: int, chunk: int | None = None
) -> Iterator[tuple[slice, Tensors]]:
    """Estimates v * Hv of the diagonal, shaped like the weights, for the probes of these numbers.

    Yields (part, values), values[name] of shape (part, *weight.shape), for each term of the operator and some probes at
    a time, `chunk` or as many as memory allows: the estimate of a probe is the sum of what is yielded for it.
    """
    for term in operator():

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
        return (Term(partial(self._products, term), term.at_once) for term in self.operator())

    def _products(self, term: Term, vectors: Tensors) -> Tensors:
        return self._split(self._rest(term.products(self._split(self._rest(vectors), vectors))))

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


def hessian_terms(problem: ScoringContext) -> Iterator[Term]:
    """The Hessian of the mean loss in the weights: share of the samples times Hessian, batch by batch."""
    weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
    for batch, share in problem.shares():
        gradients, held = _gradients(problem, weights, batch)  # each vector needs about as much again as the graph
        yield Term(partial(_products, weights, gradients, share), at_once(problem.device, held, samples(batch)))


def _gradients(problem: ScoringContext, weights: Tensors, batch: Batch) -> tuple[Tensors, int]:
    """The gradients with their graph, and the bytes it holds."""
    fused = sdpa_kernel(SDPBackend.MATH)  # fused attention has no second derivative
    try:
        with torch.enable_grad(), affine_norms(problem), fused, held_by_graph() as held:
            _, loss = problem.evaluate(weights, batch)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
    except torch.OutOfMemoryError as error:
        raise HapError(
            f"the graph of one Hessian product over a batch of {samples(batch)} does not fit into memory; "
            "pass the same samples in smaller batches"
        ) from error
    return dict(zip(weights, gradients, strict=True)), held()


def _products(weights: Tensors, gradients: Tensors, share: float, vectors: Tensors) -> Tensors:
    """Double backward of several vectors; forward-over-reverse was no faster when timed, with the graph there."""
    live = [n for n, g in gradients.items() if g.requires_grad]
    if not live:
        return {n: torch.zeros_like(v) for n, v in vectors.items()}
    inputs, slopes = list(weights.values()), [gradients[n] for n in live]

    def one(vector: Tensors) -> tuple[Tensor, ...]:
        chosen = [vector[n] for n in live]
        return torch.autograd.grad(slopes, inputs, chosen, retain_graph=True, materialize_grads=True)

    if len(next(iter(vectors.values()))) == 1:  # vmap costs time of its own
        products = tuple(p[None] for p in one({n: v[0] for n, v in vectors.items()}))
    else:
        products = vmapped(one, vectors)
    return {n: share * product for n, product in zip(weights, products, strict=True)}

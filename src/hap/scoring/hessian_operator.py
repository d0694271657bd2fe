"""The Hessian of the loss in the weights as a linear operator, without writing to the model."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hap.errors import HapError
from hap.scoring.base import Batch, ScoringContext, samples
from hap.scoring.derivatives import affine_norms, vmapped
from hap.scoring.memory_chunks import CPU_GRADIENTS, Pieces, budget, held_by_graph
from hap.utils import distributed

Tensors = dict[str, Tensor]
"""Several vectors: by a weight's name, tensors of shape (count, *weight.shape)."""


class Term(NamedTuple):
    """A linear operator, `products(vectors)`, and how many vectors it takes at once."""

    products: Callable[[Tensors], Tensors]
    at_once: int


class Operator(Protocol):
    """A linear operator on the weights: the sum of its terms, and of those of all processes."""

    def terms(self) -> Iterator[Term]: ...


def multiply(operator: Operator, vectors: Tensors, chunk: int | None = None) -> Tensors:
    """H v for many v, `chunk` of them at once, or as many as memory allows."""
    total = {n: torch.zeros_like(v) for n, v in vectors.items()}
    for term in operator.terms():

        def work(part: slice, term: Term = term) -> Tensors:
            return term.products({n: v[part] for n, v in vectors.items()})

        for part, products in Pieces(chunk or term.at_once).of(len(next(iter(vectors.values()))), work):
            for name, product in products.items():
                total[name][part] += product
    distributed.sum_(total.values())
    return total


class Hessian:
    """The Hessian of the mean loss in some weights: one term, with its graph, for each batch."""

    def __init__(self, problem: ScoringContext):
        self.problem = problem
        self.weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}

    def terms(self) -> Iterator[Term]:
        """Share of the samples times Hessian, batch by batch."""
        device = self.problem.device
        for batch, share in zip(self.problem.batches, self.problem.shares(), strict=True):
            gradients, held = self._gradients(batch)

            def products(vectors: Tensors, gradients: Tensors = gradients, share: float = share) -> Tensors:
                return {n: share * p for n, p in self._backward(gradients, vectors).items()}

            fitting = max(budget(device) // max(held, 1), 1)  # each vector needs about as much again as the graph
            cached = fitting if device.type == "cuda" else max(CPU_GRADIENTS // samples(batch), 1)
            yield Term(products, min(fitting, cached))

    def _gradients(self, batch: Batch) -> tuple[Tensors, int]:
        """The gradients with their graph, and the bytes it holds."""
        weights = list(self.weights.values())
        fused = sdpa_kernel(SDPBackend.MATH)  # fused attention has no second derivative
        try:
            with torch.enable_grad(), affine_norms(self.problem), fused, held_by_graph() as held:
                _, loss = self.problem.evaluate(self.weights, batch)
                gradients = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
        except torch.OutOfMemoryError as error:
            raise HapError(
                f"the graph of one Hessian product over a batch of {samples(batch)} does not fit into memory; "
                "pass the same samples in smaller batches"
            ) from error
        return dict(zip(self.weights, gradients, strict=True)), held.bytes

    def _backward(self, gradients: Tensors, vectors: Tensors) -> Tensors:
        """Double backward of several vectors; forward-over-reverse was no faster when timed, with the graph there."""
        live = [n for n, g in gradients.items() if g.requires_grad]
        if not live:
            return {n: torch.zeros_like(v) for n, v in vectors.items()}
        inputs, slopes = list(self.weights.values()), [gradients[n] for n in live]

        def one(vector: Tensors) -> tuple[Tensor, ...]:
            chosen = [vector[n] for n in live]
            return torch.autograd.grad(slopes, inputs, chosen, retain_graph=True, materialize_grads=True)

        if len(next(iter(vectors.values()))) == 1:  # vmap costs time of its own
            products = tuple(p[None] for p in one({n: v[0] for n, v in vectors.items()}))
        else:
            products = vmapped(one, vectors)
        return dict(zip(self.weights, products, strict=True))

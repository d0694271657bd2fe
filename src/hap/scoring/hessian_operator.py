"""The Hessian of the loss in the weights as an operator, without writing to the model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hap.errors import HapError
from hap.scoring.affine import affine_norms
from hap.scoring.base import ScoringContext
from hap.scoring.batch import Batch, samples
from hap.scoring.memory_chunks import CPU_GRADIENTS, Pieces, budget, held_by_graph
from hap.utils import distributed


class Hessian:
    """The Hessian of the mean loss in some weights, as an operator on dicts of vectors. Knows nothing of traces."""

    def __init__(self, problem: ScoringContext):
        self.problem = problem
        self.weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
        self._graph: tuple[dict[str, Tensor], int] | None = None

    def products(self, vectors: dict[str, Tensor], chunk: int | None = None) -> dict[str, Tensor]:
        """H v for many v at once: vectors[name] has shape (count, *weight.shape), and so has the result.

        `chunk` of them take one backward pass together, or as many as memory allows.
        """
        total = {n: torch.zeros_like(v) for n, v in vectors.items()}
        count = len(next(iter(vectors.values())))
        for batch, share in zip(self.problem.batches, self.problem.shares(), strict=True):
            gradients, held = self._graph or self._gradients(batch)
            if len(self.problem.batches) == 1:
                self._graph = gradients, held  # for the next vectors too

            def work(part: slice, gradients: dict[str, Tensor] = gradients) -> dict[str, Tensor]:
                return self._backward(gradients, {n: v[part] for n, v in vectors.items()})

            for part, products in Pieces(chunk or self._chunk(held, samples(batch))).of(count, work):
                for name, product in products.items():
                    total[name][part] += share * product
        distributed.sum_(total.values())
        return total

    def _chunk(self, held: int, count: int) -> int:
        """How many vectors fit: each needs about as much again as the graph that they share."""
        device = next(iter(self.weights.values())).device
        fitting = max(budget(device) // max(held, 1), 1)
        return fitting if device.type == "cuda" else min(fitting, max(CPU_GRADIENTS // count, 1))

    def _gradients(self, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """The gradients with their graph, and the bytes it holds."""
        weights = list(self.weights.values())
        try:
            # fused attention has no second derivative
            with (
                torch.enable_grad(), affine_norms(self.problem), sdpa_kernel(SDPBackend.MATH), held_by_graph() as held
            ):  # fmt: skip
                _, loss = self.problem.evaluate(self.weights, batch)
                gradients = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
        except torch.OutOfMemoryError as error:
            raise HapError(
                f"the graph of one Hessian product over a batch of {samples(batch)} does not fit into memory; "
                "pass the same samples in smaller batches"
            ) from error
        return dict(zip(self.weights, gradients, strict=True)), held.bytes

    def _backward(self, gradients: dict[str, Tensor], vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Double backward of several vectors under vmap; the graph is kept for the next ones.

        Forward-over-reverse takes as many convolutions, once the graph is there, and was no faster when timed.
        """
        live = [n for n, g in gradients.items() if g.requires_grad]
        if not live:
            return {n: torch.zeros_like(v) for n, v in vectors.items()}

        def one(vector: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(
                [gradients[n] for n in live], list(self.weights.values()), [vector[n] for n in live],
                retain_graph=True, materialize_grads=True,
            )  # fmt: skip

        if len(next(iter(vectors.values()))) == 1:  # vmap costs time of its own
            products = tuple(p[None] for p in one({n: v[0] for n, v in vectors.items()}))
        else:
            products = torch.func.vmap(one)(vectors)
        return dict(zip(self.weights, products, strict=True))

"""Exact and sampled traces of the Gauss-Newton blocks, which are the Hessian's where the network is piecewise linear.

With B the Hessian of the loss in one sample's outputs and s_k vectors such that B = sum_k s_k s_k^T, the trace over the
weights of unit p is the sum over samples and k of ||J_p^T s_k||^2. The network runs forward once over some samples; the
backward passes of several s_k run as one under vmap; as the gradient of a layer's output comes by, the row norms of the
weight's gradient are taken and the gradient is let go.

The floor: with F the multiply-adds of a forward pass over all samples and K vectors a sample, the backward passes take
K F and the row norms at most K F more (less where the Gram matrix is cheaper), so (1 + 2 K) F in all: for ResNet56, 512
images and 10 classes 1.35e12 multiply-adds, and about a dozen reads or writes of K gradients of every layer's output,
10 x 1.06 GB in float32, so 127 GB. An H200 (67 TFLOP/s in float32, 4.8 TB/s) cannot do that in less than 40 ms.
Memory: what the forward pass keeps, as in training, and K gradients of the largest outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.execution.module_hooks import hooked
from hap.scoring.affine import affine_norms
from hap.scoring.base import ScoringContext
from hap.scoring.batch import Batch, samples
from hap.scoring.layer_calls import owner
from hap.scoring.memory_chunks import CPU_GRADIENTS, Pieces, budget, held_by_graph
from hap.scoring.outputs import OutputCurvature, output_curvature
from hap.scoring.row_norms import row_norms
from hap.utils import distributed

SURVEYED = 8
"""Samples that are run to see whether and how the traces can be taken."""

LIVE = 4
"""Gradients of about the largest output's size that live at once in a backward pass: of two branches, of an operator's
result, and the copy that the row norms are taken of."""

See = Callable[[str, nn.Module, Tensor, Tensor], None]
"""Called with a weight's name, its layer, what the layer read, and the gradient (K, *output) of its output."""


@dataclass(frozen=True)
class Survey:
    """What a few samples tell: why the traces cannot be taken so, or how many outputs there are, and the bytes per
    sample of the graph that a forward pass leaves and of the largest output of a layer."""

    why_not: str | None
    outputs: int = 0
    graph: int = 0
    largest: int = 0

    def vectors_at_once(self, count: int) -> int:
        """How many of `count` vectors keep the whole within twice a training step's memory, which holds more than this
        graph does; in passes of about equal size."""
        most = max(int(1.5 * self.graph) // max(LIVE * self.largest, 1), 1)
        return math.ceil(count / math.ceil(count / most))

    def samples_at_once(self, vectors: int, device: torch.device) -> int:
        fitting = max(budget(device) // max(self.graph + LIVE * vectors * self.largest, 1), 1)
        return fitting if device.type == "cuda" else min(fitting, max(CPU_GRADIENTS // vectors, 1))


def survey(problem: ScoringContext) -> Survey:
    """Run a few samples forward and one of them backward, to see every layer at work and count what it takes."""
    for name in problem.weights:
        if name not in problem.groups.used_once:
            return Survey(f"{name} is used other than by one call of the layer that owns it")
    batch = samples_of(problem.batches[0], slice(SURVEYED))
    count = samples(batch)
    mixed: dict[str, Tensor] = {}
    sizes: list[int] = []

    def see(name: str, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        along = gradient.shape[1] == len(x) == count
        mixed[name] = gradient[:, 1:].any() if along else torch.ones((), dtype=torch.bool, device=gradient.device)
        sizes.append(gradient.nbytes // len(gradient))

    counted = held_by_graph(all_of_it=True)
    with torch.enable_grad(), _none_frozen(problem.model), counted as held, tapped(problem, see) as anchor:
        output, _ = problem.evaluate({}, batch)
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != count:
            return Survey("the model's output is not one vector per sample")
        if output.requires_grad:
            backward(output, anchor, of_one_sample(output))
    if missing := [n for n in problem.weights if n not in mixed]:
        return Survey(f"what {missing[0]} computes is hidden from its layer")
    if bad := [n for n, yes in zip(mixed, torch.stack(list(mixed.values())).tolist(), strict=True) if yes]:
        return Survey(f"the first axis of what {bad[-1]} reads is not that of the samples")
    return Survey(None, output.shape[1], held.bytes // count, max(sizes) // count)


def of_one_sample(output: Tensor) -> Tensor:
    """A vector (1, *output.shape) that asks for the gradient of the first sample alone: others should get none."""
    first = torch.zeros_like(output)
    first[0] = torch.randn(output.shape[1], generator=torch.Generator().manual_seed(0)).to(output)
    return first[None]


@contextmanager
def _none_frozen(model: nn.Module) -> Iterator[None]:
    """Inside, all parameters require gradients: what is counted there must not depend on which the caller has frozen,
    since it decides how many vectors run at once and so how sums are rounded."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not (p.requires_grad or p.is_inference())]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


Piece = Callable[[Batch, Tensor, Tensor, int], dict[str, Tensor]]
"""What some samples add for each vector, (K, units) by name, from the vectors s_k of these samples (K, samples,
outputs), their signs (K, samples), and how many of them to send back at once."""


def gauss_newton_traces(problem: ScoringContext, found: Survey, draws: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """trace(J_p^T B J_p) for every index p of each weight's unit axis: (1, units), exact.

    With `draws`, so many independent and unbiased estimates of it instead: (draws, units).
    """
    dims = {p.weight: p.dim for g in problem.groups.values() for p in g.producers}
    sizes = {n: w.shape[dims[n]] for n, w in problem.weights.items()}

    def piece(batch: Batch, vectors: Tensor, signs: Tensor, at_once: int) -> dict[str, Tensor]:
        return _piece(problem, batch, vectors, signs, at_once, dims)

    return over_samples(problem, found, sizes, piece, draws, seed)


def over_samples(
    problem: ScoringContext, found: Survey, sizes: dict[str, int], piece: Piece, draws: int, seed: int
) -> dict[str, Tensor]:
    """The mean over all samples of what each adds: (1, units) by name, summed over the vectors s_k; with `draws` one
    row for each of so many random combinations of them. `sizes` are the numbers of units."""
    device = problem.device
    totals = {n: torch.zeros(max(draws, 1), size, dtype=torch.float64, device=device) for n, size in sizes.items()}
    vectors = found.vectors_at_once(draws or found.outputs)
    pieces = Pieces(distributed.least(found.samples_at_once(vectors, device), device), halve=not problem.sharded)
    if problem.sharded:
        for size in (len(problem.batches), *(samples(b) for b in problem.batches)):
            distributed.agree(size, "the number of batches or of samples in a batch")
    generator = torch.Generator(device).manual_seed(seed + distributed.rank())
    for batch, share in zip(problem.batches, problem.shares(), strict=True):
        curvature = output_curvature(problem, _outputs(problem, batch, pieces), batch)
        if curvature is None:
            continue
        chosen = drawn_vectors(curvature, draws, generator) if draws else curvature.factors

        def work(part: slice, batch: Batch = batch, chosen: _Vectors = chosen) -> dict[str, Tensor]:
            return piece(samples_of(batch, part), *chosen(part), vectors)

        for _, rows in pieces.of(samples(batch), work):
            for name, values in rows.items():
                totals[name] += share * (values if draws else values.sum(0, keepdim=True))
    distributed.sum_(totals.values())
    return totals


_Vectors = Callable[[slice], tuple[Tensor, Tensor]]


def drawn_vectors(curvature: OutputCurvature, draws: int, generator: torch.Generator) -> _Vectors:
    """Random vectors, drawn for the whole batch at once so that they do not depend on the size of the pieces."""
    vectors, signs = curvature.draw(draws, generator)
    return lambda part: (vectors[:, part], signs[:, part])


def _outputs(problem: ScoringContext, batch: Batch, pieces: Pieces) -> Tensor:
    """The outputs of a whole batch: a loss may weigh its samples by what else is in it."""

    def work(part: slice) -> Tensor:
        output: Tensor = problem.evaluate({}, samples_of(batch, part))[0]
        return output

    return torch.cat([output for _, output in pieces.of(samples(batch), work)])


def _piece(
    problem: ScoringContext, batch: Batch, vectors: Tensor, signs: Tensor, at_once: int, dims: dict[str, int]
) -> dict[str, Tensor]:
    """sum over samples of sign ||J_p^T s||^2, (K, units) by weight, for the samples of one piece."""
    rows: dict[str, list[Tensor]] = {n: [] for n in problem.weights}
    current = signs[:0]

    def see(name: str, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        norms = row_norms(module, x, dims[name], gradient)
        rows[name].append((norms.double() * current[:, :, None]).sum(1))

    with torch.enable_grad(), tapped(problem, see) as anchor:
        output, _ = problem.evaluate({}, batch)
        for start in range(0, len(vectors), at_once):
            current = signs[start : start + at_once]
            backward(output, anchor, vectors[start : start + at_once].to(output.dtype))
    return {n: torch.cat(r) for n, r in rows.items()}


def samples_of(value: Any, part: slice) -> Any:
    """Some samples of a batch."""
    return pytree.tree_map(lambda t: t[part] if isinstance(t, Tensor) and t.ndim else t, value)


# ---- taps ---------------------------------------------------------------------------------------------------


@contextmanager
def tapped(problem: ScoringContext, see: See) -> Iterator[Tensor]:
    """Inside, a backward pass to the anchor this gives calls `see` as it goes by each layer that owns a weight."""
    anchor = torch.zeros((), device=problem.device, requires_grad=True)

    def tap_of(name: str) -> Any:
        def tap(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            x = args[0].detach()
            tapped: Tensor = Tap.apply(output, anchor, lambda gradient: see(name, module, x, gradient))
            return tapped

        return tap

    taps = [(owner(name), tap_of(name)) for name in problem.weights]
    with hooked(problem.model, after=taps, first=True), affine_norms(problem):
        yield anchor


def backward(output: Tensor, anchor: Tensor, vectors: Tensor) -> None:
    """One backward pass for all vectors (K, *output.shape), past every tap and no further."""

    def one(vector: Tensor) -> Tensor:
        return torch.autograd.grad(output, anchor, vector, retain_graph=True, materialize_grads=True)[0]

    torch.func.vmap(one)(vectors)


class Tap(torch.autograd.Function):
    """The identity. It makes its output depend on the anchor, and shows `see` the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, see: Callable[[Tensor], None]) -> Tensor:
        ctx.see = see
        return output.clone()  # what follows may write in place; the original is let go

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = _Look.apply(gradients[0], ctx.see)
        return (gradient if ctx.needs_input_grad[0] else None), gradient.new_zeros(()), None


class _Look(torch.autograd.Function):
    """The identity. Under vmap `see` gets the plain tensor with the vmapped axis first."""

    @staticmethod
    def forward(gradient: Tensor, see: Callable[[Tensor], None]) -> Tensor:
        see(gradient[None])
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: Tensor, see: Callable[[Tensor], None]) -> tuple[Tensor, int]:
        gradient = gradient.movedim(in_dims[0], 0)
        see(gradient)
        return gradient, 0

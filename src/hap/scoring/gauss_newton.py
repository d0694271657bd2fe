"""Exact and sampled traces of the Gauss-Newton blocks, which are the Hessian's where the network is piecewise linear.

With B the Hessian of the loss in one sample's outputs and s_k vectors such that B = sum_k s_k s_k^T, the trace over the
weights of unit p is the sum over samples and k of ||J_p^T s_k||^2. The network runs forward once over some samples; the
backward passes of several s_k run as one under vmap; as the gradient of a layer's output comes by, the row norms of the
weight's gradient are taken and the gradient is let go.

With F the multiply-adds of a forward pass over all samples and K vectors a sample, the backward passes take K F and the
row norms at most K F more, so (1 + 2 K) F in all: for ResNet56, 512 images and 10 classes 1.35e12, with about 127 GB to
be read or written, not below 40 ms on an H200. Memory: what the forward pass keeps, and K gradients of the largest
outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.execution.calling import hooked
from hap.scoring.base import Batch, ScoringContext, samples
from hap.scoring.derivatives import Tap, affine_norms, backward
from hap.scoring.memory_chunks import CPU_GRADIENTS, Pieces, budget, held_by_graph
from hap.scoring.outputs import CannotTrace, output_curvature
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
    """What a few samples tell: how many outputs there are, and the bytes per sample of the graph that a forward pass
    leaves and of the largest output of a layer."""

    outputs: int
    graph: int
    largest: int

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
    if shared := [name for name in problem.weights if name not in problem.groups.used_once]:
        raise CannotTrace(f"{shared[0]} is used other than by one call of the layer that owns it")
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
            raise CannotTrace("the model's output is not one vector per sample")
        if output.requires_grad:
            backward(output, anchor, of_one_sample(output))
    if missing := [n for n in problem.weights if n not in mixed]:
        raise CannotTrace(f"what {missing[0]} computes is hidden from its layer")
    if bad := [n for n, yes in zip(mixed, torch.stack(list(mixed.values())).tolist(), strict=True) if yes]:
        raise CannotTrace(f"the first axis of what {bad[-1]} reads is not that of the samples")
    return Survey(output.shape[1], held.bytes // count, max(sizes) // count)


def of_one_sample(output: Tensor) -> Tensor:
    """A vector (1, *output.shape) that asks for the gradient of the first sample alone: others should get none."""
    first = torch.zeros_like(output)
    first[0] = torch.randn(output.shape[1], generator=torch.Generator().manual_seed(0)).to(output)
    return first[None]


@contextmanager
def _none_frozen(model: nn.Module) -> Iterator[None]:
    """Inside, all parameters require gradients: what is counted there must not depend on which the caller has frozen,
    since it decides how many vectors run at once and so how sums are rounded."""
    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.is_floating_point() and not (parameter.requires_grad or parameter.is_inference()):
                stack.callback(parameter.requires_grad_(True).requires_grad_, False)
        yield


def gauss_newton_traces(problem: ScoringContext, found: Survey, draws: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """trace(J_p^T B J_p) for every index p of each weight's unit axis: (1, units), exact; with `draws`, so many
    independent and unbiased estimates of it: (draws, units)."""
    dims = {p.weight: p.dim for g in problem.groups.values() for p in g.producers}
    sizes = {n: w.shape[dims[n]] for n, w in problem.weights.items()}

    def taps(add: Add) -> AbstractContextManager[Tensor]:
        return tapped(problem, lambda name, module, x, gradient: add(name, row_norms(module, x, dims[name], gradient)))

    return over_samples(problem, found, Measure(taps, Tensor.double, sizes), draws, seed)


Add = Callable[[str, Tensor], None]
"""Called with a name and values (K, samples, units); what is added under a name in one backward pass is summed."""


class Measure(NamedTuple):
    """What a backward pass of K vectors is measured by: `taps` gives the anchor that it goes to, past all that adds
    values; of their sums `square` makes what counts; `sizes` are the numbers of units by name."""

    taps: Callable[[Add], AbstractContextManager[Tensor]]
    square: Callable[[Tensor], Tensor]
    sizes: dict[str, int]


def over_samples(problem: ScoringContext, found: Survey, measure: Measure, draws: int, seed: int) -> dict[str, Tensor]:
    """What is measured, summed over the vectors s_k, as a mean over all samples: (1, units) by name; with `draws` one
    row for each of so many random combinations of the vectors."""
    device, rows = problem.device, max(draws, 1)
    totals = {n: torch.zeros(rows, size, dtype=torch.float64, device=device) for n, size in measure.sizes.items()}
    at_once = found.vectors_at_once(draws or found.outputs)
    pieces = Pieces(distributed.least(found.samples_at_once(at_once, device), device), halve=not problem.sharded)
    if problem.sharded:
        for size in (len(problem.batches), *(samples(b) for b in problem.batches)):
            distributed.agree(size, "the number of batches or of samples in a batch")
    generator = torch.Generator(device).manual_seed(seed + distributed.rank())
    for batch, share in zip(problem.batches, problem.shares(), strict=True):
        curvature = output_curvature(problem, _outputs(problem, batch, pieces), batch)
        if curvature is None:
            continue
        vectors, signs = curvature.draw(draws, generator) if draws else curvature.factors()

        def work(part: slice, given: Any = (batch, vectors, signs)) -> dict[str, Tensor]:
            batch, vectors, signs = given
            return _piece(problem, samples_of(batch, part), vectors[:, part], signs[:, part], at_once, measure)

        for _, part in pieces.of(samples(batch), work):
            for name, values in part.items():
                totals[name] += share * (values if draws else values.sum(0, keepdim=True))
    distributed.sum_(totals.values())
    return totals


def _outputs(problem: ScoringContext, batch: Batch, pieces: Pieces) -> Tensor:
    """The outputs of a whole batch: a loss may weigh its samples by what else is in it."""
    parts = pieces.of(samples(batch), lambda part: problem.evaluate({}, samples_of(batch, part))[0])
    return torch.cat([output for _, output in parts])


def _piece(
    problem: ScoringContext, batch: Batch, vectors: Tensor, signs: Tensor, at_once: int, measure: Measure
) -> dict[str, Tensor]:
    """The sum over the samples of one piece, (K, units) by name, for their vectors (K, samples, outputs)."""
    rows: dict[str, list[Tensor]] = {}
    found: dict[str, Tensor] = {}

    def add(name: str, values: Tensor) -> None:
        found[name] = values + found[name] if name in found else values

    with torch.enable_grad(), measure.taps(add) as anchor:
        output, _ = problem.evaluate({}, batch)
        for start in range(0, len(vectors), at_once):
            part = slice(start, start + at_once)
            found.clear()
            backward(output, anchor, vectors[part].to(output.dtype))
            for name, values in found.items():
                rows.setdefault(name, []).append((measure.square(values) * signs[part, :, None]).sum(1))
    return {name: torch.cat(some) for name, some in rows.items()}


def samples_of(value: Any, part: slice) -> Any:
    """Some samples of a batch."""
    return pytree.tree_map(lambda t: t[part] if isinstance(t, Tensor) and t.ndim else t, value)


@contextmanager
def tapped(problem: ScoringContext, see: See) -> Iterator[Tensor]:
    """Inside, a backward pass to the anchor this gives calls `see` as it goes by each layer that owns a weight."""
    anchor = torch.zeros((), device=problem.device, requires_grad=True)

    def tap(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        tapped: Tensor = Tap.apply(output, anchor, partial(see, name, module, args[0].detach()))
        return tapped

    taps = [(name.rpartition(".")[0], partial(tap, name)) for name in problem.weights]
    with hooked(problem.model, after=taps, first=True), affine_norms(problem):
        yield anchor

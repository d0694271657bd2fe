"""Exact and sampled traces of the Gauss-Newton blocks, which are the Hessian's where the network is piecewise linear.

With B the Hessian of the loss in one sample's outputs and s_k vectors such that B = sum_k s_k s_k^T, the trace over the
weights of unit p is the sum over samples and k of ||J_p^T s_k||^2. The network runs forward once over some samples; the
backward passes of several s_k run as one under vmap; as the gradient of a layer's output comes by, the row norms of the
weight's gradient are taken and the gradient is let go. With F the multiply-adds of a forward pass over all samples and
K vectors a sample this takes at most (1 + 2 K) F, and the memory of a forward pass with K gradients of its largest
output.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.execution.calling import hooked
from hap.scoring.base import Batch, ScoringContext, samples
from hap.scoring.derivatives import Tap, tapped
from hap.scoring.memory_chunks import Pieces, at_once, held_by_graph
from hap.scoring.outputs import CannotTrace, output_curvature
from hap.scoring.sample_axis import samples_of
from hap.utils import distributed

SURVEYED = 8
"""Samples that are run to see whether and how the traces can be taken."""

LIVE = 4
"""Gradients of about the largest output's size that live at once in a backward pass: of two branches, of an operator's
result, and the copy that the row norms are taken of."""

PATCHES = 2**28
"""Bytes of patches that are made at a time. All of those of a 3x3 kernel would be nine times its input."""

See = Callable[[str, nn.Module, Tensor, Tensor], None]
"""Called with a weight's name, its layer, what the layer read, and the gradient (K, *output) of its output."""

Add = Callable[[str, Tensor], None]
"""Called with a name and values (K, samples, units); what is added under a name in one backward pass is summed."""

Place = Callable[[Add, Tap], AbstractContextManager[None]]
Square = Callable[[Tensor], Tensor]


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

    counted, run = held_by_graph(all_of_it=True), tapped(problem, batch, partial(_at_layers, problem, see))
    with _none_frozen(problem.model), counted as held, run as (output, send_back):
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != count:
            raise CannotTrace("the model's output is not one vector per sample")
        if output.requires_grad:
            send_back(of_one_sample(output))
    if missing := [n for n in problem.weights if n not in mixed]:
        raise CannotTrace(f"what {missing[0]} computes is hidden from its layer")
    if bad := [n for n, yes in zip(mixed, torch.stack(list(mixed.values())).tolist(), strict=True) if yes]:
        raise CannotTrace(f"the first axis of what {bad[-1]} reads is not that of the samples")
    return Survey(output.shape[1], held() // count, max(sizes) // count)


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

    def place(add: Add, tap: Tap) -> AbstractContextManager[None]:
        return _at_layers(problem, lambda name, layer, x, g: add(name, row_norms(layer, x, dims[name], g)), tap)

    return over_samples(problem, found, place, Tensor.double, draws, seed)


def over_samples(
    problem: ScoringContext, found: Survey, place: Place, square: Square, draws: int, seed: int
) -> dict[str, Tensor]:
    """What `square` makes of what the taps add in a backward pass, summed over the vectors s_k, as a mean over all
    samples: (1, units) by name; with `draws` one row for each of so many random combinations of the vectors."""
    device, vectors_at_once = problem.device, found.vectors_at_once(draws or found.outputs)
    fitting = at_once(device, found.graph + LIVE * vectors_at_once * found.largest, vectors_at_once)
    pieces = Pieces(distributed.least(fitting, device), halve=not problem.sharded)
    if problem.sharded:
        for size in (len(problem.batches), *(samples(b) for b in problem.batches)):
            distributed.agree(size, "the number of batches or of samples in a batch")
    generator = torch.Generator(device).manual_seed(seed + distributed.rank())

    def parts(batch: Batch, share: float) -> Iterator[dict[str, Tensor]]:
        outputs = pieces.of(samples(batch), lambda part: problem.evaluate({}, samples_of(batch, part))[0])
        whole = torch.cat([output for _, output in outputs])  # a loss may weigh samples by what else is in the batch
        curvature = output_curvature(problem, whole, batch)
        vectors, signs = curvature.draw(draws, generator) if draws else curvature.factors()

        def work(part: slice) -> dict[str, Tensor]:
            rows = [v[:, part].split(vectors_at_once) for v in (vectors, signs)]
            return _piece(problem, samples_of(batch, part), zip(*rows, strict=True), place, square)

        for _, rows in pieces.of(samples(batch), work):
            yield {n: share * (values if draws else values.sum(0, keepdim=True)) for n, values in rows.items()}

    return problem.sum_over_batches(parts)


def _piece(
    problem: ScoringContext, batch: Batch, passes: Iterable[tuple[Tensor, Tensor]], place: Place, square: Square
) -> dict[str, Tensor]:
    """The sum over these samples, (K, units) by name, from a backward pass for each pair of some vectors (k, samples,
    outputs) and their signs (k, samples)."""
    rows: dict[str, list[Tensor]] = {}
    found: dict[str, Tensor] = {}

    def add(name: str, values: Tensor) -> None:
        found[name] = values + found[name] if name in found else values

    with tapped(problem, batch, partial(place, add)) as (output, send_back):
        for vectors, signs in passes:
            found.clear()
            send_back(vectors.to(output.dtype))
            for name, values in found.items():
                rows.setdefault(name, []).append((square(values) * signs[..., None]).sum(1))
    return {name: torch.cat(some) for name, some in rows.items()}


def _at_layers(problem: ScoringContext, see: See, tap: Tap) -> AbstractContextManager[None]:
    """Inside, the output of every layer that owns a weight is tapped, and `see` called as gradients go by."""

    def after(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return tap(output, partial(see, name, module, args[0].detach()))

    hooks = [(name.rpartition(".")[0], partial(after, name)) for name in problem.weights]
    return hooked(problem.model, after=hooks, first=True)


# ---- row norms ----------------------------------------------------------------------------------------------


def row_norms(module: nn.Module, x: Tensor, dim: int, gradient: Tensor) -> Tensor:
    """Squared norms (K, samples, units) of the gradients of a layer's weight, units along its axis `dim`, from what the
    layer read and the gradient (K, samples, *output) of its output."""
    if computes_as(module, nn.Conv2d):
        assert isinstance(module, nn.Conv2d)
        rows, taken = gradient.flatten(3), x[:1].nbytes * math.prod(module.kernel_size) // math.prod(module.stride)
    elif computes_as(module, nn.Linear):
        rows, taken = gradient.reshape(*gradient.shape[:2], -1, gradient.shape[-1]).mT, x[:1].nbytes
    else:
        return torch.func.vmap(lambda g: _by_vmap(module, x, dim, g))(gradient)
    step = max(PATCHES // max(taken, 1), 1)  # taken: about what the patches of one sample take
    pieces = zip(rows.split(step, dim=1), x.split(step), strict=True)
    return torch.cat([_norms(rows, _patches(module, x)) for rows, x in pieces], dim=1)


def _norms(rows: Tensor, patches: Tensor) -> Tensor:
    """rows g (K, samples, O, L), patches a (samples, groups, P, L) -> squared row norms (K, samples, O) of g a^T: of
    that itself or as the diagonal of g (a^T a) g^T, whichever takes fewer multiply-adds."""
    count, (groups, size, length) = len(rows), patches.shape[1:]
    rows = rows.unflatten(2, (groups, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)  # (samples, groups, K O, L)
    if size * length + rows.shape[2] * length < rows.shape[2] * size:
        norms = ((rows @ (patches.mT @ patches)) * rows).sum(-1)
    else:
        norms = (rows @ patches.mT).square_().sum(-1)
    return norms.unflatten(2, (count, -1)).permute(2, 0, 1, 3).flatten(2)


def _patches(module: nn.Module, x: Tensor) -> Tensor:
    """What each position of the output reads: (samples, groups, P, L)."""
    if not isinstance(module, nn.Conv2d):
        return x.reshape(len(x), 1, -1, x.shape[-1]).mT
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        x = F.pad(x, padding, "constant" if module.padding_mode == "zeros" else module.padding_mode)
    for axis, size, dilation, stride in zip((2, 3), module.kernel_size, module.dilation, module.stride, strict=True):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    positions = math.prod(x.shape[2:4])  # F.unfold would start a kernel for every sample on a GPU
    return x.permute(0, 1, 4, 5, 2, 3).reshape(len(x), module.groups, -1, positions)


def _by_vmap(module: nn.Module, x: Tensor, dim: int, gradient: Tensor) -> Tensor:
    """Any layer, for one vector: the vector-Jacobian product in its weight, sample by sample."""
    assert isinstance(module.weight, Tensor)
    bare, weight = copy.copy(module), module.weight.detach()
    bare._forward_hooks, bare._forward_pre_hooks = OrderedDict(), OrderedDict()

    def one(x: Tensor, g: Tensor) -> Tensor:
        def forward(w: Tensor) -> Tensor:
            return torch.func.functional_call(bare, {"weight": w}, (x[None],))[0]

        (row,) = torch.func.vjp(forward, weight)[1](g)
        return row.square().sum([d for d in range(row.ndim) if d != dim])

    return torch.func.vmap(one)(x, gradient)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of a kind and has not changed what that kind computes."""
    parts = ("forward", "_conv_forward")
    return isinstance(module, kind) and all(getattr(type(module), p, None) is getattr(kind, p, None) for p in parts)

"""Curvature of the loss in the weights, without writing to the model: Hessian products and exact block traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap import distributed
from hap.errors import HapError
from hap.scoring.base import Batch, Problem, samples

MOST_OUTPUTS = 100
"""Beyond this many outputs one backward pass per output is dearer than random probes."""


CHUNK = {"cpu": 64, "cuda": 512}
"""Samples per backward pass of the exact trace: a cache's worth, or enough to fill a GPU."""


class Hessian:
    """The Hessian of the mean loss in some weights, as an operator on dicts of vectors. Knows nothing of traces."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}

    def products(self, vectors: dict[str, Tensor], chunk: int) -> dict[str, Tensor]:
        """H v for many v at once: vectors[name] has shape (count, *weight.shape), and so has the result."""
        total = {n: torch.zeros_like(v) for n, v in vectors.items()}
        count = len(next(iter(vectors.values())))
        for batch, share in zip(self.problem.batches, self.problem.shares(), strict=True):
            gradients = self._gradients(batch)
            for start in range(0, count, chunk):
                part = slice(start, start + chunk)
                for name, product in self._backward(gradients, {n: v[part] for n, v in vectors.items()}).items():
                    total[name][part] += share * product
        distributed.sum_(total.values())
        return total

    def _gradients(self, batch: Batch) -> dict[str, Tensor]:
        with torch.enable_grad():
            _, loss = self.problem.evaluate(self.weights, batch)
            gradients = torch.autograd.grad(
                loss, list(self.weights.values()), create_graph=True, materialize_grads=True
            )
        return dict(zip(self.weights, gradients, strict=True))

    def _backward(self, gradients: dict[str, Tensor], vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Double backward; one vector at a time or several under vmap, with the graph kept for the next ones."""
        live = [n for n, g in gradients.items() if g.requires_grad]
        out = {n: torch.zeros_like(v) for n, v in vectors.items()}
        if not live:
            return out
        several = len(next(iter(vectors.values()))) > 1
        products = torch.autograd.grad(
            [gradients[n] for n in live], list(self.weights.values()),
            [vectors[n] if several else vectors[n][0] for n in live],
            retain_graph=True, is_grads_batched=several, allow_unused=True,
        )  # fmt: skip
        for name, product in zip(self.weights, products, strict=True):
            if product is not None:
                out[name] = product if several else product[None]
        return out


# ---- the exact short cut ------------------------------------------------------------------------------------


def why_not_exact(problem: Problem) -> str | None:
    """Why the Gauss-Newton blocks differ from the Hessian's here, or None if it is piecewise linear in each weight."""
    if problem.groups.curved is not None:
        return f"the network is not piecewise linear in each weight ({problem.groups.curved})"
    return why_not_gauss_newton(problem)


def why_not_gauss_newton(problem: Problem) -> str | None:
    for name in problem.weights:
        if name not in problem.groups.direct:
            return f"{name} is used other than by one call of the layer that owns it"
    batch = _cut(problem.batches[0], slice(8))
    weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
    with torch.enable_grad(), _recording(problem) as seen:
        output, _ = problem.evaluate(weights, batch)
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != samples(batch):
        return "the model's output is not one vector per sample"
    if output.shape[1] > MOST_OUTPUTS:
        return f"the model has {output.shape[1]} outputs, more than {MOST_OUTPUTS}"
    return _mixing_layer(problem, output, seen)


def _mixing_layer(problem: Problem, output: Tensor, seen: _Seen) -> str | None:
    """A layer that cannot be watched sample by sample: its first axis is folded, moved or mixed, or it is hidden."""
    first = torch.zeros_like(output)
    first[0] = torch.randn(output.shape[1], generator=torch.Generator().manual_seed(0)).to(output)
    watched = {n: out for n, out in seen.outputs.items() if out.requires_grad}
    if missing := [n for n in problem.weights if n not in watched]:
        return f"what {missing[0]} computes is hidden from its layer"
    back = torch.autograd.grad(output, list(watched.values()), first, allow_unused=True)
    for name, gradient in zip(watched, back, strict=True):
        if gradient is None:
            return f"what {name} computes is hidden from its layer"
        if not len(gradient) == len(seen.inputs[name]) == len(output) or gradient[1:].any():
            return f"the first axis of what {name} reads is not that of the samples"
    return None


def gauss_newton_traces(problem: Problem) -> dict[str, Tensor]:
    """trace(J_p^T B J_p) for every index p of each weight's unit axis, B the Hessian of the loss in the outputs.

    One backward pass per output over a chunk of samples; with s_k an eigenvector of a sample's B scaled by the
    root of its eigenvalue, the trace is the sum over samples and k of ||J_p^T s_k||^2.
    """
    dims = {p.weight: p.dim for g in problem.groups.values() for p in g.producers}
    totals = {
        n: torch.zeros(w.shape[dims[n]], dtype=torch.float64, device=w.device) for n, w in problem.weights.items()
    }
    chunk = CHUNK["cuda" if any(w.is_cuda for w in problem.weights.values()) else "cpu"]
    for batch, share in zip(problem.batches, problem.shares(), strict=True):
        vectors, signs = output_factors(problem, batch)
        for start in range(0, samples(batch), chunk):
            part = slice(start, start + chunk)
            for name, trace in _chunk_traces(problem, batch, part, vectors[:, part], signs[:, part], dims).items():
                totals[name] += share * trace
    distributed.sum_(totals.values())
    return totals


def output_factors(problem: Problem, batch: Batch) -> tuple[Tensor, Tensor]:
    """Vectors s_k (outputs, samples, outputs), signs (outputs, samples): B = sum_k sign_k s_k s_k^T for each sample."""
    with torch.no_grad():
        output, _ = problem.evaluate({}, batch)
    output = output.detach().double().requires_grad_()
    assert problem.loss is not None
    with torch.enable_grad():
        target = batch[1].double() if isinstance(batch[1], Tensor) and batch[1].is_floating_point() else batch[1]
        (slope,) = torch.autograd.grad(problem.loss(output, target), output, create_graph=True)
        if not slope.requires_grad:  # linear in the outputs: no curvature at all
            return output.new_zeros(0, *output.shape), output.new_zeros(0, len(output))
        columns = [torch.autograd.grad(slope[:, k].sum(), output, retain_graph=True)[0] for k in range(output.shape[1])]
    blocks = torch.stack(columns, dim=1)
    _check_separable(slope, output, blocks)
    values, vectors = torch.linalg.eigh(blocks)
    scaled = vectors * values.abs().sqrt()[:, None]
    return scaled.permute(2, 0, 1), values.sign().t()


def _check_separable(slope: Tensor, output: Tensor, blocks: Tensor) -> None:
    """A loss that mixes samples has curvature between them, which one block per sample cannot hold."""
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(output)
    (product,) = torch.autograd.grad(slope, output, probe, retain_graph=True)
    own = torch.einsum("nab,nb->na", blocks, probe)
    if (product - own).norm() > 1e-6 * product.norm() + 1e-13 * (1 + slope.detach().norm()):  # the rest is rounding
        raise HapError('the loss mixes the samples of a batch; use HessianTrace(method="hutchinson")')


@dataclass
class _Seen:
    """What went in and out of the layers that own weights, during one forward pass."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def _recording(problem: Problem) -> Iterator[_Seen]:
    modules, seen, hooks = dict(problem.model.named_modules()), _Seen(), []
    for name in problem.weights:

        def note(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            seen.inputs[name], seen.outputs[name] = args[0].detach(), output

        hooks.append(modules[name.rpartition(".")[0]].register_forward_hook(note, prepend=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _chunk_traces(
    problem: Problem, batch: Batch, part: slice, vectors: Tensor, signs: Tensor, dims: dict[str, int]
) -> dict[str, Tensor]:
    modules = dict(problem.model.named_modules())
    weights = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
    piece = (_cut(batch[0], part), _cut(batch[1], part))
    with torch.enable_grad(), _recording(problem) as seen:
        output, _ = problem.evaluate(weights, piece)
    names = list(seen.outputs)
    owners = {n: modules[n.rpartition(".")[0]] for n in names}
    layers = {n: _RowNorms(owners[n], seen.inputs[n], weights[n].detach(), dims[n]) for n in names}
    totals = {n: torch.zeros(w.shape[dims[n]], dtype=torch.float64, device=w.device) for n, w in weights.items()}
    for vector, sign in zip(vectors.to(output.dtype), signs, strict=True):
        if not (sign != 0).any():
            continue
        back = torch.autograd.grad(
            output, [seen.outputs[n] for n in names], vector, retain_graph=True, materialize_grads=True
        )
        for name, gradient in zip(names, back, strict=True):
            totals[name] += (layers[name](gradient).double() * sign[:, None]).sum(0)
    return totals


def _cut(value: Any, part: slice) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t[part] if isinstance(t, Tensor) and t.ndim else t, value)


class _RowNorms:
    """Squared norm of each sample's weight gradient per index of the unit axis: output gradient -> (samples, units).

    With a the patches (samples, P, L) and g the output's gradient (samples, O, L) the weight gradient is g a^T. Its
    row norms come from g a^T itself, or as g (a^T a) g^T from the L x L Gram matrix where that is smaller.
    """

    def __init__(self, module: nn.Module, x: Tensor, weight: Tensor, dim: int):
        self.module, self.x, self.weight, self.dim = module, x, weight, dim
        self.patches = self._patches()
        self.gram = None
        if self.patches is not None and self.patches.shape[1] > self.patches.shape[2]:
            self.gram = self.patches.transpose(1, 2) @ self.patches

    def _patches(self) -> Tensor | None:
        m = self.module
        if isinstance(m, nn.Linear):
            return self.x.reshape(len(self.x), -1, self.x.shape[-1]).transpose(1, 2)
        if isinstance(m, nn.Conv2d) and m.groups == 1 and not isinstance(m.padding, str) and m.padding_mode == "zeros":
            return F.unfold(self.x, m.kernel_size, m.dilation, m.padding, m.stride)
        return None

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.patches is None:
            return self._by_vmap(gradient)
        if isinstance(self.module, nn.Linear):
            g = gradient.reshape(len(gradient), -1, gradient.shape[-1]).transpose(1, 2)
        else:
            g = gradient.flatten(2)
        if self.gram is not None:
            return ((g @ self.gram) * g).sum(-1)
        return (g @ self.patches.transpose(1, 2)).square().sum(-1)

    def _by_vmap(self, gradient: Tensor) -> Tensor:
        """Any layer: the vector-Jacobian product in its weight, sample by sample."""

        def one(x: Tensor, g: Tensor) -> Tensor:
            def forward(w: Tensor) -> Tensor:
                return torch.func.functional_call(_bare(self.module), {"weight": w}, (x[None],))[0]

            (row,) = torch.func.vjp(forward, self.weight)[1](g)
            return row.square().sum([d for d in range(row.ndim) if d != self.dim])

        return torch.func.vmap(one)(self.x, gradient)


def _bare(module: nn.Module) -> nn.Module:
    """The layer without its hooks."""
    bare = module.__class__.__new__(module.__class__)
    bare.__dict__ = module.__dict__.copy()
    bare._forward_hooks, bare._forward_pre_hooks = (
        type(module._forward_hooks)(),
        type(module._forward_pre_hooks)(),
    )
    return bare

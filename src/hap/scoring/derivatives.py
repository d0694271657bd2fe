"""What derivatives of a model are taken with: BatchNorm as one multiply-add, several vectors in one pass, and taps."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hap.execution.calling import hooked
from hap.scoring.base import Batch, ScoringContext


def affine_norms(problem: ScoringContext) -> AbstractContextManager[None]:
    """Inside, BatchNorms that are not scored themselves are products with constants, whose graph keeps no activations.

    The operator's own backward copies under vmap, there and back, and its second derivative takes many kernels.
    """
    fixed = [
        (name, _as_affine)
        for name, module in problem.model.named_modules()
        if isinstance(module, _BatchNorm)
        and type(module).forward is _BatchNorm.forward
        and not {f"{name}.weight", f"{name}.bias"} & problem.weights.keys()
    ]
    return hooked(problem.model, after=fixed, first=True)


def _as_affine(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Instead of what the layer computed, the same as one multiply-add."""
    assert isinstance(module, _BatchNorm)
    if not args or module.running_mean is None or module.running_var is None or module.training:
        return output
    scale = (module.running_var + module.eps).rsqrt()
    scale = scale if module.weight is None else scale * module.weight.detach()
    shift = -module.running_mean * scale
    shift = shift if module.bias is None else shift + module.bias.detach()
    shape = (1, -1) + (1,) * (output.ndim - 2)
    return args[0] * scale.view(shape).to(output.dtype) + shift.view(shape).to(output.dtype)


def vmapped(function: Callable[..., Any], vectors: Any) -> Any:
    """The function of each vector, all at once, without torch's remarks on operators that run one after the other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        return torch.func.vmap(function)(vectors)


See = Callable[[Tensor], None]
Tap = Callable[[Tensor, See], Tensor]
"""tap(value, see) is the value; in a backward pass of K vectors `see` is called with its gradients (K, *value)."""


@contextmanager
def tapped(
    problem: ScoringContext, batch: Batch, place: Callable[[Tap], AbstractContextManager[None]]
) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
    """The output on a batch with taps where `place` puts them, and what sends vectors (K, *output) back from there in
    one pass, past all taps and no further."""
    anchor = torch.zeros((), device=problem.device, requires_grad=True)

    def send_back(vectors: Tensor) -> None:
        vmapped(lambda v: torch.autograd.grad(output, anchor, v, retain_graph=True, materialize_grads=True), vectors)

    with torch.enable_grad(), place(lambda value, see: _Tap.apply(value, anchor, see)), affine_norms(problem):
        output, _ = problem.evaluate({}, batch)
        yield output, send_back


class _Tap(torch.autograd.Function):
    """The identity. It makes its output depend on the anchor, and shows `see` the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, see: See) -> Tensor:
        ctx.see = see
        return output.clone()  # what follows may write in place; the original is let go

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = _Look.apply(gradients[0], ctx.see)
        return (gradient if ctx.needs_input_grad[0] else None), gradient.new_zeros(()), None


class _Look(torch.autograd.Function):
    """The identity. Under vmap `see` gets the plain tensor with the vmapped axis first."""

    @staticmethod
    def forward(gradient: Tensor, see: See) -> Tensor:
        see(gradient[None])
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: Tensor, see: See) -> tuple[Tensor, int]:
        gradient = gradient.movedim(in_dims[0], 0)
        see(gradient)
        return gradient, 0

"""What derivatives of a model are taken with: BatchNorm as one multiply-add, several vectors in one pass, and taps."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hap.execution.calling import hooked
from hap.scoring.base import ScoringContext


@contextmanager
def affine_norms(problem: ScoringContext) -> Iterator[None]:
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
    with hooked(problem.model, after=fixed, first=True):
        yield


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


# ---- taps ---------------------------------------------------------------------------------------------------


def backward(output: Tensor, anchor: Tensor, vectors: Tensor) -> None:
    """One backward pass for all vectors (K, *output.shape), past every tap on the anchor and no further."""
    vmapped(lambda v: torch.autograd.grad(output, anchor, v, retain_graph=True, materialize_grads=True), vectors)


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

"""BatchNorm in eval mode as what it is: one multiply-add."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hap.execution.module_hooks import hooked
from hap.scoring.base import ScoringContext


@contextmanager
def affine_norms(problem: ScoringContext) -> Iterator[None]:
    """Inside, BatchNorms that are not scored themselves are products with constants.

    Their graph keeps no activations and their backward is one product. The operator's own lays its gradients out anew
    under vmap, there and back, and its second derivative takes many kernels.
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

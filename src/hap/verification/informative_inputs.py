"""Inputs on which a comparison of two models can see what there is to see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.execution.calling import run
from hap.execution.model_outputs import float_outputs
from hap.utils.plain_mapping import as_dict


def informative_example(model: nn.Module, example: Any) -> Any:
    """The example with noise in place of every real tensor that is constant, if the model's outputs are finite then.

    The noise is the same at every call, and of the sign of the constant.
    """
    leaves, structure = pytree.tree_flatten(as_dict(example))
    random = torch.Generator().manual_seed(0)
    for place in [i for i, x in enumerate(leaves) if _constant(x)]:
        noisy = [*leaves]
        noisy[place] = _noise_like(leaves[place], random)
        leaves = noisy if _finite(model, pytree.tree_unflatten(noisy, structure)) else leaves
    return pytree.tree_unflatten(leaves, structure)


def _constant(x: Any) -> bool:
    several = isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1
    return several and bool((x == x.flatten()[0]).all())


def _noise_like(x: Tensor, random: torch.Generator) -> Tensor:
    value = float(x.flatten()[0])
    noise = value * (0.5 + torch.rand(x.shape, generator=random)) if value else torch.randn(x.shape, generator=random)
    return noise.to(x)


def _finite(model: nn.Module, example: Any) -> bool:
    try:
        return all(bool(x.isfinite().all()) for x in float_outputs(run(model, example)))
    except Exception:  # a forward may refuse values for whatever reason
        return False

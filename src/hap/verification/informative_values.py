"""Inputs and weights with which a comparison of two models can see what there is to see.

Constant inputs, and weights that are almost zero, hide whatever comes before them or what they are made of.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.execution.calling import run
from hap.execution.model_outputs import float_outputs, largest
from hap.utils.plain_mapping import as_dict

ALMOST_ZERO = 0.1
"""Weights that could not even make outputs this many times as large as inputs are almost zero."""


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


def informative_weights(model: nn.Module, scales: Mapping[str, float] | None = None) -> dict[str, Tensor]:
    """Random values, the same at every call, for weights that are almost zero and for those that `scales` names.

    Almost zero may be a classifier that begins with zeros, or the scale of a branch. A scale says how many times as
    large as its inputs the outputs of a weight shall be.
    """
    tensors = {n: t.detach() for n, t in model.named_parameters() if t.is_floating_point() and t.numel()}
    wanted = {n: scale for n, scale in (scales or {}).items() if n in tensors}
    wanted |= {n: 1.0 for n, t in tensors.items() if n not in wanted and not n.endswith("bias") and _is_almost_zero(t)}
    random = torch.Generator().manual_seed(0)
    return {n: _drawn(tensors[n], scale, random) for n, scale in wanted.items()}


def _fans(tensor: Tensor) -> float:
    """About how many inputs go into an output; 1 for a vector, which scales."""
    return tensor.numel() / max(tensor.shape, default=1)


def _is_almost_zero(tensor: Tensor) -> bool:
    """Whether products with these weights are almost zero. The first row of a large tensor most often tells."""
    least = ALMOST_ZERO / _fans(tensor) ** 0.5
    return largest(tensor[:1] if tensor.ndim else tensor) < least and largest(tensor) < least


def _drawn(like: Tensor, scale: float, random: torch.Generator) -> Tensor:
    """Random weights that make outputs about `scale` times as large as inputs. Scales are positive."""
    values = scale / _fans(like) ** 0.5 * torch.randn(like.shape, generator=random)
    return (values.abs() if _fans(like) == 1 else values).to(like)

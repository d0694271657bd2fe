"""Second moments of what enters a layer, gathered in one pass over calibration inputs, and what to solve with them."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.execution.calling import call_arguments, copied, eval_mode, hooked
from hap.utils.plain_mapping import as_dict

RIDGE = 1e-6


def pairs(batches: Iterable[Any] | None, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """The (input, target) batches on a device; refuses anything else, and an empty iterable."""
    if batches is not None and not isinstance(batches, Iterable):
        raise HapError(
            f"batches is a {type(batches).__name__}; expected an iterable of (input, target), "
            "such as data.calibration(512)"
        )
    count = 0
    for batch in () if batches is None else batches:
        count += 1
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise HapError(f"a batch is a {type(batch).__name__}; expected a pair (input, target)")
        # autograd would not take a tensor that was made in inference mode, so that one is copied
        x, y = pytree.tree_map_only(
            Tensor, lambda t: t.to(device, copy=t.is_inference()), [as_dict(batch[0]), batch[1]]
        )
        yield x, y
    if not count:
        raise HapError("batches yields nothing; pass a list or a data loader with at least one (input, target)")


def patches(module: nn.Module, x: Tensor) -> Tensor:
    """What each output position of a layer sees: (positions, inputs * kernel area), in float64."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, x.shape[-1]).double()
    assert isinstance(module, nn.Conv2d) and not isinstance(module.padding, str)
    columns = F.unfold(x.double(), module.kernel_size, module.dilation, module.padding, module.stride)
    return columns.transpose(1, 2).flatten(0, 1)


def grams(model: nn.Module, names: Iterable[str], batches: Iterable[Any]) -> dict[str, Tensor]:
    """For each named convolution or linear layer the sum of x x^T over all positions, x as in `patches`."""
    sums: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = patches(module, args[0])
        sums[name] = sums[name].addmm_(rows.t(), rows) if name in sums else rows.t() @ rows

    with eval_mode(model), torch.no_grad(), hooked(model, before=[(n, partial(add, n)) for n in names]):
        for x, _ in pairs(batches, next(model.parameters()).device):
            args, kwargs = copied(call_arguments(x))
            model(*args, **kwargs)
    return sums


def regress(weight: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
    """The columns `keep` that best replace all of `weight` (rows, columns): W G[:, k] G[k, k]^-1, slightly damped.

    This is equation 10 of the paper with the layer's Gauss-Newton block: W_k + W_p G_pk G_kk^-1.
    """
    square = gram[keep][:, keep]
    damping = RIDGE * square.diagonal().mean().clamp_min(1e-30)  # all inputs may be zero; stay clear of underflow
    square = square + damping * torch.eye(len(keep), dtype=square.dtype, device=square.device)
    old = weight.double()
    right = gram[keep] @ old.t() + damping * old[:, keep].t()  # the damping pulls to the old weights
    return torch.linalg.solve(square, right).t()


Taken = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Rows of a convolution's weight that an implant computes, and the inputs that it reads; None for all inputs."""


def pointwise_fits(model: nn.Module, wanted: dict[str, Taken], batches: Iterable[Any]) -> dict[str, Tensor]:
    """Least-squares 1x1 kernels (rows, inputs) for the given rows of each convolution, from the inputs that stay."""
    sums = grams(model, wanted, batches)
    fits = {}
    for name, (rows, inputs) in wanted.items():
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        area = conv.kernel_size[0] * conv.kernel_size[1]
        tap = (conv.kernel_size[0] - 1) // 2 * conv.kernel_size[1] + (conv.kernel_size[1] - 1) // 2
        stay = torch.arange(conv.in_channels) if inputs is None else torch.tensor(inputs)
        weight = conv.weight.detach()[list(rows)].flatten(1)
        fits[name] = regress(weight, sums[name], (stay * area + tap).to(weight.device))
    return fits

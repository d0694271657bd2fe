"""Squared norms of per-sample weight gradients, row by row, from what a layer read and the gradient of its output.

With a the patches (samples, P, L) that the layer reads and g the gradient (K, samples, O, L) of its output, the
weight's gradient is g a^T. Its row norms come from g a^T itself, K O P L multiply-adds a sample, or as the diagonal of
g (a^T a) g^T with the Gram matrix of the patches, P L^2 + K O L^2: whichever is less. Groups of a convolution are
layers of their own side by side. Patches are made when they are needed, for some samples at a time, and dropped at
once: kept, those of a 3x3 kernel would be nine times the input.
"""

import copy
import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCHES = 2**28
"""Bytes of patches that are made at a time."""


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
    """rows (K, samples, O, L), patches (samples, groups, P, L) -> (K, samples, O)"""
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

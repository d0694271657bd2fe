"""Squared norms of per-sample weight gradients, row by row, from what a layer read and the gradient of its output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCHES = 2**28
"""Bytes of patches that are made at a time."""


@dataclass(frozen=True)
class RowNorms:
    """For one layer: the output's gradient (K, samples, *output) -> squared row norms (K, samples, units).

    With a the patches (samples, P, L) that the layer reads and g the gradient (K, samples, O, L) of its output, the
    weight's gradient is g a^T. Its row norms come from g a^T itself, K O P L multiply-adds a sample, or as the diagonal
    of g (a^T a) g^T with the Gram matrix of the patches, P L^2 + K O L^2: whichever is less. Groups of a convolution
    are layers of their own side by side. Patches are made when they are needed, for some samples at a time, and dropped
    at once: kept, those of a 3x3 kernel would be nine times the input.
    """

    module: nn.Module
    x: Tensor
    dim: int

    def __call__(self, gradient: Tensor) -> Tensor:
        if not (computes_as(self.module, nn.Conv2d) or computes_as(self.module, nn.Linear)):
            return torch.func.vmap(self._by_vmap)(gradient)
        rows, step = self._rows(gradient), max(PATCHES // max(self._patch_bytes(), 1), 1)
        pieces = zip(rows.split(step, dim=1), self.x.split(step), strict=True)
        return torch.cat([self._norms(rows, self._patches(x)) for rows, x in pieces], dim=1)

    def _norms(self, rows: Tensor, patches: Tensor) -> Tensor:
        """rows (K, samples, O, L), patches (samples, groups, P, L) -> (K, samples, O)"""
        count, groups, length = len(rows), patches.shape[1], patches.shape[3]
        rows = rows.unflatten(2, (groups, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)  # (samples, groups, K O, L)
        if _gram_is_cheaper(rows.shape[2], patches.shape[2], length):
            norms = ((rows @ (patches.transpose(2, 3) @ patches)) * rows).sum(-1)
        else:
            norms = (rows @ patches.transpose(2, 3)).square_().sum(-1)
        return norms.unflatten(2, (count, -1)).permute(2, 0, 1, 3).flatten(2)

    def _patch_bytes(self) -> int:
        """What the patches of one sample take, about."""
        m = self.module
        if not isinstance(m, nn.Conv2d) or _is_pointwise(m):
            return 0
        area = m.kernel_size[0] * m.kernel_size[1]
        return self.x[:1].nbytes * area // (m.stride[0] * m.stride[1])

    def _rows(self, gradient: Tensor) -> Tensor:
        """(K, samples, O, L)"""
        if isinstance(self.module, nn.Linear):
            return gradient.reshape(*gradient.shape[:2], -1, gradient.shape[-1]).transpose(2, 3)
        return gradient.flatten(3)

    def _patches(self, x: Tensor) -> Tensor:
        """What each position of the output reads: (samples, groups, P, L)."""
        m = self.module
        if not isinstance(m, nn.Conv2d):
            return x.reshape(len(x), 1, -1, x.shape[-1]).transpose(2, 3)
        if _is_pointwise(m):
            columns = x[:, :, :: m.stride[0], :: m.stride[1]].flatten(2)
        else:
            x = F.pad(
                x, m._reversed_padding_repeated_twice, "constant" if m.padding_mode == "zeros" else m.padding_mode
            )
            columns = _unfolded(x, m)
        return columns.unflatten(1, (m.groups, -1))

    def _by_vmap(self, gradient: Tensor) -> Tensor:
        """Any layer: the vector-Jacobian product in its weight, sample by sample."""
        assert isinstance(self.module.weight, Tensor)
        weight, bare = self.module.weight.detach(), _bare(self.module)

        def one(x: Tensor, g: Tensor) -> Tensor:
            def forward(w: Tensor) -> Tensor:
                return torch.func.functional_call(bare, {"weight": w}, (x[None],))[0]

            (row,) = torch.func.vjp(forward, weight)[1](g)
            return row.square().sum([d for d in range(row.ndim) if d != self.dim])

        return torch.func.vmap(one)(self.x, gradient)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of a kind and has not changed what that kind computes."""
    parts = ("forward", "_conv_forward")
    return isinstance(module, kind) and all(getattr(type(module), p, None) is getattr(kind, p, None) for p in parts)


def _gram_is_cheaper(rows: int, patch: int, length: int) -> bool:
    return patch * length + rows * length < rows * patch


def _unfolded(x: Tensor, module: nn.Conv2d) -> Tensor:
    """As F.unfold without padding, which on a GPU starts a kernel for every sample. This is one copy."""
    count, channels, *sides = x.shape
    down, right = x.stride()[2:]
    kernel, dilation, stride = module.kernel_size, module.dilation, module.stride
    length = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in zip(sides, kernel, dilation, stride, strict=True)]
    view = x.as_strided(
        (count, channels, *kernel, *length),
        (*x.stride()[:2], down * dilation[0], right * dilation[1], down * stride[0], right * stride[1]),
    )
    return view.reshape(count, channels * kernel[0] * kernel[1], -1)


def _is_pointwise(module: nn.Conv2d) -> bool:
    return module.kernel_size == (1, 1) and module.padding in ((0, 0), "valid", "same")


def _bare(module: nn.Module) -> nn.Module:
    """The layer without its hooks."""
    bare = module.__class__.__new__(module.__class__)
    bare.__dict__ = module.__dict__.copy()
    bare._forward_hooks, bare._forward_pre_hooks = (
        type(module._forward_hooks)(),
        type(module._forward_pre_hooks)(),
    )
    return bare

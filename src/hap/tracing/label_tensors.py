"""Label tensors: one integer per position of an activation, with size 1 along axes where labels do not vary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hap.groups.types import Ints


def unlabelled(value: Any) -> Any:
    """The labels of a result that is never cut: zeros, of size 1 along every axis; a list of them for several."""
    if isinstance(value, list | tuple):
        return [unlabelled(v) for v in value]
    return zeros(value.ndim) if isinstance(value, Tensor) else None


def zeros(ndim: int) -> Tensor:
    """The labels of a tensor with so many axes that is never cut."""
    return torch.zeros([1] * ndim, dtype=torch.int64)


def varies(labels: Tensor) -> bool:
    """Whether any label here could still be removed."""
    return bool((labels != 0).any())


def compress(labels: Tensor) -> Tensor:
    """Size 1 along every axis where the labels do not vary. Axes that were merely expanded are told by their stride."""
    if not labels.numel():
        return labels
    for dim in (d for d, size in enumerate(labels.shape) if size > 1 and labels.stride(d) == 0):
        labels = labels.narrow(dim, 0, 1)
    for dim in (d for d, size in enumerate(labels.shape) if size > 1):
        alike = torch.equal(labels.select(dim, 0), labels.select(dim, 1))  # which most often tells
        if alike and bool((labels == labels.narrow(dim, 0, 1)).all()):
            labels = labels.narrow(dim, 0, 1)
    return labels


def aligned(labels: Tensor, ndim: int) -> Tensor:
    """Labels with axes of size 1 in front, so that there are `ndim` axes."""
    return labels.reshape((1,) * (ndim - labels.ndim) + tuple(labels.shape))


def labels_on_axis(labels: Ints, ndim: int, dim: int) -> Tensor:
    """The labels of a tensor with `ndim` axes in which index i of axis `dim` has labels[i]."""
    return torch.from_numpy(labels).view([-1 if d == dim % ndim else 1 for d in range(ndim)])


def long_axes(shape: tuple[int, ...]) -> list[int]:
    """The axes of a length above 1."""
    return [d for d, size in enumerate(shape) if size > 1]


def same_along(grid: Ints, dims: list[int]) -> bool:
    """Whether the entries do not change along these axes."""
    return all(np.array_equal(grid, np.broadcast_to(grid.take([0], d), grid.shape)) for d in dims)

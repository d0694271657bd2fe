"""Labels of all parameter axes, what is known of their fates, and tensors of labels.

A label tensor has one integer per position of an activation, with size 1 along axes where labels do not vary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hap.groups.components import components, distinct
from hap.groups.types import Frozen, Ints, OutputScatter


@dataclass(frozen=True)
class Undecided:
    """What becomes of `others` depends on whether `labels` come to differ along axes `dims`."""

    labels: Ints
    others: Ints
    dims: list[int]


@dataclass(frozen=True)
class RectangularTensor:
    """A tensor that `module` reshapes; `part` is its number where a tensor is split."""

    module: str
    labels: Tensor
    part: int | None


class LabelStore:
    """All labels of one model. Two graphs of the same model may share a store.

    Labels are the integers below `count`; label 0 is never removed. `axes` has the labels of parameter axes and `roles`
    says what a weight does along each: "out" computes units, "in" reads them, "free" goes along. `bonds` are pairs of
    labels with one fate, as two rows. `zeros` share the fate of label 0. `causes` are labels that are frozen and `held`
    labels that stay as many as they are, both with the reason. `streams` join branches in `union` coupling. Operands
    that are `partial`, `constant` positions and tensors that stay `rectangular` are decided on when all else is known:
    see `classes_of_labels`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], trainable: frozenset[str]):
        self.shapes, self.trainable = shapes, trainable
        self.count = 1
        self.axes: dict[tuple[str, int], Ints] = {}
        self.roles: dict[tuple[str, int], str] = {}
        self.bonds: list[Ints] = []
        self.zeros: list[Ints] = []
        self.causes: list[tuple[Ints, Frozen]] = []
        self.held: list[tuple[Ints, Frozen]] = []
        self.streams: list[OutputScatter] = []
        self.partial: list[Undecided] = []
        self.constant: list[Undecided] = []
        self.rectangular: list[RectangularTensor] = []

    def fresh(self, count: int) -> Ints:
        """So many labels that nothing has yet."""
        self.count += count
        return np.arange(self.count - count, self.count)

    def axis(self, parameter: str, dim: int, role: str = "free") -> Ints:
        """The labels of a parameter axis, made on first use."""
        key = (parameter, dim)
        if key not in self.axes:
            self.axes[key] = self.fresh(self.shapes[parameter][dim])
            self.roles[key] = "free"
        if role != "free" and self._may_have(parameter, role):
            self.roles[key] = role
        return self.axes[key]

    def tie(self, parameter: str, dim: int, labels: Ints, role: str) -> None:
        """Index i of this parameter axis shares the fate of labels[i]."""
        key = (parameter, dim)
        if key in self.axes:
            self.join(self.axes[key], labels)
        self.axes.setdefault(key, labels)
        self.roles.setdefault(key, role if self._may_have(parameter, role) else "free")

    def _may_have(self, parameter: str, role: str) -> bool:
        """A fixed filter in a buffer computes, but owns no unit."""
        return role != "out" or parameter in self.trainable

    def join(self, a: Ints, b: Ints) -> None:
        """These labels share one fate, position by position; the arrays are broadcast."""
        pairs = np.stack(np.broadcast_arrays(a, b)).reshape(2, -1)
        pairs = pairs[:, pairs[0] != pairs[1]]
        with_zero = (pairs == 0).any(axis=0)
        self.bonds.append(pairs[:, ~with_zero])
        self.zeros.append(pairs[:, with_zero].max(axis=0))

    def freeze(self, labels: Tensor | Ints, what: str, why: str) -> None:
        """None of these is ever removed. `print(groups)` says what they belong to and why."""
        flat = distinct(labels)
        if (flat != 0).any():
            self.causes.append((flat[flat != 0], Frozen(what, why)))
            self.zeros.append(flat)

    def hold(self, labels: Tensor | Ints, what: str, why: str) -> None:
        """These stay as many as they are: zeros stand in for those that go if they are heads, others are frozen."""
        self.held.append((distinct(labels), Frozen(what, why)))

    def of_parameter(self, name: str, looked_up: int | None = None) -> Tensor:
        """A vector (up to axes of length 1, or one that is `looked_up` along) has labels of its own; a matrix that is
        used freely is not cut at all."""
        shape = self.shapes[name]
        long = long_axes(shape)
        if len(own := [d for d in long if d != looked_up]) == 1:
            return labels_on_axis(self.axis(name, own[0]), len(shape), own[0])
        for d in long:
            self.tie(name, d, np.zeros(shape[d], dtype=np.int64), "free")
        return zeros(len(shape))

    def bonded(self) -> Ints:
        """For each label the smallest one that shares its fate, whether or not they are frozen."""
        return components(self.count, *np.concatenate([np.zeros((2, 0), np.int64), *self.bonds], axis=1))

    def computed(self) -> list[Ints]:
        """The labels that layers compute."""
        return [x for key, x in self.axes.items() if self.roles[key] == "out"] + [s.wide for s in self.streams]


# ---- tensors of labels ----------------------------------------------------------------------------------------------


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
    for dim in long_axes(labels.shape):
        first = labels.narrow(dim, 0, 1)
        labels = first if bool((labels == first).all()) else labels
    return labels


def labels_on_axis(labels: Ints, ndim: int, dim: int) -> Tensor:
    """The labels of a tensor with `ndim` axes in which index i of axis `dim` has labels[i]."""
    return torch.from_numpy(labels).view([-1 if d == dim % ndim else 1 for d in range(ndim)])


def long_axes(shape: tuple[int, ...]) -> list[int]:
    """The axes of a length above 1."""
    return [d for d, size in enumerate(shape) if size > 1]


def varying_axes(grid: Ints) -> set[int]:
    """The axes along which the entries change."""
    return {d for d in long_axes(grid.shape) if (grid != grid.take([0], d)).any()}


def concatenated(arrays: list[Ints]) -> Ints:
    """All of these in a row, also if there are none."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])

"""LabelStore: the label of each index of each parameter axis, and which labels share one fate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hap.groups.components import distinct, merged
from hap.groups.types import Frozen, Ints, OutputScatter
from hap.tracing.label_tensors import labels_on_axis, long_axes, zeros


@dataclass(frozen=True)
class PartialOperand:
    """`operand` lacks some of the axes along which `labels` vary; it has those in `dims`."""

    labels: Ints
    operand: Ints
    dims: list[int]


@dataclass(frozen=True)
class ConstantPosition:
    """A position along axis `dim` of `labels` that the code names; `passed` are the labels it is counted past."""

    labels: Ints
    passed: Ints
    dim: int


@dataclass(frozen=True)
class Reshaped:
    """A tensor that `module` reshapes; `part` is its number where a tensor is split."""

    module: str
    labels: Tensor
    part: int | None


class LabelStore:
    """All labels of one model. Two graphs of the same model may share a store.

    Labels are the integers below `count`; label 0 is never removed. `axes` has the labels of parameter axes and `roles`
    says what a weight does along each: "out" computes units, "in" reads them, "free" goes along. `bonds` are pairs of
    labels with one fate, as two rows, and `joined` what those before came to: see `bonded`. `zeros` share the fate of
    label 0. `causes` are labels that are frozen and `held` labels that stay as many as they are, both with the reason.
    `streams` join branches in `union` coupling. What is `partial`, `constant` or `reshaped` is decided on when all else
    is known: see `settle`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], trainable: frozenset[str]):
        self.shapes, self.trainable = shapes, trainable
        self.count = 1
        self.axes: dict[tuple[str, int], Ints] = {}
        self.roles: dict[tuple[str, int], str] = {}
        self.joined: Ints = np.arange(1)
        self.bonds: list[Ints] = []
        self.zeros: list[Ints] = []
        self.causes: list[tuple[Ints, Frozen]] = []
        self.held: list[tuple[Ints, Frozen]] = []
        self.streams: list[OutputScatter] = []
        self.partial: list[PartialOperand] = []
        self.constant: list[ConstantPosition] = []
        self.reshaped: list[Reshaped] = []

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

    def of_parameter(self, name: str) -> Tensor:
        """A vector (up to axes of length 1) has labels of its own; a matrix that is used freely is not cut at all."""
        shape = self.shapes[name]
        long = long_axes(shape)
        if len(long) == 1:
            return labels_on_axis(self.axis(name, long[0]), len(shape), long[0])
        for d in long:
            self.tie(name, d, np.zeros(shape[d], dtype=np.int64), "free")
        return zeros(len(shape))

    def bonded(self) -> Ints:
        """For each label the smallest one that shares its fate, whether or not they are frozen."""
        known = np.append(self.joined, np.arange(len(self.joined), self.count))
        self.joined = merged(known, *np.concatenate([np.zeros((2, 0), np.int64), *self.bonds], axis=1))
        self.bonds = []
        return self.joined

    def computed(self) -> list[Ints]:
        """The labels that layers compute."""
        return [x for key, x in self.axes.items() if self.roles[key] == "out"] + [s.wide for s in self.streams]

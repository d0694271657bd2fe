"""Cost: parameters and multiply-adds, counted on a running model and predicted for a plan. The two agree exactly."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hap.execution.calling import call_arguments, call_with, copied, eval_mode
from hap.groups.groups import Groups
from hap.groups.types import ActivationMacs, Bools, Ints, WeightMacs
from hap.implants import Implant
from hap.planning.mac_counter import Counter


@dataclass(frozen=True)
class Cost:
    """`params`: trainable and frozen parameters; `macs`: multiply-adds on the example; `channels`: units left;
    `activations`: values that convolutions, linear and recurrent layers write (0 in plans of old files)."""

    params: int
    macs: int
    channels: int
    activations: int = 0


@dataclass(frozen=True)
class Count:
    """What a model costs on an example.

    `macs` counts one per multiply-add of convolutions, linear and recurrent layers, matrix products and attention, for
    the whole example (its batch included). `by_module` gives macs by qualified name; `uncounted` the operators that ran
    without being counted, with how often.
    """

    params: int
    macs: int
    by_module: dict[str, int]
    uncounted: dict[str, int]


def cost(model: nn.Module, example: Any) -> Count:
    """Count parameters and multiply-adds by running the model once on the example.

    >>> hap.cost(nn.Linear(4, 3), torch.randn(2, 4)).macs
    24

    Arguments: `example` is a tensor, a tuple of arguments or a dict of named ones.
    Returns: a `Count`, which also says what it did not count.
    """
    counter = Counter()
    args, kwargs = copied(call_arguments(example))
    # the counter hangs hooks on what requires a gradient, and fused kernels hide what they multiply from it
    detached = {n: p.detach() for n, p in model.named_parameters()}
    with counter, sdpa_kernel(SDPBackend.MATH), eval_mode(model), torch.no_grad():
        call_with(model, detached, args, kwargs)
    root = type(model).__name__
    by_module = {
        name.removeprefix(f"{root}."): sum(flops.values()) // 2
        for name, flops in counter.get_flop_counts().items()
        if name not in ("Global", root)
    }
    params = sum(p.numel() for p in model.parameters())
    return Count(params, counter.get_total_flops() // 2, by_module, counter.uncounted)


class CostModel:
    """The cost of any choice of units, from the traced sizes alone: every tensor is a product of axis lengths."""

    def __init__(self, groups: Groups, implant: Implant | None = None):
        self.groups, self.implant = groups, implant
        self._implantable = {} if implant is None else implant.layers(groups)
        different = {axis.tobytes(): axis for axis in groups.axes.values()}  # most are those of several tensors
        number = {content: i for i, content in enumerate(different)}
        self._place = {key: number[axis.tobytes()] for key, axis in groups.axes.items()}
        self._classes = np.concatenate([np.zeros(1, np.int64), *different.values()])
        self._starts = np.cumsum([1, *map(len, different.values())])[:-1]
        self._units = np.concatenate([np.zeros(0, np.int64), *(g.classes for g in groups.values())])
        self._multiplied = self._per_class(groups.costs.activation_macs)
        self._written = self._per_class(groups.costs.written_values)
        uncut = [[s for d, s in enumerate(shape) if (n, d) not in groups.axes] for n, shape in groups.shapes.items()]
        self._fixed = np.array([np.prod(sizes, dtype=np.int64) for sizes in uncut], dtype=np.int64)
        one, dims = len(different), range(max(map(len, groups.shapes.values()), default=0))
        self._axes = np.array([[self._place.get((n, d), one) for n in groups.shapes] for d in dims], dtype=np.int64)
        self._trainable = np.array([name in groups.trainable for name in groups.shapes], dtype=bool)
        positions = dict.fromkeys(groups.shapes, 0)  # of each element of a tensor that layers multiply whole
        for term in groups.costs.weight_macs:
            positions[term.weight] += term.positions if term.part is None else 0
        self._positions = np.array(list(positions.values()), dtype=np.int64)
        self._parts = [term for term in groups.costs.weight_macs if term.part is not None]

    def __call__(self, kept: Bools, implanted: Bools) -> Cost:
        """`kept` and `implanted` mark classes; an implanted class is kept too."""
        live = self.groups.alive(kept, implanted)
        lengths = self._lengths(live)
        sizes = self._fixed * np.append(lengths, 1)[self._axes].prod(axis=0)  # of each tensor, in values
        params = int(sizes[self._trainable].sum())
        total = self.groups.costs.fixed_macs + int(self._positions @ sizes)
        total += sum(term.positions * self._part(term, live) for term in self._parts)
        total += int(live @ self._multiplied)
        written = int(live @ self._written)
        if self._implantable and implanted.any():
            more = self._implants(self._lengths(implanted), lengths)
            params, total, written = (sum(column) for column in zip((params, total, written), *more, strict=True))
        return Cost(params, total, int(live[self._units].sum()), written)

    def _per_class(self, products: Iterable[ActivationMacs]) -> Ints:
        """How many positions in all depend on each class."""
        positions = np.zeros(self.groups.classes, dtype=np.int64)
        for product in products:
            np.add.at(positions, product.classes.ravel(), product.positions)
        return positions

    def _part(self, term: WeightMacs, live: Bools) -> int:
        size = 1
        for dim, index in term.part or ():
            classes = self.groups.axes.get((term.weight, dim))
            size *= len(index) if classes is None else int(live[classes[index]].sum())
        return size

    def _lengths(self, marked: Bools) -> Ints:
        """How many marked classes stand on each of the different axes."""
        return np.add.reduceat(marked[self._classes], self._starts, dtype=np.int64)

    def _implants(self, implanted: Ints, lengths: Ints) -> Iterator[tuple[int, int, int]]:
        """What each implant adds, less the rows that it replaces: parameters, multiply-adds, values written."""
        assert self.implant is not None
        for weight, geometry in self._implantable.items():
            if rows := int(implanted[self._place[weight, 0]]):
                inputs = int(lengths[self._place[weight, 1]])
                replaced = rows * inputs * geometry.area
                params, macs, values = self.implant.cost(geometry, inputs, rows)
                yield params - replaced, macs - replaced * geometry.positions, values

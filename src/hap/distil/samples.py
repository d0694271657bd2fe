"""Calibration inputs as mini-batches drawn at random, and what the dense model returns for them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hap.execution.calibration_inputs import FOLDS, LARGEST_INPUT, held_out, sample_count, signature

LARGEST_MEMORY = 2**28
"""So many elements of the dense model's outputs are kept at most."""


@dataclass(frozen=True)
class Pool:
    """Samples of one shape, one after the other; or one batch as it was given, whose samples cannot be told apart."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    count: int
    whole: bool

    def take(self, index: Tensor) -> Any:
        """The input that some samples make."""
        picked = [t[index.to(t.device)] if isinstance(t, Tensor) and not self.whole else t for t in self.leaves]
        return pytree.tree_unflatten(picked, self.spec)

    def parts(self, index: Tensor, size: int) -> list[Tensor]:
        """Samples in mini-batches of about `size`, fewer where they are large."""
        elements = sum(t.numel() for t in self.leaves if isinstance(t, Tensor)) // self.count
        size = max(1, min(size, LARGEST_INPUT // max(1, elements)))
        return list(index.tensor_split(max(1, round(len(index) / size))))


@dataclass(frozen=True)
class Batch:
    """Some samples of a pool."""

    pool: int
    index: Tensor
    input: Any


class Samples:
    """All calibration inputs: those to learn from, and those that are held out. Fewer than four serve as both."""

    def __init__(self, inputs: Iterable[Any], size: int):
        self.size, self.pools = size, list[Pool]()
        numbers: list[Tensor] = []
        before = 0
        kinds: dict[str, list[Any]] = {}
        for x in inputs:
            count = sample_count(x)
            key = f"whole {len(kinds)}" if count is None else signature(x, of_sample=True)
            kinds.setdefault(key, []).append((x, before))
            before += count or (count is None)
        for key, given in kinds.items():
            self.pools.append(_joined([x for x, _ in given], whole=key.startswith("whole")))
            counts = [sample_count(x) or 1 for x, _ in given]
            numbers.append(torch.cat([start + torch.arange(n) for n, (_, start) in zip(counts, given, strict=True)]))
        held = [
            held_out(number) if before >= FOLDS else torch.ones_like(number, dtype=torch.bool) for number in numbers
        ]
        self.held = [mask.nonzero().flatten() for mask in held]
        self.fitted = [(~mask if before >= FOLDS else mask).nonzero().flatten() for mask in held]

    def held_batches(self) -> Iterator[Batch]:
        """All samples that are held out, as they are."""
        for number, (pool, index) in enumerate(zip(self.pools, self.held, strict=True)):
            for part in pool.parts(index, self.size) if len(index) else ():
                yield Batch(number, part, pool.take(part))

    def without_the_last(self, batch: Batch) -> Batch | None:
        """A batch without its last sample; None if none would be left, or samples cannot be told apart."""
        pool, index = self.pools[batch.pool], batch.index[:-1]
        return None if pool.whole or not len(index) else Batch(batch.pool, index, pool.take(index))

    def fitted_batches(self) -> Iterator[Batch]:
        """Mini-batches of the other samples without end, drawn by torch's own generator: all, and all again."""
        while True:
            drawn: list[tuple[int, Tensor]] = []
            for number, (pool, index) in enumerate(zip(self.pools, self.fitted, strict=True)):
                if len(index):
                    order = index[torch.randperm(len(index))]
                    drawn += [(number, part) for part in pool.parts(order, self.size)]
            for place in torch.randperm(len(drawn)).tolist():
                number, part = drawn[place]
                yield Batch(number, part, self.pools[number].take(part))


def _joined(inputs: list[Any], whole: bool) -> Pool:
    leaves, spec = pytree.tree_flatten(inputs[0])
    if whole:
        return Pool(leaves, spec, 1, whole=True)
    columns = zip(*(pytree.tree_leaves(x) for x in inputs), strict=True)
    made = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return Pool(made, spec, sum(sample_count(x) or 0 for x in inputs), whole=False)


class Wanted:
    """What the dense model returns for samples as they were given, computed once where memory allows.

    `rows` are the samples of each pool that it will be asked for.
    """

    def __init__(self, compute: Callable[[Any], list[Tensor]], samples: Samples, rows: Sequence[Tensor]):
        self.compute, self.samples = compute, samples
        self.place = [torch.full((pool.count,), -1) for pool in samples.pools]
        for place, row in zip(self.place, rows, strict=True):
            place[row] = torch.arange(len(row))
        self.known = [torch.zeros(len(row), dtype=torch.bool) for row in rows]
        self.kept: list[list[Tensor] | None] = [None for _ in samples.pools]
        self.room = LARGEST_MEMORY

    def of(self, batch: Batch) -> list[Tensor]:
        kept, known, place = self.kept[batch.pool], self.known[batch.pool], self.place[batch.pool][batch.index]
        if kept and bool(known[place].all()):
            return [t[place.to(t.device)] for t in kept]
        found = self.compute(batch.input)
        if kept is None:
            kept = self.kept[batch.pool] = self._space(found, batch)
        if kept and all(len(values) == len(place) for values in found):
            for space, values in zip(kept, found, strict=True):
                space[place.to(space.device)] = values
            known[place] = True
        return found

    def _space(self, found: list[Tensor], batch: Batch) -> list[Tensor]:
        """Where the outputs for all rows of a pool will stand; nothing if that is too much, or if they do not lie one
        sample after the other."""
        fewer = self.samples.without_the_last(batch)
        count = len(self.known[batch.pool])
        needed = count * sum(t.numel() for t in found) // len(batch.index)
        if fewer is None or needed > self.room:
            return []
        if not all(has_samples_first(*pair) for pair in zip(found, self.compute(fewer.input), strict=True)):
            return []
        self.room -= needed
        return [t.new_empty(count, *t.shape[1:]) for t in found]


def has_samples_first(values: Tensor, fewer: Tensor) -> bool:
    """Whether the first axis is that of the samples: `fewer` are the values without the last sample."""
    return 0 < values.ndim == fewer.ndim and len(fewer) == len(values) - 1 and values.shape[1:] == fewer.shape[1:]

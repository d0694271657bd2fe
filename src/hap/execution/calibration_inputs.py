"""Calibration inputs as samples: how many a batch has, which of them are held out, which can be computed together."""

import itertools
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hap.execution.calling import call_arguments

FOLDS = 4
"""One sample of so many is held out."""
LARGEST_INPUT = 2**22
"""Samples that are run at once have about so many elements at most."""
LARGEST_BATCH = 128


def held_out(samples: Tensor) -> Tensor:
    """Which of these samples, counted over all batches, are held out."""
    return samples % FOLDS == FOLDS - 1


def split(x: Any) -> list[Any]:
    """A batch of many samples as several, of one size if possible, since each size takes a graph of its own."""
    samples = sample_count(x)
    if samples is None:
        return [x]
    leaves, spec = pytree.tree_flatten(x)
    elements = sum(t.numel() for t in leaves if isinstance(t, Tensor)) // samples
    at_once = max(FOLDS, min(LARGEST_BATCH, LARGEST_INPUT // max(1, elements)))
    fewest = -(-samples // at_once)
    count = next((n for n in range(fewest, 2 * fewest) if samples % n == 0), fewest)
    parts = [t.split(-(-samples // count)) if isinstance(t, Tensor) else itertools.repeat(t) for t in leaves]
    return [pytree.tree_unflatten(part, spec) for part in zip(*parts, strict=False)]


def sample_count(x: Any) -> int | None:
    """How many samples a batch has; None where its tensors do not agree on that."""
    sizes = {len(t) if t.ndim else None for t in pytree.tree_leaves(call_arguments(x)) if isinstance(t, Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def signature(x: Any, of_sample: bool = False) -> str:
    """What inputs of one graph have in common; `of_sample`: what samples have in common, whatever their number."""
    leaves, spec = pytree.tree_flatten(x)
    shapes = [(t.shape[of_sample:], t.dtype) if isinstance(t, Tensor) else t for t in leaves]
    return f"{spec} {shapes}"

"""What a batch and a loss are, and what is said where a criterion cannot work with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any]
BATCH_FIRST = (
    "This criterion looks at each sample by itself and expects batch first, (samples, tokens, ...), and samples that "
    "do not see each other. Wrap a model that has tokens first; for one that looks across its batch, use a criterion "
    "that takes a batch as a whole, such as Taylor."
)
DETACHED = (
    "the loss has no gradient, or none but zeros; this criterion needs one that autograd can follow from the weights "
    "on. Leave out what keeps it from that in the loss or the model, such as detach(), item(), no_grad() or "
    "inference_mode()"
)


def samples(batch: Batch) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    first = next((t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.ndim), None)
    return len(first) if first is not None else 1

"""Several processes, each with its share of the batches: sums over all of them, and nothing else.

Without torch.distributed, or with one process, these do nothing, so that there is one code path for both.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, in place. All processes must call it with the same shapes."""
    if processes() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def total(count: int, device: torch.device) -> int:
    """The sum of a number over all processes."""
    number = torch.tensor(count, device=device)
    sum_([number])
    return int(number)


def rank() -> int:
    return dist.get_rank() if processes() > 1 else 0

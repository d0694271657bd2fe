"""How much memory scoring may use, how much a graph holds, and going on in smaller pieces when it runs out."""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")

CPU_GRADIENTS = 128
"""Samples times vectors per backward pass on a CPU, where larger pieces leave the cache and gain nothing."""


def free_bytes(device: torch.device) -> int:
    """What the device could still hand out: for CUDA with what torch's allocator keeps for itself."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):  # not Linux: half of what the machine has
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def budget(device: torch.device) -> int:
    """Bytes that scoring may use on a device. A CPU's memory is shared with other programs: half is left to them."""
    return int((0.8 if device.type == "cuda" else 0.5) * free_bytes(device))


def at_once(device: torch.device, size: int, gradients: int) -> int:
    """How many fit that take so many bytes and backward passes each; at least one."""
    fitting = max(budget(device) // max(size, 1), 1)
    return fitting if device.type == "cuda" else min(fitting, max(CPU_GRADIENTS // gradients, 1))


@contextmanager
def held_by_graph(all_of_it: bool = False) -> Iterator[Callable[[], int]]:
    """Counts the bytes that a forward pass inside keeps for its backward pass, parameters left out; with `all_of_it`
    also what it lets go again, which is then held as well."""
    held: list[Callable[[], Tensor | None]] = []

    def alive() -> int:
        storages = [tensor.untyped_storage() for get in held if (tensor := get()) is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def keep(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # a result that its own operator saves would hold itself, and the whole graph, for ever
        if not isinstance(tensor, nn.Parameter):
            held.append((lambda: kept) if all_of_it else weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield alive


@dataclass
class Pieces:
    """Work done a piece at a time, at most `size` at once, and by halves of that once memory runs out."""

    size: int
    halve: bool = True

    def of(self, count: int, work: Callable[[slice], Result]) -> Iterator[tuple[slice, Result]]:
        """work(part) for consecutive parts of range(count). A part of one that does not fit is an error."""
        start = 0
        while start < count:
            part = slice(start, min(start + self.size, count))
            try:
                result = work(part)
            except torch.OutOfMemoryError:
                self.size = (part.stop - part.start) // 2
                if not (self.size and self.halve):
                    raise
                continue  # only here does the traceback let go of what the failed attempt held
            yield part, result
            start = part.stop

"""What work takes of a device: peaks of memory, seconds that wait for it, and precision that it does fast."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Use:
    """`seconds` until the device was done; `peak_memory`: bytes allocated at most, None where they are not counted."""

    seconds: float = 0.0
    peak_memory: int | None = None


@contextmanager
def use_of(device: torch.device) -> Iterator[Use]:
    """Seconds, and the most memory in use on a CUDA device, inside; what was allocated before counts."""
    use, cuda = Use(), device.type == "cuda"
    release(device)
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.monotonic()
    yield use
    if cuda:
        torch.cuda.synchronize(device)
        use.peak_memory = torch.cuda.max_memory_allocated(device)
    use.seconds = time.monotonic() - begun


def release(device: torch.device) -> None:
    """Hand back what nothing needs any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """TF32 for what runs in float32 on CUDA, such as scores."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

"""latency: how long a model takes on an example, measured."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hap.examples import call_arguments, evaluating


@dataclass(frozen=True)
class Latency:
    """Milliseconds per call: the median of `runs` calls, and the distance between their quartiles."""

    median: float
    spread: float
    runs: int
    threads: int
    device: str


def latency(model: nn.Module, example: Any, runs: int = 50, warmup: int = 10) -> Latency:
    """Time the model in eval mode on the example, where the model is. Compare such figures within one run only."""
    args, kwargs = call_arguments(example)
    device = next(iter(model.parameters())).device
    times = []
    with evaluating(model), torch.inference_mode():
        for i in range(warmup + runs):
            start = time.perf_counter()
            model(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if i >= warmup:
                times.append((time.perf_counter() - start) * 1e3)
    low, _, high = statistics.quantiles(times, n=4)
    return Latency(statistics.median(times), high - low, runs, torch.get_num_threads(), str(device))

"""Mean and standard error of samples that come one by one."""

from __future__ import annotations

import torch
from torch import Tensor


class Running:
    """Welford's sums over tensors of one shape."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0)
        self._squares = torch.zeros(0)

    def add(self, sample: Tensor) -> None:
        self.count += 1
        if self.count == 1:
            self.mean, self._squares = sample.clone(), torch.zeros_like(sample)
            return
        step = sample - self.mean
        self.mean += step / self.count
        self._squares += step * (sample - self.mean)

    def error(self) -> Tensor:
        """Of the mean, after two samples at least."""
        return (self._squares / (self.count - 1) / self.count).sqrt()

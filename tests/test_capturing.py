"""What happens around torch.export."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hap
from hap.capturing import start_autograd


def test_autograd_counts_the_devices_before_the_first_capture_of_a_gpu_build_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    export = torch.export.export
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "backward", lambda _: begun.append("autograd"))
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: begun.append("export") or export(*a, **k))
    start_autograd.cache_clear()
    try:
        for _ in range(2):
            hap.trace(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(2, 3))
    finally:
        start_autograd.cache_clear()
    assert begun[:2] == ["autograd", "export"] and begun.count("autograd") == 1


def test_without_gpus_in_sight_of_a_cpu_build_autograd_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.Tensor, "backward", lambda _: pytest.fail("autograd has begun"))
    start_autograd.cache_clear()
    try:
        assert (
            hap.trace(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(2, 3)).units == 8
        )
    finally:
        start_autograd.cache_clear()

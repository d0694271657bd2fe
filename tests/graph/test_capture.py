"""What happens around torch.export."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hap
from hap.graph.capture import capture, start_autograd


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


class Mixed(nn.Module):
    """A region under autocast, which is a graph inside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x).relu()
        return self.last(x.float())


def test_a_capture_is_that_of_torch_export_without_notes_on_the_source() -> None:
    model, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(2, 3)
    plain, ours = torch.export.export(model, (x,), strict=False), capture(model, x).program
    assert [(n.op, n.name, n.target) for n in ours.graph.nodes] == [(n.op, n.name, n.target) for n in plain.graph.nodes]
    assert [n.meta.get("nn_module_stack") for n in ours.graph.nodes] == [
        n.meta.get("nn_module_stack") for n in plain.graph.nodes
    ]
    torch.testing.assert_close(ours.module()(x), model(x))
    assert not any(n.stack_trace for n in ours.graph.nodes)
    again = torch.export.export(model, (x,), strict=False).graph
    assert any(n.stack_trace for n in again.nodes)


def test_a_region_inside_of_a_graph_is_captured() -> None:
    assert hap.trace(Mixed().eval(), torch.randn(2, 3)).units == 8


def test_no_mode_of_ours_is_left_after_a_capture_that_fails() -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0]

    modes, model = torch._C._len_torch_function_stack(), Chooses()
    with pytest.raises(hap.HapError, match="depends on tensor values"):
        capture(model, torch.randn(4))
    assert torch._C._len_torch_function_stack() == modes
    assert "forward" not in vars(model)

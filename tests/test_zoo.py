"""The sweep over foreign models: a record for each, a reason for each failure, nothing done twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import hap
from hap.experiments import zoo
from hap.experiments.zoo_models import HUGGING_FACE, build, suppress


def test_a_model_is_measured_and_counts_agree() -> None:
    record = zoo.measure("hap:resnet20", 0.5, export=True)
    assert max(record["exported"].values()) <= 1e-4
    assert record["verified"] and record["macs"][1] <= 0.5 * record["macs"][0]
    assert record["counted"] == [record["params"][1], record["macs"][1]]
    assert set(record["seconds"]) == {"export", "trace", "plan", "apply"}


class Picky(nn.Module):
    """Looks at values, as detectors do, so that only its two halves can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
        self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        features = self.backbone(x).flatten(2).transpose(1, 2)
        return [self.head(f[f.sum(-1) > 0]) for f in features]


def test_what_cannot_be_captured_is_pruned_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Picky().eval()
    monkeypatch.setattr(zoo, "build", lambda spec: (model, torch.randn(2, 3, 9, 9)))
    record = zoo.measure("picky", 0.5)
    assert record["verified"], record
    assert record["parts"] == ["backbone", "head"] and record["macs"][1] <= 0.5 * record["macs"][0]
    assert record["counted"] == [record["params"][1], record["macs"][1]]
    assert len(model.backbone[0].weight) < 16 or len(model.head[0].weight) < 32


def test_a_sweep_keeps_reasons_and_does_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pretend(spec: str, flops: float, seconds: float, tool: str = "hap") -> zoo.Record:
        asked.append((spec, tool))
        found = {"exported": {".pt2": 0.0}} if tool == "exported" else {}
        return {"model": spec, "flops": flops, "verified": spec == "hap:a", "why": "no such thing"} | found

    monkeypatch.setattr(zoo, "_in_process", pretend)
    monkeypatch.setattr(zoo, "_has_peer", lambda: False)
    out = tmp_path / "zoo.json"
    zoo.sweep(["hap:a", "hap:b"], out, say=lambda _: None)
    records = zoo.sweep(["hap:a", "hap:b", "hap:c"], out, say=lambda _: None)
    assert asked[:4] == [("hap:a", "hap"), ("hap:b", "hap"), ("hap:a", "exported"), ("hap:c", "hap")]
    assert len(asked) == 4  # what failed is not exported
    assert [r["verified"] for r in records] == [True, False, False]
    assert [r["model"] for r in json.loads(out.read_text())["models"]] == ["hap:a", "hap:b", "hap:c"]

    monkeypatch.setattr(zoo, "_has_peer", lambda: True)  # what is missing is the peer's half alone
    asked.clear()
    records = zoo.sweep(["hap:a"], out, say=lambda _: None)
    assert asked == [("hap:a", "torch_pruning")]
    assert records[0]["torch_pruning"] == {"verified": True, "why": "no such thing"}
    assert [r["model"] for r in json.loads(out.read_text())["models"]] == ["hap:a", "hap:b", "hap:c"]

    asked.clear()
    zoo.sweep(["hap:a", "hap:b"], out, retry=True, say=lambda _: None)
    assert asked == [("hap:b", "hap"), ("hap:b", "torch_pruning")]


def test_unknown_models_and_time_limits_are_reasons() -> None:
    with pytest.raises(hap.HapError, match="expected tv:NAME, timm:NAME, hf:NAME or hap:NAME"):
        build("nothing")
    with pytest.raises(hap.HapError, match="unknown model 'hf:nothing'; known are albert, "):
        build("hf:nothing")
    assert "took longer than 0 s" in zoo._in_process("hap:resnet20", 0.5, 0.01)["why"]
    assert "unknown model" in zoo._in_process("hap:nothing", 0.5, 60)["why"].lower()


def test_the_small_models_are_many() -> None:
    assert len(HUGGING_FACE) >= 24


def test_suppression_keeps_the_best_of_what_overlaps() -> None:
    from hap.experiments.zoo_models import import_torchvision

    import_torchvision()
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30], [0, 0, 9, 10]])
    assert suppress(boxes, torch.tensor([0.5, 0.9, 0.1, 0.7]), 0.5).tolist() == [1, 2]
    assert suppress(boxes, torch.tensor([0.5, 0.9, 0.1, 0.7]), 0.95).tolist() == [1, 3, 0, 2]

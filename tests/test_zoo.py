"""The sweep over foreign models: a record for each, a reason for each failure, nothing done twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hap
from hap.experiments import zoo


def test_a_model_is_measured_and_counts_agree() -> None:
    record = zoo.measure("hap:resnet20", 0.5)
    assert record["verified"] and record["macs"][1] <= 0.5 * record["macs"][0]
    assert record["counted"] == [record["params"][1], record["macs"][1]]
    assert set(record["seconds"]) == {"export", "trace", "plan", "apply"}


def test_a_sweep_keeps_reasons_and_does_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pretend(spec: str, flops: float, seconds: float) -> zoo.Record:
        asked.append(spec)
        return {"model": spec, "flops": flops, "verified": spec == "hap:a", "why": "no such thing"}

    monkeypatch.setattr(zoo, "_in_process", pretend)
    out = tmp_path / "zoo.json"
    zoo.sweep(["hap:a", "hap:b"], out, say=lambda _: None)
    records = zoo.sweep(["hap:a", "hap:b", "hap:c"], out, say=lambda _: None)
    assert asked == ["hap:a", "hap:b", "hap:c"]
    assert [r["verified"] for r in records] == [True, False, False]
    assert [r["model"] for r in json.loads(out.read_text())["models"]] == ["hap:a", "hap:b", "hap:c"]


def test_unknown_models_and_time_limits_are_reasons() -> None:
    with pytest.raises(hap.HapError, match="expected tv:NAME, timm:NAME or hap:NAME"):
        zoo.build("nothing")
    assert "took longer than 0 s" in zoo._in_process("hap:resnet20", 0.5, 0.01)["why"]
    assert "unknown model" in zoo._in_process("hap:nothing", 0.5, 60)["why"].lower()

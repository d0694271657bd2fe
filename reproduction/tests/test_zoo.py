"""The sweep over foreign models: a record for each, a reason for each failure, nothing done twice."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hap
from hap.cli import app
from hap.models import ModelInfo
from hap.models.cifar_resnet import CifarResNet
from hap_reproduction.zoo_sweep import ours, sweep
from hap_reproduction.zoo_sweep.clock import Clock, OutOfTime, reason
from hap_reproduction.zoo_sweep.models import HUGGING_FACE, Missing, build, suppress
from hap_reproduction.zoo_sweep.page import rendered
from hap_reproduction.zoo_sweep.peer import measure_peer
from hap_reproduction.zoo_sweep.summary import above_rows, equal, failures, family_rows, own_seconds, sentences, summary

ROOT = Path(__file__).parents[2]


def test_a_model_is_measured_and_counts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _checks(monkeypatch)
    shallow = ModelInfo("shallow", partial(CifarResNet, (1, 1, 1), (16, 24, 40)), input_shape=(3, 8, 8))
    monkeypatch.setitem(hap.models._ZOO, "shallow", shallow)
    pruned, both = ours.measure("hap:shallow", 0.5)
    assert asked == [{"everywhere": True}, {}, {}, {}]  # at all places once, beside what apply_ does
    assert pruned["verified"] and pruned["macs"][1] <= 0.5 * pruned["macs"][0]
    assert pruned["counted"] == [pruned["params"][1], pruned["macs"][1]]
    seconds = pruned["seconds"]
    assert set(seconds) == {"forward", "export", "trace", "score", "plan", "apply", "check"}
    assert 0 < seconds["check"] < seconds["apply"]
    assert own_seconds(pruned, 0.0) == sum(seconds[name] for name in ("trace", "score", "plan", "apply"))
    assert both.items() >= pruned.items() and set(both["export_seconds"]) == {"capture", ".pt2", ".onnx"}
    assert 0 < both["exported"][".onnx"] <= 1e-5 and both["exported"][".pt2"] <= 1e-5


def test_brief_models_are_measured_several_times_and_the_middle_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"export": 2.0, "trace": 0.1, "plan": 0.0, "apply": 0.0}
    tries = iter([{"verified": True, "seconds": took | {"apply": apply}} for apply in (0.5, 0.1, 0.3)])
    firsts = []

    def pruned(spec: str, flops: float, limit: float, first: bool = True) -> tuple[dict[str, Any], None, None]:
        firsts.append(first)
        return next(tries), None, None

    monkeypatch.setattr(ours, "_pruned", pruned)
    record = next(ours.measure("brief", 0.5))
    assert record["seconds"]["apply"] == 0.3 and [t["apply"] for t in record["trials"]] == [0.5, 0.1, 0.3]
    assert firsts == [True, False, False]  # one look at all places is enough
    tries = iter([{"verified": True, "seconds": took | {"apply": 9.0}}])
    assert "trials" not in next(ours.measure("long", 0.5))
    tries = iter([{"verified": True, "seconds": took}, {"verified": False, "why": "other values", "seconds": took}])
    assert next(ours.measure("unsteady", 0.5))["why"] == "other values"


def _checks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bool]]:
    """How the executed checks were asked for, each of which still takes place."""
    check, asked = ours.apply.verify_plan, []

    def noted(*args: Any, **named: bool) -> None:
        asked.append(named)
        check(*args, **named)

    monkeypatch.setattr(ours.apply, "verify_plan", noted)
    return asked


def test_export_is_not_judged_by_outputs_of_zeros() -> None:
    model, example = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    nn.init.zeros_(model[0].weight)
    assert ours.exported(model, example)[".pt2"] <= 1e-6
    assert model(example).std() > 0


def test_what_is_not_equal_after_export_has_a_gap_or_a_reason() -> None:
    ones = torch.ones(2)
    assert ours._gap([4 * ones], [3 * ones]) == 0.25
    with pytest.raises(hap.HapError, match="not finite"):
        ours._gap([ones], [ones * math.nan])
    with pytest.raises(hap.HapError, match="there are 1 outputs instead of 2"):
        ours._gap([ones, ones], [ones])


class Picky(nn.Module):
    """Looks at values, as detectors do, so that only its two halves can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
        self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        features = self.backbone(x).flatten(2).transpose(1, 2)
        return [self.head(f[f.sum(-1) > 0]) for f in features]


class Fickle(nn.Sequential):
    """Computes something else while it is captured, as models that make their masks only then do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return 2 * x if torch.compiler.is_exporting() else x


def test_a_model_that_computes_something_else_when_captured_does_so_dense_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(spec: str) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return Fickle(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(2, 4)

    monkeypatch.setattr(ours, "build", build)
    *_, record = ours.measure("fickle", 0.5)
    assert record["verified"] and record["exported"][".pt2"] == record["exported_dense"][".pt2"] == 1
    assert f"`fickle` to .pt2, pruned or dense: outputs differ by {1:.1e}" in failures([record | {"model": "fickle"}])


def test_what_cannot_be_captured_is_pruned_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Picky().eval()
    monkeypatch.setattr(ours, "build", lambda spec: (model, torch.randn(2, 3, 9, 9)))
    record = next(ours.measure("picky", 0.5))
    assert record["verified"], record
    assert record["parts"] == ["backbone", "head"] and record["macs"][1] <= 0.5 * record["macs"][0]
    assert record["counted"] == [record["params"][1], record["macs"][1]]
    assert len(model.backbone[0].weight) < 16 or len(model.head[0].weight) < 32


def _pretend(monkeypatch: pytest.MonkeyPatch, peer: bool = True) -> list[sweep.Job]:
    """Jobs that end at once, and the list of those that were asked for; only hap:a can be pruned."""
    asked: list[sweep.Job] = []

    async def pretend(worker: sweep.Worker, job: sweep.Job) -> sweep.Record:
        asked.append(job)
        if job[0] != "hap:a":
            return {"verified": False, "why": "no such thing"} | ({"seconds": 1.0} if job[1] == "torch_pruning" else {})
        seconds_of = {"export": 1.0, "trace": 2.0} if job[1] == "hap" else 5.0
        return {"verified": True, "seconds": seconds_of, "macs": [2, 1], "exported": {".pt2": 0.0, ".onnx": 0.0}}

    monkeypatch.setattr(sweep.Worker, "measure", pretend)
    monkeypatch.setattr(sweep, "_has_peer", lambda: peer)
    return asked


def _quiet(text: str) -> None:
    pass


def test_a_sweep_keeps_reasons_and_does_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, out = _pretend(monkeypatch, peer=False), tmp_path / "zoo.json"
    sweep.sweep(["hap:a", "hap:b"], out, say=_quiet)
    records = sweep.sweep(["hap:a", "hap:b", "hap:c"], out, revision="a tag", say=_quiet)["models"]
    assert asked == [("hap:a", "hap"), ("hap:b", "hap"), ("hap:c", "hap")]
    assert [r["verified"] for r in records] == [True, False, False]
    assert records[2]["revision"] == "a tag" != records[0]["revision"] and records[2]["why"] == "no such thing"
    assert [r["model"] for r in json.loads(out.read_text())["models"]] == ["hap:a", "hap:b", "hap:c"]

    asked = _pretend(monkeypatch)  # what is missing is the peer's half alone
    records = sweep.sweep(["hap:a"], out, say=_quiet)["models"]
    assert asked == [("hap:a", "torch_pruning")]
    assert records[0]["torch_pruning"]["seconds"] == 5 and [r["model"] for r in records] == ["hap:a", "hap:b", "hap:c"]

    asked.clear()
    sweep.sweep(["hap:a", "hap:b"], out, retry=True, say=_quiet)
    assert asked == [("hap:b", "hap"), ("hap:b", "torch_pruning")]

    asked.clear()
    records = sweep.sweep(["hap:a"], out, again=True, revision="newer", say=_quiet)["models"]
    assert asked == [("hap:a", "hap")] and [r["model"] for r in records] == ["hap:a", "hap:b"]
    assert records[0]["revision"] == "newer" and records[0]["torch_pruning"]["seconds"] == 5


def test_a_file_of_another_sweep_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch)
    sweep.sweep(["hap:a"], tmp_path / "zoo.json", say=_quiet)
    with pytest.raises(hap.HapError, match=r"of another sweep, with flops 0\.5 instead of 0\.4; choose another --out"):
        sweep.sweep(["hap:a"], tmp_path / "zoo.json", flops=0.4, say=_quiet)
    with pytest.raises(hap.HapError, match="with limit_seconds 120 instead of 60"):
        sweep.sweep(["hap:a"], tmp_path / "zoo.json", seconds=60, say=_quiet)


def test_a_sweep_that_cannot_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(hap.HapError, match="cannot write"):
        sweep.sweep(["hap:a"], tmp_path / "file" / "zoo.json", say=_quiet)


def test_processes_that_end_badly_are_records() -> None:
    died = sweep._ending(-9)
    assert (died, sweep._ending(3)) == ("the process was killed: SIGKILL", "the process ended with 3")
    said = ["loading", "terminate called", "Fatal Python error: Aborted", "Thread 1:", '  File "a.py", line 3 in f']
    assert sweep._ending(-6, said) == 'the process was killed: SIGABRT (terminate called) (File "a.py", line 3 in f)'
    assert sweep._ending(1, said[:1]) == "the process ended with 1 (loading)"
    assert sweep._cut_short({"verified": False}, died) == {"verified": False, "why": died}
    assert "seconds" not in sweep._cut_short({"verified": False, "steps_done": 3, "seconds": 7.0}, died)
    pruned = sweep._cut_short({"verified": True}, died)
    assert pruned["verified"] and pruned["exported"][".onnx"] == died and not equal(pruned)
    assert [sweep._parsed(line) for line in (b"hello", b"3", b'{"x')] == [{}] * 3


PRINTS = """
import os, sys, time
while line := sys.stdin.readline():
    print("noise")
    if "hap:hangs" in line:
        print('{"verified": true, "n": 1}', flush=True)
        time.sleep(60)
    if "hap:dies" in line:
        os._exit(3)
    print('{"verified": true, "n": 1}')
    print('{"verified": true, "n": 2}')
    print('{"ended": %d}' % (-9 if "hap:killed" in line else 0), flush=True)
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """The processes that a sweep starts, which are small ones that only print."""
    processes: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def starting(*command: str, **options: object) -> asyncio.subprocess.Process:
        processes.append(await start(sys.executable, "-c", PRINTS, **options))  # type: ignore[arg-type]
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    monkeypatch.setattr(sweep, "_has_peer", lambda: False)
    return processes


def test_a_process_serves_until_it_dies_and_then_another_does(started: list[asyncio.subprocess.Process]) -> None:
    async def ask() -> list[sweep.Record]:
        worker = sweep.Worker(0.5, 60, 16)
        records = [await worker.measure((f"hap:{name}", "hap")) for name in ("good", "killed", "dies", "good")]
        worker.patience = 0.2
        records.append(await worker.measure(("hap:hangs", "hap")))
        await worker.kill()
        return records

    good, killed, died, again, hung = asyncio.run(ask())
    assert good == again == {"verified": True, "n": 2}
    assert killed["verified"] and killed["exported"][".pt2"] == "the process was killed: SIGKILL"
    assert died == {"verified": False, "why": "the process ended with 3"}
    assert hung["n"] == 1 and hung["exported"][".onnx"] == "did not end in 0.2 s"
    assert [process.returncode for process in started] == [3, -signal.SIGKILL]


def test_interrupting_a_sweep_ends_its_processes(tmp_path: Path, started: list[asyncio.subprocess.Process]) -> None:
    """Ctrl-C in the middle: what was done is in the file, what was begun is killed."""

    def interrupt(text: str) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(["hap:good", "hap:hangs"], tmp_path / "zoo.json", say=interrupt)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert [r["model"] for r in json.loads((tmp_path / "zoo.json").read_text())["models"]] == ["hap:good"]


def test_a_process_does_one_model_after_another_and_ends_with_the_sweep() -> None:
    async def ask() -> tuple[list[sweep.Record], int]:
        worker = sweep.Worker(0.5, 60, 16)
        records = [await worker.measure((name, "hap")) for name in ("hap:nothing", "hap:digits_resnet")]
        worker.memory = 0.001
        records.append(await worker.measure(("hap:digits_resnet", "hap")))
        assert worker.process is not None and worker.process.stdin is not None
        worker.process.stdin.close()
        return records, await worker.process.wait()

    (unknown, pruned, large), code = asyncio.run(ask())
    assert not large["verified"] and large["why"] == "needed more memory than it may have"
    assert not unknown["verified"] and "unknown model" in unknown["why"].lower() and unknown["missing"]
    assert pruned["verified"] and equal(pruned) and pruned["peak_gib"] > 0 and code == 0


def test_unknown_models_and_time_limits_are_reasons() -> None:
    with pytest.raises(hap.HapError, match="expected tv:NAME, timm:NAME, hf:NAME or hap:NAME"):
        build("nothing")
    with pytest.raises(hap.HapError, match="unknown model 'hf:nothing'; known are albert, "):
        build("hf:nothing")
    with pytest.raises(Missing, match=r"timm .* has no model 'nothing'"):
        build("timm:nothing")
    with pytest.raises(Missing, match=r"torchvision .* has no model 'nothing'"):
        build("tv:nothing")
    (record,) = ours.measure("hap:digits_resnet", 0.5, limit=0.001)
    assert not record["verified"] and record["why"] == "took longer than 0.001 s"


def test_pruning_is_tried_where_torch_export_alone_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "captures", lambda *_: time.sleep(60))
    monkeypatch.setattr(ours, "_WAYS", {"in place": lambda *_: time.sleep(60)})
    (record,) = ours.measure("hap:digits_resnet", 0.5, limit=0.05)
    assert record["why"] == "took longer than 0.05 s"
    assert set(record["seconds"]) <= {"forward", "trace"} and record["seconds"]["trace"] >= 0.05


def test_what_cannot_be_built_costs_neither_tool_time(steps: type[Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: str = "") -> tuple[nn.Module, torch.Tensor]:
        raise ValueError("no weights")

    monkeypatch.setattr(ours, "build", broken)
    (own,) = ours.measure("hap:digits_resnet", 0.5)
    *_, peer = measure_peer(broken, 0.5)
    assert own["why"] == peer["why"] == "ValueError: no weights" and "missing" not in own
    found = summary([{"model": "hap:digits_resnet", "flops": 0.5} | own | {"torch_pruning": peer}], 120)
    assert found["seconds"]["both"]["hap"] == found["seconds"]["both"]["torch_pruning"] == 0
    for name in ("hap:nothing", "hf:nothing", "nothing"):
        with pytest.raises(Missing):
            build(name)


def test_a_clock_adds_up_and_stops_what_takes_too_long() -> None:
    clock = Clock(0.05)
    clock("sleep", lambda: time.sleep(0.01))
    with pytest.raises(OutOfTime, match=r"took longer than 0\.05 s"):
        clock("sleep", lambda: time.sleep(60))
    assert set(clock.seconds) == {"sleep"} and clock.total == clock.seconds["sleep"] > 0.04


def test_reasons_are_one_line_about_what_began_it() -> None:
    error = RuntimeError("step \x1b[96m3\x1b[0m of 3")
    error.__cause__ = ValueError("only\n4 axes")
    assert reason(error) == "ValueError: only 4 axes"


def test_the_version_of_a_package_without_metadata_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_folder_package.py").write_text('__version__ = "7.1"')
    monkeypatch.syspath_prepend(tmp_path)
    assert sweep._version("plain_folder_package") == "7.1"


# ---- torch-pruning, or what stands in for it ----------------------------------------------------------------


class Steps:
    """A pruner that takes a channel at each step, or as long as it is told."""

    wait = 0.0

    def __init__(self, model: nn.Sequential, *_: object, **__: object):
        self.model = model

    def step(self) -> None:
        time.sleep(self.wait)
        first, last = self.model
        first.weight, first.bias = nn.Parameter(first.weight[1:]), nn.Parameter(first.bias[1:])
        last.weight = nn.Parameter(last.weight[:, 1:])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> type[Steps]:
    peer = ModuleType("torch_pruning")
    peer.pruner = SimpleNamespace(BasePruner=Steps)  # type: ignore[attr-defined]
    peer.importance = SimpleNamespace(GroupMagnitudeImportance=lambda p: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_pruning", peer)
    return Steps


def _two_layers() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).eval(), torch.randn(2, 4)


def test_the_peer_steps_down_to_the_share(steps: type[Steps]) -> None:
    *_, record = measure_peer(_two_layers, 0.5)
    assert record["verified"] and record["steps"] == 10 and record["steps_done"] == 4 and "why" not in record
    assert record["macs"][1] * 2 == record["macs"][0]


def test_the_peer_out_of_time_counts_at_the_limit(steps: type[Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "wait", 60.0)
    *_, record = measure_peer(_two_layers, 0.5, limit=0.05)
    assert not record["verified"] and record["timed_out"] and record["seconds"] == 0.05 and record["steps_done"] == 0


# ---- what a sweep comes to ----------------------------------------------------------------------------------


def _record(spec: str, own: float, peer: float | None, gap: float | str = 0.0) -> sweep.Record:
    beside = {"verified": False, "why": "killed"}
    if peer is not None:
        beside = {"verified": True, "seconds": peer, "macs": [10, int(peer)]}
    return {
        "model": spec,
        "flops": 0.5,
        "verified": True,
        "seconds": {"export": 1.0, "trace": own},
        "torch_pruning": beside,
        "exported": {".pt2": 0.0, ".onnx": gap},
    }


def test_the_summary_counts_what_died_at_the_limit() -> None:
    records = [
        _record("tv:resnet18", 2.0, 4.0),
        _record("tv:fcn_resnet50", 70.0, None, "why"),
        _record("timm:b", 1.0, 6.0, 0.5),
        {"model": "hf:c", "verified": False, "why": "killed"},
        {"model": "timm:new", "verified": False, "why": "no such model", "missing": True},
    ]
    found = summary(records, 200)
    assert found["seconds"]["all"] == {"models": 4, "hap": 273.0}
    assert found["seconds"]["both"]["hap"] == 73 and found["seconds"]["both"]["torch_pruning"] == 210
    assert found["seconds"]["both_verified"]["hap"] == 3 and found["seconds"]["both_verified"]["torch_pruning"] == 10
    assert found["all"]["torch_pruning"] == {"models": 3, "verified": 2, "reached": 1}
    assert found["missing"] == ["timm:new"] and found["all"]["models"] == 4
    assert found["torch_pruning_timed_out"] == ["tv:fcn_resnet50"]
    assert found["times_export"]["above_3"] == {"tv:fcn_resnet50": {"times": 70, "seconds": 70, "export": 1}}
    assert found["times_export"]["without_check"]["models"] == 0  # records of before it was timed
    assert found["above_60_seconds"] == {"tv:fcn_resnet50": 70, "hf:c": 200}
    assert [row[:2] for row in family_rows(found)] == [
        ["torchvision classifiers", "1 of 1"],
        ["torchvision detectors and segmenters", "1 of 1"],
        ["timm", "1 of 1"],
        ["Hugging Face", "0 of 1"],
        ["all", "3 of 4"],
    ]
    assert found["all"]["exported"] == {"models": 3, "equal": 1, ".pt2": 3, ".onnx": 1}
    assert any("73 s, torch-pruning 210 s" in line for line in sentences(found))


def test_the_summary_says_what_is_slow_with_the_check_and_without() -> None:
    seconds = {"forward": 5.0, "export": 1.0, "trace": 2.0, "score": 9.0, "plan": 0.5, "apply": 1.5, "check": 1.2}
    records = [_record("tv:a", 2.0, None), _record("tv:b", 0.0, None) | {"seconds": seconds}]
    found = summary(records, 200)
    assert found["seconds"]["all"]["hap"] == 2 + 13
    assert found["times_export"]["within_3"] == 1
    assert found["times_export"]["without_check"] == {"models": 1, "median": 2.8, "within_3": 1}
    assert above_rows(found) == [["tv:b", "2.8", "4.0", "4.0", "1.2", "1.0", "5.0"]]
    said = " ".join(sentences(found))
    assert "take 3.0 times what torch.export takes alone in the median, and at most 3 times that on 1 of 2." in said
    assert "it is 2.8 times in the median, and at most 3 times on 1 of 1." in said


def test_the_summary_names_what_is_slow_even_without_the_check() -> None:
    """Finding parts counts, the scores do not."""
    seconds = {"forward": 5.0, "export": 1.0, "parts": 3.0, "trace": 2.0, "score": 9.0, "apply": 1.5, "check": 1.0}
    found = summary([_record("tv:b", 0.0, None) | {"seconds": seconds}], 200)
    assert found["times_export"]["above_3"]["tv:b"]["times_without_check"] == 5.5
    said = " ".join(sentences(found))
    assert "0 of 1; above are tv:b (5.5 times; one forward takes 5.0 s, torch.export 1.0 s)." in said


def test_the_page_is_what_the_result_file_says() -> None:
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "results" / "zoo.json").read_text(encoding="utf-8"))
    assert rendered(page, result) == page, "run python -m hap_reproduction.zoo_sweep.page"


def test_the_command_prints_every_model_and_the_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [_record("tv:a", 2.0, 4.0) | {"groups": 3, "macs": [10, 5], "params": [10, 4]}, {"model": "hf:b"}]
    records[1] |= {"verified": False, "why": "no such thing"}
    given: list[object] = []

    def pretend(specs: list[str], *_: object) -> sweep.Record:
        given.extend(specs)
        return {"models": records, "summary": summary(records, 120)}

    monkeypatch.setattr(sys.modules["hap_reproduction.cli.zoo"], "sweep", pretend)
    (tmp_path / "list.txt").write_text("# slowest first\ntv:a\n\nhf:b\n")
    found = CliRunner().invoke(app, ["zoo", str(tmp_path / "list.txt")])
    assert found.exit_code == 0 and given == ["tv:a", "hf:b"]
    for words in ("50.0%", "40.0% in 4.0 s", "no such thing", "1 of 2", "122 s of pruning for 2 models"):
        assert words in found.output


def test_the_small_models_are_many() -> None:
    assert len(HUGGING_FACE) >= 24


def test_suppression_keeps_the_best_of_what_overlaps() -> None:
    from hap_reproduction.zoo_sweep.models import import_torchvision

    import_torchvision()
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30], [0, 0, 9, 10]])
    assert suppress(boxes.requires_grad_(), torch.tensor([0.5, 0.9, 0.1, 0.7]), 0.5).tolist() == [1, 2]
    assert suppress(boxes, torch.tensor([0.5, 0.9, 0.1, 0.7]), 0.95).tolist() == [1, 3, 0, 2]

"""The command line: the documented flow, what it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import hap
from hap.cli import app
from hap.cli.options import allow_local_modules
from hap.models import ModelInfo
from hap.models.cifar_resnet import CifarResNet
from hap.report import charts, style
from hap.training.loop import Report
from hap.workflow.config import read_config
from hap.workflow.run import remove_results
from traced_once import tracing_once

ROOT = Path(__file__).parents[2]
TINY = """
from torch import nn

def build(classes=10):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    )
"""
RECURRENT = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.rows, self.wide, self.last = nn.LSTM(8, 24, proj_size=16), nn.Linear(16, 32), nn.Linear(32, classes)

    def forward(self, x):
        return self.last(self.wide(self.rows(x[:, 0].transpose(0, 1))[0].mean(0)).relu())

def build(classes=10):
    return Net(classes)
"""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long networks take is no part of these tests."""
    monkeypatch.setattr(hap.workflow.networks, "LATENCY_ROUNDS", (2, 2))


@pytest.fixture(autouse=True, scope="module")
def _one_trace() -> Iterator[None]:
    with tracing_once():
        yield


@pytest.fixture(autouse=True, scope="module")
def _shallow_network() -> Iterator[None]:
    """The network for digits with all that it has, in one block for each stage."""
    network = partial(CifarResNet, (1, 1, 1), (16, 24, 40), channels=1)
    entry = ModelInfo("digits_resnet", network, input_shape=(1, 8, 8))
    with mock.patch.dict(hap.models._ZOO, {"digits_resnet": entry}):
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it leaves the charts of reports empty from then on: the test looks at other things, and drawing takes
    longer than all else."""

    def leave_empty() -> None:
        monkeypatch.setattr(charts, "to_svg", lambda figure, name: "<svg></svg>")
        monkeypatch.setattr(style, "to_png", lambda figure: b"")

    return leave_empty


def invoke(*arguments: object) -> object:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def ok(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def refused(*arguments: object) -> str:
    """The one line on stderr of a command that must fail as a user's error."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output + repr(result.exception)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "Traceback" not in result.output
    return last


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """A digits network after one epoch."""
    path = tmp_path_factory.mktemp("dense") / "dense.safetensors"
    ok("train", "--model", "digits_resnet", "--data", "digits", "--recipe", "digits", "--epochs", 1, "--out", path)
    return path


@pytest.fixture(scope="module")
def pruned(dense: Path, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pruned") / "pruned.safetensors"
    ok("prune", dense, "--params", 0.3, "--implant", 0.2, "--calibration", 64, "--out", path)
    return path


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch) -> Path:
    """A folder with a module tinynet, which is the current folder."""
    (tmp_path / "tinynet.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "tinynet", raising=False)
    yield tmp_path
    sys.modules.pop("tinynet", None)


# ---- the flow -----------------------------------------------------------------------------------------------


def test_train_says_in_the_checkpoint_what_later_commands_need(dense: Path) -> None:
    found = hap.read(dense)
    assert found.about == {"model": "digits_resnet", "classes": 10, "data": "digits", "input": [1, 8, 8]}
    assert found.recipe["epochs"] == 1
    assert found.metrics["params"] == 38_666
    assert [p.name for p in dense.parent.iterdir()] == ["dense.safetensors"]  # no training state is left


def test_score_prints_a_row_per_layer_and_writes_what_prune_reads(dense: Path, tmp_path: Path) -> None:
    scores, out = tmp_path / "scores.json", tmp_path / "pruned.safetensors"
    shown = ok("score", dense, "--data", "digits", "--criterion", "hessian", "--calibration", 64, "--out", scores)
    assert "layer3.0.conv1" in shown
    assert "median" in shown
    values = json.loads(scores.read_text())["scores"]
    assert len(values["layer3.0.conv1"]) == 40
    ok("prune", dense, "--params", 0.3, "--scores", scores, "--calibration", 64, "--out", out)
    ok("prune", dense, "--params", 0.3, "--calibration", 64, "--out", tmp_path / "direct.safetensors")
    assert hap.read(out).plan == hap.read(tmp_path / "direct.safetensors").plan
    assert "another checkpoint" in refused(
        "prune", out_of(dense, tmp_path), "--params", 0.3, "--scores", scores, "--out", out
    )
    assert "--coupling joint" in refused(
        "prune", dense, "--params", 0.3, "--scores", scores, "--coupling", "union", "--out", out
    )
    assert "scored without --stream" in refused(
        "prune", dense, "--params", 0.3, "--scores", scores, "--stream", "--out", out
    )
    assert "scored by hessian" in refused(
        "prune", dense, "--params", 0.3, "--scores", scores, "--criterion", "l1", "--out", out
    )


def out_of(dense: Path, folder: Path) -> Path:
    """Another checkpoint of the same network."""
    model = hap.models.build("digits_resnet").eval()
    return hap.save(folder / "other.safetensors", model, about=hap.read(dense).about)


def test_score_with_probes_shows_standard_errors(dense: Path) -> None:
    assert "standard error" in ok("score", dense, "--probes", 4, "--calibration", 32)


def test_prune_meets_the_budget_and_shows_plan_cost_and_accuracy(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "pruned.safetensors"
    shown = ok(
        "prune",
        dense,
        "--data",
        "digits",
        "--params",
        0.3,
        "--implant",
        0.2,
        "--criterion",
        "hessian",
        "--coupling",
        "joint",
        "--calibration",
        64,
        "--out",
        out,
    )
    assert "implanted" in shown
    assert "38,666" in shown
    assert "accuracy" in shown
    plan = hap.read(out).plan
    assert plan.after.params <= 0.3 * plan.before.params
    assert sum(map(len, plan.implanted.values())) > 0


def test_options_of_prune_reach_the_plan(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "pruned.safetensors"
    ok(
        "prune",
        dense,
        "--flops",
        0.8,
        "--criterion",
        "l1",
        "--round-to",
        4,
        "--leave",
        "layer1.*",
        "--per-cost",
        "--compensate",
        "--per-layer",
        0.5,
        "--implant",
        0.5,
        "--implant-kind",
        "DepthwiseSeparable",
        "--coupling",
        "union",
        "--stream",
        "--calibration",
        64,
        "--out",
        out,
    )
    plan = hap.read(out).plan
    assert plan.coupling == "union" and hap.read(out).about["prune"]["stream"] is True
    assert plan.implant.to_dict()["kind"] == "DepthwiseSeparable"
    assert all(not gone for name, gone in plan.removed.items() if name.startswith("layer1."))
    assert all(len(gone) <= 0.5 * (len(gone) + len(plan.kept[name])) for name, gone in plan.removed.items())


def test_minutes_of_distillation_follow_the_pruning(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "pruned.safetensors"
    how = "--flops", 0.3, "--criterion", "magnitude", "--calibration", 256, "--out", out
    ok("prune", dense, *how, "--minutes", 0.01)
    assert hap.read(out).about["prune"]["minutes"] == 0.01
    assert hap.read(out).metrics["accuracy"] > 0.5
    said = invoke("prune", dense, *how, "--repair", "norms", "--minutes", 1)
    assert said.exit_code != 0 and "'norms', which takes no minutes" in said.output


def test_a_tolerated_drop_in_place_of_a_budget(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "pruned.safetensors"
    how = "--criterion", "magnitude", "--per-cost", "--calibration", 128, "--out", out
    said = ok("prune", dense, *how, "--max-drop", 30)
    saved = hap.read(out)
    assert saved.plan is not None and any(tried.within for tried in saved.plan.curve)
    assert saved.about["prune"]["max_drop"] == 30 and saved.about["prune"]["evaluated"] > 1000
    assert saved.metrics["dense"]["accuracy"] - saved.metrics["accuracy"] < 0.35
    assert "what was tried" in said and "tolerated" in said
    refused = invoke("prune", dense, *how, "--max-drop", 1, "--flops", 0.5)
    assert refused.exit_code != 0 and "--max-drop 1.0, --flops 0.5; give a tolerated drop" in refused.output
    everything = invoke("prune", dense, *how, "--max-drop", 1, "--calibration", 5000)
    assert everything.exit_code != 0 and "ask for fewer with --calibration" in everything.output


def test_one_order_cuts_every_size(dense: Path, tmp_path: Path) -> None:
    ordered, out, anew = (tmp_path / f"{name}.safetensors" for name in ("ordered", "small", "anew"))
    choices = "--criterion", "magnitude", "--per-cost", "--coupling", "union"
    assert "layer3.0.conv1" in ok("order", dense, *choices, "--out", ordered)
    found, before = hap.read(ordered), hap.read(dense)
    assert (found.metrics, found.recipe, found.about) == (before.metrics, before.recipe, before.about)
    assert str(found.order) == "240 units in 9 groups by magnitude, union coupling, per cost"
    assert str(found.order) in ok("info", ordered)
    size = "--flops", 0.37, "--round-to", 2, "--repair", "norms", "--calibration", 64
    ok("prune", "--from-order", ordered, *size, "--out", out)
    ok("prune", dense, *choices, *size, "--out", anew)
    made, wanted = hap.read(out), hap.read(anew)
    assert made.plan == wanted.plan and made.metrics == wanted.metrics
    assert made.about["pruned_from"] == "ordered.safetensors"
    assert made.about["prune"] == wanted.about["prune"] | {"criterion": {"name": "magnitude"}, "ignore": []}


def saved_tiny() -> tuple[torch.nn.Module, list[Any], str]:
    """The network of the module tinynet as it is made, an image and calibration batches, and the checkpoint's name."""
    allow_local_modules()
    model, data = importlib.import_module("tinynet").build().eval(), hap.data.load("digits")
    hap.save("net.safetensors", model, about={"model": "tinynet:build", "data": "digits"})
    return model, [next(data.batches("train", 1))[0], data.calibration(64, 0)], "net.safetensors"


def test_an_order_that_the_library_saved_is_followed(tiny: Path) -> None:
    model, inputs, name = saved_tiny()
    order = hap.order(model, *inputs, criterion=hap.Reversed(hap.Random(seed=1)), ignore=("0",))
    hap.save(name, model, order=order, about=hap.read(name).about)
    ok("prune", "--from-order", name, "--flops", 0.8, "--model", "tinynet:build", "--out", "small.safetensors")
    plan = hap.read("small.safetensors").plan
    assert plan == hap.prune_(model, *inputs, order=order, flops=0.8)
    assert list(plan.removed) == ["3"]
    assert hap.read("small.safetensors").about["prune"]["ignore"] == ["0"]


def test_what_an_order_does_not_go_with(dense: Path, pruned: Path, tmp_path: Path) -> None:
    ordered, out = tmp_path / "ordered.safetensors", tmp_path / "small.safetensors"
    order = hap.Order({"stem": [1.0, 2.0]}, {"name": "l1"})
    model = hap.load(dense, hap.models.build("digits_resnet"))
    hap.save(ordered, model, order=order, about=hap.read(dense).about)
    prune = "prune", "--from-order", ordered, "--flops", 0.5, "--out", out
    beside = f"is given beside --from-order {ordered}, which has 2 units in 1 group by l1, joint coupling; leave out "
    for option in (["--criterion", "hessian"], ["--coupling", "joint"], ["--per-cost"], ["--stream"], ["--rounds", 1]):
        assert f"{option[0]} {beside}{option[0]}, or make another with hap order" in refused(*prune, *option)
    assert "of another model: it lacks group" in (line := refused(*prune))
    assert line.endswith("make one of this model with hap order")
    assert f"holds the network too; leave out {dense}" in refused("prune", dense, *prune[1:])
    assert "leave out --from-order" in refused(*prune[:3], "--max-drop", 1, "--out", out)
    assert f"{dense} holds no order; make a file with one" in refused("prune", "--from-order", dense, *prune[3:])
    assert "give a CHECKPOINT, or --from-order" in refused("prune", *prune[3:])
    assert "the command reads and would overwrite" in refused(*prune[:-1], ordered)
    assert "pruned already" in refused("order", pruned, "--out", out)
    assert "the command reads and would overwrite" in refused("order", dense, "--out", dense)
    assert not out.exists()


def test_several_rounds(tiny: Path) -> None:
    model, inputs, name = saved_tiny()
    how = "--criterion", "magnitude", "--repair", "norms", "--calibration", 64, "--model", "tinynet:build"
    prune = "prune", name, *how, "--out", "small.safetensors"
    assert "in 2 rounds, each scored anew" in invoke(*prune, "--flops", 0.4, "--rounds", 2).stderr
    found = hap.read("small.safetensors")
    assert found.plan == hap.prune_(model, *inputs, criterion="magnitude", repair="norms", rounds=2, flops=0.4)
    assert found.about["prune"]["rounds"] == 2
    loaded = hap.load("small.safetensors", sys.modules["tinynet"].build()).eval()
    torch.testing.assert_close(loaded(inputs[0]), model(inputs[0]))
    assert "--rounds 0; expected a whole number of at least 1" in refused(*prune, "--flops", 0.4, "--rounds", 0)
    line = refused(*prune, "--latency", 0.5, "--rounds", 2)
    assert "--latency 0.5 takes one round" in line and "ask for --flops instead" in line


def test_prune_and_info_say_what_could_not_be_touched(tiny: Path) -> None:
    (tiny / "tinynet.py").write_text(RECURRENT)
    ok("train", "--model", "tinynet:build", "--data", "digits", "--epochs", 1, "--out", "net.safetensors")
    said = ok(
        "prune",
        "net.safetensors",
        "--params",
        0.9,
        "--criterion",
        "magnitude",
        "--model",
        "tinynet:build",
        "--out",
        "p.safetensors",
    )
    line = next(line for line in said.splitlines() if "could not be touched" in line)
    assert re.match(r"\d\d% of the parameters could not be touched: rows \(lstm: projects its states", line)
    assert line in ok("info", "p.safetensors").splitlines()


def test_finetune_eval_info_and_export_need_no_model(dense: Path, pruned: Path, tmp_path: Path) -> None:
    final = tmp_path / "final.safetensors"
    ok(
        "finetune",
        pruned,
        "--data",
        "digits",
        "--recipe",
        "digits-finetune",
        "--teacher",
        dense,
        "--epochs",
        1,
        "--out",
        final,
    )
    saved = hap.read(final)
    assert saved.recipe["distill"] == 0.7
    assert saved.plan == hap.read(pruned).plan
    assert saved.metrics["accuracy"] > hap.read(pruned).metrics["accuracy"]
    assert f"{100 * saved.metrics['accuracy']:.2f}%" in ok("eval", final, "--data", "digits")
    shown = ok("info", final)
    assert "digits_resnet" in shown
    assert "layer3.0.conv1" in shown
    ok("export", final, tmp_path / "net.pt2", "--batch", 2)
    program = torch.export.load(tmp_path / "net.pt2").module()
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = hap.load(final, hap.models.build("digits_resnet")).eval()(x)
    torch.testing.assert_close(program(x), expected)
    ok("export", final, tmp_path / "net.pt2", "--dynamic-axes", "2,3")
    wide = torch.randn(3, 1, 8, 11, generator=torch.Generator().manual_seed(0))
    expected = hap.load(final, hap.models.build("digits_resnet")).eval()(wide)
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(wide), expected)


def test_finetune_writes_beside_the_checkpoint_by_default(pruned: Path) -> None:
    out = pruned.with_name("pruned-finetuned.safetensors")
    ok("finetune", pruned, "--epochs", 1, "--lr", 0.01, "--batch", 128)
    recipe = hap.read(out).recipe
    assert (recipe["lr"], recipe["batch"], recipe["distill"]) == (0.01, 128, 0.0)


def test_export_to_onnx_gives_equal_outputs(pruned: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    ok("export", pruned, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    (seen,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = hap.load(pruned, hap.models.build("digits_resnet")).eval()(x).detach()
    torch.testing.assert_close(torch.from_numpy(seen), expected, rtol=1e-4, atol=1e-4)


def test_prune_to_a_share_of_the_time(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNS", "MOST_RUNS"):
        monkeypatch.setattr(hap.pruning.plan_for_latency, name, 5)
    out = tmp_path / "fast.safetensors"
    said = ok(
        "prune", dense, "--latency", 0.85, "--batch", 64, "--threads", 1, "--criterion", "magnitude", "--out", out
    )
    saved = hap.read(out)
    how = saved.about["prune"]
    assert (how["latency"], how["backend"], how["threads"], how["batch"]) == (0.85, "eager", 1, 64)
    assert how["ratio"] <= 0.85 and f"{100 * how['ratio']:.1f}% of the dense network's" in said
    assert saved.plan.after.macs < saved.plan.before.macs
    words = refused("prune", dense, "--latency", 0.001, "--batch", 2, "--criterion", "magnitude", "--out", out)
    assert "--latency 0.001 cannot be reached" in words
    assert "--latency" in refused("prune", dense, "--latency", 0.5, "--flops", 0.5, "--out", out)


def test_version_and_help_with_examples() -> None:
    assert ok("--version") == f"hap {hap.__version__}\n"
    for command in (
        "demo",
        "train",
        "score",
        "order",
        "prune",
        "finetune",
        "run",
        "eval",
        "export",
        "info",
        "report",
        "reproduce",
    ):
        assert f"hap {command}" in ok(command, "--help").split("Example")[1]


# ---- what is refused ----------------------------------------------------------------------------------------


def test_wrong_names(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    assert "unknown model 'resnet1'" in refused("train", "--model", "resnet1", "--data", "digits", "--out", out)
    assert "nowhere" in refused("train", "--model", "digits_resnet", "--data", "nowhere", "--out", out)
    assert "unknown recipe" in refused(
        "train", "--model", "digits_resnet", "--data", "digits", "--recipe", "fast", "--out", out
    )
    assert "cannot read an image of digits" in refused("train", "--model", "resnet20", "--data", "digits", "--out", out)
    assert "criterion is 'size'" in refused("score", dense, "--criterion", "size")
    assert "coupling is 'loose'" in refused("score", dense, "--coupling", "loose")
    assert "device is 'tpu'" in refused("eval", dense, "--device", "tpu")
    assert "--split" in refused("eval", dense, "--split", "all")
    assert "there is no file" in refused("info", tmp_path / "missing.safetensors")
    assert "there is no file" in refused("prune", tmp_path / "missing.safetensors", "--params", 0.3, "--out", out)
    assert "there is no file" in refused("prune", dense, "--params", 0.3, "--scores", tmp_path / "s.json", "--out", out)
    assert not out.exists()


def test_a_checkpoint_that_lies_about_its_classes_is_refused(tmp_path: Path) -> None:
    about = {"model": "digits_resnet", "classes": 10**9}
    path = hap.save(tmp_path / "x.safetensors", torch.nn.Linear(2, 2), about=about)
    assert "1000000000 classes" in refused("eval", path)


def test_wrong_budgets(dense: Path, pruned: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    assert "--params 1.5;" in refused("prune", dense, "--params", 1.5, "--out", out)
    assert "one or several of --params, --flops, --channels" in refused("prune", dense, "--out", out)
    assert "--latency alone" in refused("prune", dense, "--params", 0.3, "--latency", 0.3, "--out", out)
    line = refused("prune", dense, "--params", 0.001, "--criterion", "l1", "--out", out)
    assert "--params 0.001 cannot be reached" in line
    assert "raise --per-layer or --leave fewer layers alone" in line
    assert "--leave has 'stem*'" in refused(
        "prune", dense, "--params", 0.3, "--criterion", "l1", "--leave", "stem*", "--out", out
    )
    assert "--round-to 0; expected at least 1" in refused(
        "prune", dense, "--params", 0.3, "--round-to", 0, "--out", out
    )
    assert "pruned already" in refused("prune", pruned, "--params", 0.1, "--out", out)
    assert "--implant is 3" in refused("prune", dense, "--params", 0.3, "--implant", 3, "--out", out)
    assert "probes are for" in refused(
        "prune", dense, "--params", 0.3, "--criterion", "l1", "--probes", 9, "--out", out
    )
    assert not out.exists()


def test_places_that_cannot_be_written(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "x.safetensors"
    assert "cannot write" in refused("train", "--model", "digits_resnet", "--data", "digits", "--out", out)
    assert "cannot write" in refused("prune", dense, "--params", 0.3, "--out", out)
    assert "it is a folder" in refused("score", dense, "--out", tmp_path)
    assert "must end in .safetensors" in refused("prune", dense, "--params", 0.3, "--out", tmp_path / "x.pt")
    assert "must end in .onnx or .pt2" in refused("export", dense, tmp_path / "x.pb")
    before = dense.read_bytes()
    over = f"--out is {dense}, which the command reads and would overwrite"
    assert over in refused("finetune", dense, "--out", dense)
    assert over in refused("prune", dense, "--params", 0.3, "--out", dense)
    assert over in refused("score", dense, "--out", dense)
    assert over in refused("finetune", copy_of(dense, tmp_path), "--teacher", dense, "--out", dense)
    assert dense.read_bytes() == before
    assert "needs --teacher" in refused("finetune", dense, "--distill", 0.5)


def copy_of(path: Path, folder: Path) -> Path:
    return Path(shutil.copy(path, folder / f"copy-of-{path.name}"))


def test_a_finished_training_is_replaced_by_another_only_when_told(dense: Path, pruned: Path, tmp_path: Path) -> None:
    out = copy_of(dense, tmp_path)
    train = ("train", "--model", "digits_resnet", "--data", "digits", "--epochs", 1, "--out", out)
    line = refused(*train, "--seed", 1)
    assert "seed is 0, not 1" in line
    assert "--fresh" in line
    assert "epochs is 1, not 2" in refused(*train, "--epochs", 2)
    assert out.read_bytes() == dense.read_bytes()
    over = copy_of(pruned, tmp_path)
    assert "no result of this training" in refused(*train[:-1], over)
    ok(*train, "--seed", 1, "--fresh")
    assert hap.read(out).recipe["seed"] == 1
    ok(*train, "--seed", 1)  # the same again


def test_export_of_a_file_that_does_not_say_its_shape(tmp_path: Path) -> None:
    path = hap.save(tmp_path / "bare.safetensors", hap.models.build("digits_resnet"))
    out, named = tmp_path / "bare.pt2", ("--model", "digits_resnet")
    assert "--input-shape, such as 1,3,32,32, or --data" in refused("export", path, out, *named)
    assert "'1,x'" in refused("export", path, out, *named, "--input-shape", "1,x")
    assert "leave out" in refused("export", path, out, *named, "--input-shape", "1,1,8,8", "--batch", 2)
    ok("export", path, out, *named, "--input-shape", "3,1,8,8")
    assert torch.export.load(out).module()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    ok("export", path, out, *named, "--data", "digits", "--batch", 2)
    assert torch.export.load(out).module()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_fewer_images_to_score_on_than_asked_for_are_mentioned(dense: Path) -> None:
    result = invoke("score", dense, "--criterion", "l1", "--calibration", 10**6)
    assert result.exit_code == 0
    assert "training images, not 1000000: all of them are used" in result.stderr


# ---- code that a checkpoint names ---------------------------------------------------------------------------


def test_a_checkpoint_cannot_choose_code_but_its_user_can(tiny: Path) -> None:
    ok("train", "--model", "tinynet:build", "--data", "digits", "--epochs", 1, "--out", "net.safetensors")
    assert hap.read("net.safetensors").about["model"] == "tinynet:build"
    (tiny / "tinynet.py").write_text("import pathlib; pathlib.Path('ran').touch()\n" + TINY)
    del sys.modules["tinynet"]
    for command in (["eval"], ["score"], ["prune", "--params", "0.5", "--out", "p.safetensors"]):
        line = refused(command[0], "net.safetensors", *command[1:])
        assert "a checkpoint cannot name code to run" in line
        assert "--model tinynet:build" in line
    ok("info", "net.safetensors")
    assert not (tiny / "ran").exists()
    ok("eval", "net.safetensors", "--model", "tinynet:build")
    assert (tiny / "ran").exists()


# ---- interruption -------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_what_the_same_command_resumes(tiny: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from hap.cli import main; main()",
        "train",
        "--model",
        "tinynet:build",
        "--data",
        "digits",
        "--epochs",
        "8",
        "--out",
        "net.safetensors",
    ]
    state = tiny / "net.training.safetensors"
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not state.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert "the same command goes on" in stderr.strip().splitlines()[-1]
    assert "Traceback" not in stderr
    assert state.exists()
    assert not (tiny / "net.safetensors").exists()
    assert "going on from" in ok(*command[3:])
    assert hap.read("net.safetensors").recipe["epochs"] == 8
    assert not state.exists()


def test_a_resumed_training_ends_as_an_unbroken_one(tiny: Path, monkeypatch) -> None:
    train = ["train", "--model", "tinynet:build", "--data", "digits", "--epochs", "4", "--out"]
    whole = Report.epoch

    def stop(self: Report, epoch: int) -> None:
        if epoch == 2:
            raise KeyboardInterrupt
        whole(self, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(Report, "epoch", stop)
        result = invoke(*train, "broken.safetensors")
    assert result.exit_code == 130
    ok(*train, "broken.safetensors")
    ok(*train, "unbroken.safetensors")
    import tinynet

    one, other = (hap.load(f"{n}.safetensors", tinynet.build()).state_dict() for n in ("broken", "unbroken"))
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- experiments --------------------------------------------------------------------------------------------


def small_config(folder: Path, model: str = "tinynet:build", **changes: str) -> Path:
    values = {
        "top": "",
        "calibration": "32",
        "dense": 'recipe = "digits"\nepochs = 1',
        "prune": 'criterion = "l1"\nparams = 0.5',
    } | changes
    path = folder / "config.toml"
    path.write_text(
        f'model = "{model}"\ndata = "digits"\nout = "{(folder / "out").as_posix()}"\n'
        f"calibration = {values['calibration']}\n"
        f'{values["top"]}\n[dense]\n{values["dense"]}\n[finetune]\nrecipe = "digits-finetune"\nepochs = 1\n'
        f'teacher = true\n[[prune]]\nname = "L1"\n{values["prune"]}\n'
    )
    return path


def test_the_example_config_is_valid() -> None:
    experiment = read_config(ROOT / "examples" / "digits.toml")
    assert [list(step.budget().given.values()) for step in experiment.prune] == [[0.5]] * 3
    assert experiment.dense.make(0).epochs == 12
    assert experiment.finetune.make(1).distill > 0


def test_run_leaves_results_and_skips_what_is_finished(tiny: Path, undrawn: Callable[[], None]) -> None:
    config = small_config(tiny)
    assert "L1" in ok("run", config)
    record = json.loads((tiny / "out" / "results" / "l1-seed0.json").read_text())
    assert record["pruned"]["params"] <= 0.5 * record["dense"]["params"]
    assert record["budget"] == {"params": 0.5}
    assert record["hardware"]["torch"] == torch.__version__
    assert len(record["curve"]["loss"]) == 1
    assert (tiny / "out" / "report.html").exists()
    undrawn()
    stamps = {p: p.stat().st_mtime_ns for p in (tiny / "out").glob("*.safetensors")}
    ok("run", config)
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert "done before" not in invoke("run", config, "--fresh").stderr
    assert "rounds" not in record["config"]["prune"]
    more = 'criterion = "l1"\nparams = 0.4\nrounds = 2'
    again = invoke("run", small_config(tiny, prune=more))  # other settings: done again
    assert again.exit_code == 0
    assert "dense network: done before" in again.stderr
    record = json.loads((tiny / "out" / "results" / "l1-seed0.json").read_text())
    assert record["budget"] == {"params": 0.4} and record["config"]["prune"]["rounds"] == 2
    assert "in 2 rounds, each scored anew" in again.stderr


def test_fresh_removes_what_the_experiment_left_and_nothing_else(tmp_path: Path) -> None:
    experiment = read_config(small_config(tmp_path))
    out = Path(experiment.out)
    ours = [
        out / "dense.safetensors",
        out / "l1-seed0.safetensors",
        out / "results" / "l1-seed0.json",
        out / "training" / "l1-seed0-0123abcd.safetensors",
        out / "experiment.json",
    ]
    others = [out / "mine.safetensors", out / "results" / "l2-seed0.json", out / "l1-seed1.safetensors"]
    for path in ours + others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    remove_results(experiment)
    assert [p.exists() for p in ours + others] == [False] * 5 + [True] * 3


def test_run_goes_on_after_an_interruption(tmp_path: Path, dense: Path, monkeypatch, undrawn) -> None:
    undrawn()
    config = small_config(tmp_path, "digits_resnet", dense=f'checkpoint = "{dense.as_posix()}"')
    with monkeypatch.context() as patch:
        patch.setattr(Report, "epoch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        result = invoke("run", config)
    assert result.exit_code == 130
    assert "the same command goes on where it stopped" in result.stderr
    result = invoke("run", config)
    assert result.exit_code == 0
    assert "L1: pruned network: done before" in result.stderr


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top": "sedes = [1]"}, ["'sedes'", "known keys: model, data"]),
        ({"dense": 'recipe = "digits"\nepoch = 3'}, ["'epoch' in [dense]", "epochs, batch"]),
        ({"prune": 'critereon = "l1"\nparams = 0.5'}, ["'critereon' in [[prune]] entry 1", "criterion"]),
        ({"prune": "params = 2.0"}, ["params = 2.0", "LEFT"]),
        ({"prune": 'params = "half"'}, ["params is 'half'", "a number"]),
        ({"prune": "params = 0.5\nrounds = 0"}, ["entry 1", "rounds = 0; expected a whole number of at least 1"]),
        ({"top": 'seeds = ["a"]'}, ["seeds is ['a']"]),
        ({"top": "probes = 1"}, ["probes is 1"]),
        ({"calibration": "0"}, ["calibration is 0", "at least 1"]),
        ({"top": "seeds = []"}, ["at least one"]),
        ({"dense": 'recipe = "quick"'}, ["unknown recipe 'quick'"]),
        ({"dense": ""}, ["either a recipe to train by or a checkpoint"]),
        ({"dense": "= 3"}, ["not valid TOML"]),
    ],
)
def test_bad_configs_are_refused_before_any_work(tmp_path: Path, changes: dict[str, str], expected: list[str]) -> None:
    line = refused("run", small_config(tmp_path, **changes))
    assert all(words in line for words in expected), line
    assert not (tmp_path / "out").exists()


def test_demo_compares_three_ways_and_leaves_a_report(tmp_path: Path, undrawn: Callable[[], None]) -> None:
    shown = ok("demo", "--quick", "--out", tmp_path / "demo")
    for method in ("Dense", "HAP", "HAP + Implant", "Magnitude"):
        assert method in shown
    assert "report.html" in shown
    folder = tmp_path / "demo"
    assert (folder / "summary.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 4
    undrawn()
    again = invoke("demo", "--quick", "--out", folder)
    assert again.stdout == shown
    assert again.stderr.count("done before") == 4

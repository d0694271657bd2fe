"""Files that an older revision of HAP made, in tests/files_made_before/, still load and mean what they did."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hap
from checks import run
from files_made_before.make import CONFIG, FOLDER, NETWORKS, RECIPE, classifier, data, network, plan_of
from hap.cli import app
from hap.workflow.config import read_config
from hap.workflow.results import read_results

every_network = pytest.mark.parametrize("name", NETWORKS)


def outputs(name: str) -> torch.Tensor:
    return torch.tensor(json.loads((FOLDER / f"{name}.outputs.json").read_text()), dtype=torch.float64)


def close(model: torch.nn.Module, example: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(run(model, example)[0], outputs(name), rtol=1e-9, atol=1e-9)


@every_network
def test_a_checkpoint_loads_into_a_fresh_network(name: str) -> None:
    model, example = network(name)
    close(hap.load(FOLDER / f"{name}.safetensors", model), example, name)
    found = hap.read(FOLDER / f"{name}.safetensors")
    assert found.metrics == {"accuracy": 0.5} and found.about["note"] == name
    assert found.plan == hap.Plan.from_json((FOLDER / f"{name}.plan.json").read_text())


@every_network
def test_a_plan_is_carried_out_and_written_as_it_was(name: str) -> None:
    text = (FOLDER / f"{name}.plan.json").read_text()
    model, example = network(name)
    plan = hap.Plan.from_json(text)
    assert json.loads(plan.to_json()) == json.loads(text)
    close(hap.apply_(model, plan, example), example, name)


@every_network
def test_the_same_request_gives_the_plan_that_it_gave(name: str) -> None:
    assert plan_of(name, *network(name)) == hap.Plan.from_json((FOLDER / f"{name}.plan.json").read_text())


def test_a_training_goes_on_from_its_state(tmp_path: Path) -> None:
    state = shutil.copy(FOLDER / "training.safetensors", tmp_path)
    history = hap.train(classifier(), data(), RECIPE, checkpoint=state, progress=False)
    wanted = json.loads((FOLDER / "training.losses.json").read_text())
    assert history.loss == pytest.approx(wanted, rel=1e-3)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, which is the current one."""
    shutil.copytree(FOLDER, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    monkeypatch.delitem(sys.modules, "small_networks", raising=False)
    return tmp_path / "here"


def ok(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def test_an_experiment_that_is_finished_is_not_done_again(experiment: Path) -> None:
    results = {path: path.read_bytes() for path in experiment.glob("experiment/results/*.json")}
    networks = {path: path.read_bytes() for path in experiment.glob("experiment/*.safetensors")}
    assert len(results) == 5 and len(networks) == 5
    ended = ok("run", "experiment.toml")
    assert ended.stderr.count("done before") == 3 and "epoch" not in ended.stderr
    assert all(path.read_bytes() == held for path, held in (results | networks).items())
    assert (experiment / "experiment" / "report.html").is_file()


def test_results_and_the_file_of_an_experiment_are_read() -> None:
    asked = read_config(FOLDER / "experiment.toml")
    assert (FOLDER / "experiment.toml").read_text() == CONFIG
    assert [(s.name, s.criterion, s.implant, s.coupling) for s in asked.prune] == [
        ("Half", "hessian", 0.3, "joint"),
        ("L1", "l1", 0.0, "union"),
    ]
    assert [s.budget().given for s in asked.prune] == [{"params": 0.5}, {"flops": 0.6}]
    results = {r.name: r for r in read_results(FOLDER / "experiment")}
    assert {name: r.measured.params for name, r in results.items()} == {"Dense": 786, "Half": 393, "L1": 450}
    assert {name: r.measured.macs for name, r in results.items()} == {"Dense": 41552, "Half": 17990, "L1": 20816}


def test_scores_in_a_file_are_pruned_by(experiment: Path) -> None:
    """The scores are those of the Hessian, so the plan is the one that hap run made by the Hessian."""
    dense = "experiment/dense.safetensors"
    options = ["--scores", "scores.json", "--params", "0.5", "--implant", "0.3", "--model", "small_networks:build"]
    ok("prune", dense, *options, "--out", "pruned.safetensors")
    assert (
        hap.read(experiment / "pruned.safetensors").plan
        == hap.read(experiment / "experiment/half-pruned.safetensors").plan
    )

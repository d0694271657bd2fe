"""Jobs that train side by side, stop in time, go on, and leave one result each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hap
from hap.data import Data, Split
from hap.experiments.campaign import Folders, Job, pending, select, status, work_off
from hap.experiments.cifar10 import jobs as cifar10_jobs
from hap.experiments.config import PruneStep


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (96, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(96) % 10
    return Data(Split(images, labels), Split(images[:32], labels[:32]), 10, (0.5,) * 3, (0.25,) * 3, "fake", 4, True)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "results", tmp_path / "zoo", tmp_path / "work")


def make_jobs(epochs: int = 2) -> list[Job]:
    recipe = hap.Recipe(epochs, batch=32, lr=0.01)
    prune = PruneStep("half", flops=0.5, criterion="magnitude", coupling="union", implant=0.2, implant_init="zero")
    return [
        Job("dense", "resnet20", recipe, ("tables",)),
        Job("pruned", "resnet20", recipe, ("tables", "rows"), dense="dense", prune=prune, most_params=0.3),
    ]


def test_jobs_wait_for_their_dense_network_and_leave_results(data: Data, folders: Folders) -> None:
    jobs = make_jobs(1)
    assert [j.name for j in pending(jobs, folders)] == ["dense"]
    assert status(jobs, folders) == {"done": [], "ready": ["dense"], "waiting": ["pruned"]}
    work_off(jobs, data, folders, say=lambda _: None)
    result = json.loads(folders.result("pruned").read_text())
    assert status(jobs, folders)["done"] == ["dense", "pruned"]
    assert result["macs_left"] <= 0.5 and result["params_left"] <= 0.3
    model = hap.load(folders.network("pruned"), hap.models.build("resnet20"))
    assert hap.evaluate(model, data).accuracy == result["accuracy_in_half_precision"]
    assert hap.cost(model, torch.zeros(1, 3, 32, 32)).params == result["params"]


def test_a_time_limit_stops_between_epochs_and_the_same_call_goes_on(data: Data, folders: Folders) -> None:
    jobs = make_jobs(2)[:1]
    work_off(jobs, data, folders, seconds=1e-3, say=lambda _: None)
    assert not folders.result("dense").exists()
    work_off(jobs, data, folders, say=lambda _: None)
    stopped = json.loads(folders.result("dense").read_text())
    again = Folders(folders.results / "b", folders.networks / "b", folders.work / "b")
    work_off(jobs, data, again, say=lambda _: None)
    assert stopped["history"]["loss"] == json.loads(again.result("dense").read_text())["history"]["loss"]


def test_targets_select_jobs_and_unknown_ones_are_refused() -> None:
    jobs = make_jobs()
    assert [j.name for j in select(jobs, "rows")] == ["pruned"]
    assert select(jobs, "all") == jobs
    with pytest.raises(hap.HapError, match=r"target is 'nothing'.*rows, tables"):
        select(jobs, "nothing")


def test_the_papers_jobs_have_distinct_names_and_start_from_jobs_that_exist() -> None:
    jobs = cifar10_jobs()
    names = [j.name for j in jobs]
    assert len(set(names)) == len(names)
    assert all(j.dense is None or j.dense in names for j in jobs)
    assert {j.recipe.epochs for j in jobs if j.prune} == {160}
    assert sum(j.prune is not None and j.recipe.seed == 0 for j in jobs) == 25

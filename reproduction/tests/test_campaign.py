"""Jobs that train side by side, stop in time, go on, and leave one result each."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

import hap
from hap.cli import app
from hap.data import Data, Split
from hap.io.checkpoint import load, read, save
from hap.models import ModelInfo
from hap.models.cifar_resnet import CifarResNet
from hap.utils.atomic_files import digest, write_json
from hap.workflow.config import PruneStep
from hap.workflow.networks import new_network
from hap_reproduction.cifar10 import batches, campaign, removal, sensitivity, stacking, starting, training
from hap_reproduction.cifar10.campaign import SideBySide, prepare, work_off
from hap_reproduction.cifar10.job import Folders, Job, estimate, pending, select, status
from hap_reproduction.cifar10.jobs import headline_networks, load_data
from hap_reproduction.cifar10.jobs import jobs as cifar10_jobs
from hap_reproduction.cifar10.sensitivity import Study
from hap_reproduction.cifar10.starting import BorrowedStep, EigenStep, open_started
from hap_reproduction.files import locked
from traced_once import tracing_once

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def _small_networks() -> Iterator[None]:
    """Two networks of the zoo with all that ResNet20 has, several blocks on a stream among it, in fewer layers."""
    depths = {"small": (2, 1, 1), "smaller": (1, 1, 1)}
    entries = {name: ModelInfo(name, partial(CifarResNet, depth, (16, 32, 64))) for name, depth in depths.items()}
    with mock.patch.dict(hap.models._ZOO, entries), tracing_once():
        yield


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(48) % 10
    return Data(Split(images, labels), Split(images[:32], labels[:32]), 10, (0.5,) * 3, (0.25,) * 3, "fake", 1, True)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "results", tmp_path / "zoo", tmp_path / "work")


def quiet(_: str) -> None:
    pass


def make_jobs(epochs: int = 2) -> list[Job]:
    recipe = hap.Recipe(epochs, batch=32, lr=0.01)
    prune = PruneStep(
        "half", flops=0.5, params=0.3, criterion="magnitude", coupling="union", implant=0.2, implant_init="zero"
    )
    return [
        Job("dense", "small", recipe, ("tables",)),
        Job("pruned", "small", recipe, ("tables", "rows"), dense="dense", prune=prune),
    ]


def test_what_was_pruned_with_other_settings_is_not_taken_up(data: Data, folders: Folders) -> None:
    put_dense(folders)
    job = make_jobs()[1]
    work_off([job], data, folders, seconds=1e-3, say=quiet)
    assert folders.started(job.name).exists()
    with pytest.raises(hap.HapError, match="pruned with other settings"):
        work_off([replace(job, images=8)], data, folders, say=quiet)
    work_off([job], data, folders, say=quiet)
    assert folders.result(job.name).exists()


def test_the_run_whose_loss_is_not_finite_is_named_and_the_others_go_on_without_it(
    data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        replace(job, name=f"seed{i}", recipe=replace(job.recipe, seed=i)) for i, job in enumerate([make_jobs()[0]] * 2)
    )
    check, epochs = training._check_finite, []

    def broken(runs: list[Any], epoch: int) -> None:
        epochs.append(epoch)
        if len(runs) == 2 and epoch == 1:
            runs[1].loss_sum.fill_(float("nan"))
        check(runs, epoch)

    monkeypatch.setattr(training, "_check_finite", broken)
    with pytest.raises(hap.HapError, match=r"seed1: the training loss of model 1 is nan in epoch 2.*leaves it out"):
        work_off([first, second], data, folders, say=quiet)
    assert not folders.result("seed0").exists()
    work_off([first], data, folders, say=quiet)
    assert folders.result("seed0").exists() and epochs == [0, 1, 1]  # its first epoch was kept


def test_a_network_is_pruned_in_steps(data: Data, folders: Folders) -> None:
    put_dense(folders)
    dense, first = make_jobs(1)
    less = PruneStep(
        "less", flops=0.15, params=0.15, criterion="magnitude", coupling="union", implant=0.2, implant_init="center"
    )
    second = replace(first, name="further", prune=less, start=first.name)
    jobs = [dense, first, second]
    assert select(jobs, "rows", "further") == jobs  # with all that it starts from
    assert pending([first, second], folders) == [first] and status(jobs, folders)["waiting"] == ["further"]
    work_off([first, second], data, folders, say=quiet)
    plans = [read(folders.network(job.name)).plan for job in (first, second)]
    assert plans[0] and plans[1] and plans[1].after.macs <= 0.15 * plans[1].before.macs
    before, after = (
        {(n, u) for part in (p.kept, p.implanted) for n, units in part.items() for u in units} for p in plans
    )
    back = after - before  # what had gone has a score of zero and goes again, but for what fits into the last gap
    assert len(after) < len(before) and len(back) <= 0.02 * len(after)
    record = json.loads(folders.result("further").read_text())
    assert record["start"] == "pruned" and record["dense"] == "dense"
    assert record["dense_accuracy"] == json.loads(folders.result("pruned").read_text())["dense_accuracy"]
    assert record["start_sha256"] == digest(folders.network("pruned"))
    folders.result("further").unlink()
    replaced = folders.network("pruned").read_bytes()
    save(folders.network("pruned"), load(folders.network("pruned"), new_network("small", 10)).float(), plans[0])
    with pytest.raises(hap.HapError, match="from another network than the pruned that is there now"):
        work_off([second], data, folders, say=quiet)
    folders.network("pruned").write_bytes(replaced)
    folders.started("further").unlink()
    folders.network("pruned").unlink()
    assert pending([first, second], folders) == [first]  # again: what starts from it lacks it


def test_what_was_pruned_from_another_dense_network_is_not_taken_up(data: Data, folders: Folders) -> None:
    dense, job = make_jobs(2)
    work_off([dense], data, folders, say=quiet)
    work_off([job], data, folders, seconds=1e-3, say=quiet)
    was = folders.network(dense.name).read_bytes()
    folders.network(dense.name).unlink()
    folders.started(job.name).rename(folders.work / "aside")
    said: list[str] = []
    work_off([dense, job], data, folders, seconds=1e-3, say=said.append)
    assert any("dense has a result, but its network is gone" in text for text in said)
    work_off([dense], data, folders, say=quiet)
    folders.network(dense.name).write_bytes(was)
    model = open_started(folders.network(dense.name), "small", 10)
    torch.nn.init.normal_(model.conv1.weight)
    hap.save(folders.network(dense.name), model)
    (folders.work / "aside").rename(folders.started(job.name))
    with pytest.raises(hap.HapError, match=r"was pruned from another network than the dense that is there now"):
        work_off([job], data, folders, say=quiet)
    folders.network(dense.name).write_bytes(was)
    work_off([job], data, folders, say=quiet)
    assert json.loads(folders.result(job.name).read_text())["dense_sha256"] == digest(folders.network(dense.name))


def test_what_can_start_is_pruned_ahead_of_its_training(data: Data, folders: Folders) -> None:
    jobs, said = make_jobs(1), []
    prepare(jobs, data, folders, said.append)
    assert said == [] and not folders.work.exists(), "the dense network is missing"
    put_dense(folders)
    prepare(jobs, data, folders, said.append)
    made = folders.started("pruned").read_bytes()
    prepare(jobs, data, folders, said.append)
    work_off(jobs, data, folders, say=quiet)
    assert said == ["pruned: pruning"] and folders.started("pruned").read_bytes() == made
    assert folders.result("pruned").exists()


def test_budgets_that_rank_by_the_same_scores_score_once_and_others_anew(
    data: Data, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replace(make_jobs()[1], prune=PruneStep("a", flops=0.5, criterion="hessian", probes=2))
    others = [replace(first.prune, name="b", flops=0.7), replace(first.prune, name="c", probes=3)]
    jobs = [first, *(replace(first, name=step.name, prune=step) for step in others)]
    alone = Folders(tmp_path / "r", folders.networks, tmp_path / "w")
    put_dense(folders)
    for job in jobs:
        prepare([job], data, alone, quiet)
    times: list[str] = []
    score = starting.Work.score
    monkeypatch.setattr(starting.Work, "score", lambda work: times.append("") or score(work))
    prepare(jobs, data, folders, quiet)
    assert len(times) == 2
    for job in jobs:
        assert hap.read(folders.started(job.name)).plan == hap.read(alone.started(job.name)).plan


def put_dense(folders: Folders) -> None:
    """A dense network as a finished job leaves it."""
    torch.manual_seed(0)
    hap.save(folders.network("dense"), hap.models.build("small"))
    write_json(folders.result("dense"), {})


def test_jobs_wait_for_their_dense_network_and_leave_results(data: Data, folders: Folders) -> None:
    jobs = make_jobs(1)
    assert [j.name for j in pending(jobs, folders)] == ["dense"]
    assert status(jobs, folders) == {"done": [], "ready": ["dense"], "waiting": ["pruned"]}
    work_off(jobs, data, folders, say=quiet)
    result = json.loads(folders.result("pruned").read_text())
    assert status(jobs, folders)["done"] == ["dense", "pruned"]
    assert result["macs_left"] <= 0.5 and result["params_left"] <= 0.3
    model = hap.load(folders.network("pruned"), hap.models.build("small"))
    assert hap.evaluate(model, data).accuracy == result["accuracy_in_half_precision"]
    assert hap.cost(model, torch.zeros(1, 3, 8, 8)).params == result["params"]


def test_a_time_limit_stops_between_epochs_and_the_same_call_goes_on(data: Data, folders: Folders) -> None:
    jobs = make_jobs(2)[:1]
    work_off(jobs, data, folders, seconds=1e-3, say=quiet)
    assert not folders.result("dense").exists()
    work_off(jobs, data, folders, say=quiet)
    stopped = json.loads(folders.result("dense").read_text())
    again = Folders(folders.results / "b", folders.networks / "b", folders.work / "b")
    work_off(jobs, data, again, say=quiet)
    assert stopped["history"]["loss"] == json.loads(again.result("dense").read_text())["history"]["loss"]


def test_one_process_trains_in_a_folder_at_a_time(data: Data, folders: Folders) -> None:
    job = make_jobs(1)[0]
    folders.check()
    with (
        locked(folders.work, "wait"),
        pytest.raises(hap.HapError, match=r"another process works in .*work; wait until"),
    ):
        work_off([job], data, folders, say=quiet)
    assert not folders.result(job.name).exists()
    work_off([job], data, folders, say=quiet)
    assert folders.result(job.name).exists()


def test_results_tell_what_was_stacked(data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "_compiled", lambda network: network)
    put_dense(folders)
    one = make_jobs(1)[1]
    twins = [replace(one, name=f"seed{seed}", recipe=replace(one.recipe, seed=seed)) for seed in range(2)]
    other = replace(one, name="other", recipe=replace(one.recipe, lr=0.02))
    work_off([*twins, other], data, folders, SideBySide(compiled=True, masked_from=0.0), say=quiet)
    found = [json.loads(folders.result(name).read_text()) for name in ("seed0", "seed1", "other")]
    assert [(r["side_by_side"], r["stack"], r["compiled"]) for r in found] == [(2, 2, True)] * 2 + [(1, 1, False)]


def test_numbers_of_networks_less_than_one_are_refused() -> None:
    for option in ("--stack", "--together"):
        found = CliRunner().invoke(app, ["reproduce", "vgg16", "--status", option, "0"])
        assert found.exit_code == 2 and option in found.output
    with pytest.raises(hap.HapError, match=r"together is -1; expected .* at least 1"):
        SideBySide(together=-1)


def test_both_forms_of_training_lead_to_the_same_result(data: Data, folders: Folders) -> None:
    job = make_jobs(2)[1]
    results, networks = {}, {}
    for form, masked_from in (("trimmed", 0.0), ("pruned", 2.0)):
        place = Folders(folders.results / form, folders.networks / form, folders.work / form)
        put_dense(place)
        work_off([job], data, place, seconds=1e-3, say=quiet, manner=SideBySide(masked_from=masked_from))
        assert not place.result(job.name).exists()
        work_off([job], data, place, say=quiet, manner=SideBySide(masked_from=masked_from))
        results[form] = json.loads(place.result(job.name).read_text())
        networks[form] = hap.load(place.network(job.name), hap.models.build("small")).state_dict()
    trimmed, pruned = results["trimmed"], results["pruned"]
    assert (trimmed["trained"], pruned["trained"]) == ("trimmed", "pruned")
    assert sum(implanted for _, implanted, _ in trimmed["units"].values()) > 0
    for same in ("params", "macs", "units", "accuracy_before_finetuning", "prune"):
        assert trimmed[same] == pruned[same]
    assert trimmed["history"]["loss"] == pytest.approx(pruned["history"]["loss"], rel=1e-3)
    for name, tensor in networks["pruned"].items():
        torch.testing.assert_close(networks["trimmed"][name], tensor, rtol=0.02, atol=0.02)


def test_a_dense_network_that_was_not_kept_is_trained_again_only_where_a_job_needs_it(folders: Folders) -> None:
    jobs = make_jobs()
    put_dense(folders)
    folders.network("dense").unlink()
    assert status(jobs, folders) == {"done": [], "ready": ["dense"], "waiting": ["pruned"]}
    folders.work.mkdir(parents=True, exist_ok=True)
    folders.started("pruned").touch()
    assert status(jobs, folders) == {"done": ["dense"], "ready": ["pruned"], "waiting": []}
    taught = [jobs[0], replace(jobs[1], teacher=True)]
    assert status(taught, folders) == {"done": [], "ready": ["dense"], "waiting": ["pruned"]}
    write_json(folders.result("pruned"), {})
    assert status(jobs, folders) == {"done": ["dense", "pruned"], "ready": [], "waiting": []}


def test_dense_networks_may_be_kept_beside_the_results(data: Data, folders: Folders) -> None:
    put_dense(folders)
    job = make_jobs(1)[1]
    kept = folders.results / "networks" / "dense.safetensors"
    kept.parent.mkdir(parents=True)
    folders.network("dense").rename(kept)
    assert folders.dense("dense") == kept and pending([job], folders) == [job]
    work_off([job], data, folders, say=quiet)
    assert folders.network("pruned").exists() and [p.name for p in kept.parent.iterdir()] == [kept.name]
    put_dense(folders)
    assert folders.dense("dense") == folders.network("dense"), "what was trained last counts"


def test_eigendamage_is_a_job_like_any_other(data: Data, folders: Folders) -> None:
    put_dense(folders)
    job = replace(make_jobs(1)[1], name="eigen", prune=EigenStep("eigen", 0.5))
    work_off([job], data, folders, seconds=1e-3, say=quiet)
    work_off([job], data, folders, say=quiet)
    result = json.loads(folders.result("eigen").read_text())
    assert result["prune"]["criterion"] == "eigendamage" and result["ranks"] and result["units"] is None
    assert 0.4 < result["params_left"] <= 0.5 and result["trained"] == "pruned"
    model = open_started(folders.network("eigen"), "small", 10)
    assert hap.evaluate(model, data).accuracy == result["accuracy_in_half_precision"]


def test_a_plan_of_another_library_is_waited_for_and_carried_out(data: Data, folders: Folders) -> None:
    put_dense(folders)
    job = replace(make_jobs(1)[1], name="b", prune=BorrowedStep("theirs", 0.95, "taylor"))
    assert pending([job], folders) == []
    removed = {"layer1.0.conv1": [0, 3, 5], "layer3.0.conv1": list(range(40))}
    write_json(folders.plans / "theirs.json", {"coupling": "joint", "removed": removed})
    work_off([job], data, folders, say=quiet)
    result = json.loads(folders.result("b").read_text())
    assert result["trained"] == "trimmed"
    assert result["units"]["layer1.0.conv1"] == [13, 0, 3] and result["units"]["layer3.0.conv1"] == [24, 0, 40]
    tight = replace(job, name="c", prune=BorrowedStep("theirs", 0.5, "taylor"))
    with pytest.raises(hap.HapError, match=r"theirs\.json leaves 0\.\d+ of the FLOPs; expected at most 0\.5"):
        work_off([tight], data, folders, say=quiet)


def test_all_the_help_of_protocol_best_goes_together(data: Data, folders: Folders) -> None:
    put_dense(folders)
    best = next(j for j in cifar10_jobs() if j.name == "resnet56-best-implant-53.0-seed0")
    recipe = replace(best.recipe, epochs=1, batch=32, precision="fp32")
    job = replace(best, model="small", recipe=recipe, dense="dense")
    assert best.images == 10_000
    assert best.teacher and best.prune.compensate and best.prune.per_cost and recipe.distill and recipe.ema
    work_off([job], data, folders, say=quiet)
    result = json.loads(folders.result(job.name).read_text())
    assert result["images"] == len(data.train)
    assert result["teacher"] == "dense" and result["macs_left"] <= 0.53
    assert sum(implanted for _, implanted, _ in result["units"].values()) > 0


def test_targets_select_jobs_with_the_dense_ones_they_need_and_unknown_ones_are_refused() -> None:
    jobs = make_jobs()
    assert [j.name for j in select(jobs, "rows")] == ["dense", "pruned"]
    assert select(jobs, "all") == jobs
    assert [j.name for j in select(jobs, "tables", "d*")] == ["dense"]
    assert [j.name for j in select(jobs, "all", "pr*")] == ["dense", "pruned"]
    with pytest.raises(hap.HapError, match=r"no run of rows is named like 'x\*'"):
        select(jobs, "rows", "x*")
    with pytest.raises(hap.HapError, match=r"target is 'nothing'.*rows, tables"):
        select(jobs, "nothing")


# ---- what was interrupted -----------------------------------------------------------------------------------


def twins(epochs: int, count: int = 3) -> list[Job]:
    """Jobs that differ in their seed, so that they train side by side."""
    one = make_jobs(epochs)[0]
    return [replace(one, name=f"seed{s}", recipe=replace(one.recipe, seed=s)) for s in range(count)]


def losses(folders: Folders, jobs: Sequence[Job]) -> list[list[float]]:
    return [json.loads(folders.result(job.name).read_text())["history"]["loss"] for job in jobs]


def undisturbed(folders: Folders, data: Data, jobs: Sequence[Job]) -> list[list[float]]:
    """The losses of the same jobs, trained elsewhere in one go."""
    place = Folders(folders.results / "whole", folders.networks / "whole", folders.work.with_name("whole"))
    work_off(jobs, data, place, SideBySide(stack=1), say=quiet)
    return losses(place, jobs)


def count_epochs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, for each epoch of training from now on, how many networks take part in it."""
    trained: list[int] = []
    run_epoch = training._run_epoch
    monkeypatch.setattr(training, "_run_epoch", lambda runs, *a: trained.append(len(runs)) or run_epoch(runs, *a))
    return trained


def test_finished_networks_are_recorded_later_where_recording_was_cut_short(
    data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = twins(1)
    record = campaign._record

    def cut_short(job: Job, *rest: Any) -> None:
        if job is jobs[1]:
            raise KeyboardInterrupt
        record(job, *rest)

    monkeypatch.setattr(campaign, "_record", cut_short)
    with pytest.raises(KeyboardInterrupt):
        work_off(jobs, data, folders, SideBySide(stack=1), say=quiet)
    monkeypatch.undo()
    assert status(jobs, folders)["done"] == ["seed0"]
    trained = count_epochs(monkeypatch)
    work_off(jobs[2:], data, folders, SideBySide(together=1), say=quiet)
    assert status(jobs, folders)["done"] == ["seed0", "seed2"]
    work_off(jobs, data, folders, SideBySide(together=1), say=quiet)
    assert trained == [] and not list(folders.work.rglob("*.safetensors"))
    assert json.loads(folders.result("seed1").read_text())["side_by_side"] == 3
    assert losses(folders, jobs) == undisturbed(folders, data, jobs)


def test_a_batch_goes_on_whatever_is_asked_for_next(
    data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, said = twins(3), []
    other = replace(make_jobs(1)[0], name="other", model="smaller")
    trained = count_epochs(monkeypatch)
    work_off(jobs, data, folders, SideBySide(stack=1), seconds=1e-3, say=quiet)
    work_off(jobs[1:2], data, folders, SideBySide(together=8, stack=1), say=said.append)
    assert status(jobs, folders)["done"] == ["seed1"] and trained == [3, 1, 1]
    assert said[0].startswith("going on with seed1, begun in ")
    work_off([other, *jobs], data, folders, SideBySide(together=4, stack=1, masked_from=2.0), say=quiet)
    assert trained == [3, 1, 1, 2, 2, 1], "what was interrupted comes first, without its first epoch"
    assert losses(folders, jobs) == undisturbed(folders, data, jobs)


def test_fewer_networks_may_go_on_together_than_began(
    data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = twins(2)
    work_off(jobs, data, folders, SideBySide(stack=1), seconds=1e-3, say=quiet)
    trained = count_epochs(monkeypatch)
    work_off(jobs, data, folders, SideBySide(together=2, stack=1), say=quiet)
    assert trained == [2, 1]
    assert losses(folders, jobs) == undisturbed(folders, data, jobs)


def test_a_batch_goes_on_in_the_shape_that_it_began_in(data: Data, folders: Folders) -> None:
    put_dense(folders)
    job = make_jobs(2)[1]
    work_off([job], data, folders, SideBySide(masked_from=0.0), seconds=1e-3, say=quiet)
    work_off([job], data, folders, SideBySide(masked_from=2.0), say=quiet)
    assert json.loads(folders.result(job.name).read_text())["trained"] == "trimmed"


def test_the_shape_that_networks_share_is_that_of_all_who_began(data: Data, folders: Folders) -> None:
    put_dense(folders)
    large, small = (replace(make_jobs(2)[1], name=f"p{f}", prune=PruneStep(f"p{f}", flops=f)) for f in (0.9, 0.4))
    manner = SideBySide(masked_from=0.0)
    work_off([large, small], data, folders, manner, seconds=1e-3, say=quiet)
    [note] = folders.work.glob("*/batch.json")
    widths = json.loads(note.read_text())["widths"]
    work_off([small], data, folders, manner, say=quiet)
    [note] = folders.work.glob("*/batch.json")
    assert json.loads(note.read_text())["jobs"] == [large.name] and json.loads(note.read_text())["widths"] == widths
    work_off([large], data, folders, manner, say=quiet)
    found = [json.loads(folders.result(job.name).read_text()) for job in (large, small)]
    assert [result["trained"] for result in found] == ["trimmed"] * 2
    most = {name: sum(parts[:2]) for name, parts in found[0]["units"].items()}
    assert widths and all(most[name] <= width for name, width in widths.items())
    assert any(sum(found[1]["units"][name][:2]) <= width - 8 for name, width in widths.items())


def test_a_batch_whose_note_tells_no_widths_goes_on_in_the_dense_shape(
    data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_dense(folders)
    job = make_jobs(2)[1]
    with monkeypatch.context() as patch:
        patch.setattr(campaign, "common_widths", lambda *_: {})
        work_off([job], data, folders, SideBySide(masked_from=0.0), seconds=1e-3, say=quiet)
    [note] = folders.work.glob("*/batch.json")
    record = json.loads(note.read_text())
    assert record.pop("widths") == {}
    write_json(note, record)
    work_off([job], data, folders, SideBySide(masked_from=0.0), say=quiet)
    assert json.loads(folders.result(job.name).read_text())["trained"] == "masked"


def test_states_that_cannot_be_used_are_named(data: Data, folders: Folders) -> None:
    jobs, said = twins(2, 1), []
    work_off(jobs, data, folders, seconds=1e-3, say=quiet)
    note = next(folders.work.rglob("batch.json"))
    note.write_text("{")
    stray = folders.work / "stray" / "training.safetensors"
    stray.parent.mkdir()
    stray.touch()
    work_off(twins(1, 2)[1:], data, folders, say=said.append)
    assert f"{stray} (no batch.json beside it)" in said[0]
    assert f"{note.with_name('training.safetensors')} (batch.json beside it is damaged" in said[0]


def test_a_state_without_a_note_goes_on_for_the_command_that_began_it(
    data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = twins(2)
    work_off(jobs, data, folders, seconds=1e-3, say=quiet)
    next(folders.work.rglob("batch.json")).unlink()
    trained = count_epochs(monkeypatch)
    work_off(jobs, data, folders, say=quiet)
    assert trained == [3]


def test_a_state_of_other_settings_is_refused_with_its_place(data: Data, folders: Folders) -> None:
    jobs = twins(2, 1)
    work_off(jobs, data, folders, seconds=1e-3, say=quiet)
    changed = replace(jobs[0], recipe=replace(jobs[0].recipe, lr=0.02))
    state = next(folders.work.rglob("training.safetensors"))
    with pytest.raises(hap.HapError, match=rf"{state} is of another recipe \(lr is 0\.01, expected 0\.02\)"):
        work_off([changed], data, folders, say=quiet)
    assert state.exists()


def test_of_two_states_of_a_job_the_last_one_counts(
    data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stop leaves them in the middle of dividing a state."""
    jobs = twins(3, 2)
    work_off(jobs, data, folders, seconds=1e-3, say=quiet)
    monkeypatch.setattr(batches.Batch, "remove", lambda _: None)
    work_off(jobs[:1], data, folders, seconds=1e-3, say=quiet)
    monkeypatch.undo()
    trained = count_epochs(monkeypatch)
    work_off(jobs, data, folders, say=quiet)
    assert trained == [1, 1, 1], "one epoch of the first is left, two of the second"


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(
    data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = count_epochs(monkeypatch)
    for folder in (folders.results, folders.networks, folders.work):
        folder.write_text("a file")
        with pytest.raises(hap.HapError, match=f"cannot write {folder}.*a folder you may write to"):
            work_off(make_jobs(1), data, folders, say=quiet)
        folder.unlink()
    assert trained == []


def test_only_more_than_no_time_may_be_given(data: Data, folders: Folders) -> None:
    for seconds in (0, -3):
        with pytest.raises(hap.HapError, match=f"seconds is {seconds}; expected .* more than 0"):
            work_off(make_jobs(1), data, folders, seconds=seconds)
        found = CliRunner().invoke(app, ["reproduce", "vgg16", "--status", "--seconds", str(seconds)])
        assert found.exit_code == 2 and f"--seconds is {seconds}; expected" in found.output


def test_a_stop_in_time_says_what_is_left_and_how_to_go_on(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = importlib.import_module("hap_reproduction.cli.reproduce")
    monkeypatch.setattr(command, "jobs", lambda: twins(2))
    monkeypatch.setattr(command, "load_data", lambda *_: data)
    places = [f"--{what}={tmp_path / what}" for what in ("results", "networks", "work")]
    begun = ["reproduce", "tables", "--data", "there", *places]
    found = CliRunner().invoke(app, [*begun, "--seconds", "0.001"])
    assert found.exit_code == 0, found.output
    assert "training 3 networks side by side for 0 s, to the end of an epoch and for one at least" in found.output
    assert "stopped for --seconds 0.001: 3 of 3 runs could go on or begin; the same command does so" in found.output
    assert "hap reproduce tables --status lists what is left" in found.output
    found = CliRunner().invoke(app, [*begun, "--jobs", "seed?"])
    assert found.exit_code == 0 and "stopped" not in found.output and "2/2 epochs" in found.output


def test_patterns_choose_among_looks_as_among_runs(tmp_path: Path) -> None:
    places = [f"--{what}={tmp_path / what}" for what in ("results", "networks", "work")]

    def names(*arguments: str) -> list[str]:
        found = CliRunner().invoke(app, ["reproduce", *arguments, "--status", *places])
        assert found.exit_code == 0, found.output
        return [words[0] for line in found.output.splitlines() if len(words := line.split()) == 3]

    timed = [f"sensitivity-seconds-{model}" for model in ("resnet56", "preresnet29", "wide_resnet32")]
    assert names("all", "--jobs", "sensitivity-sec*") == timed == names("sensitivity", "--jobs", "*-seconds-*")
    dense = "resnet56-dense-paper-seed0"
    assert names("sensitivity", "--jobs", "*probes") == [dense, "sensitivity-probes"]
    assert names("all", "--jobs", "resnet56-dense-paper-seed0") == [dense]
    found = CliRunner().invoke(app, ["reproduce", "sensitivity", "--jobs", "probes", "--status", *places])
    assert found.exit_code == 2
    assert "no run of sensitivity is named like 'probes'; expected one of sensitivity-layers, " in found.output


def test_no_look_begins_when_the_time_is_up(data: Data, folders: Folders) -> None:
    looks = [Study(f"seconds{i}", "small", "seconds", probes=2) for i in range(2)]
    sensitivity.take(looks, data, folders, "abc", quiet, seconds=0)
    assert sensitivity.status(looks, folders)["done"] == []
    sensitivity.take(looks, data, folders, "abc", quiet, seconds=0.01)
    assert sensitivity.status(looks, folders)["done"] == ["seconds0"]


def test_runs_that_wait_for_plans_of_another_library_are_no_success(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = importlib.import_module("hap_reproduction.cli.reproduce")
    places = {what: tmp_path / what for what in ("results", "networks", "work")}
    put_dense(Folders(*places.values()))
    job = replace(make_jobs(1)[1], name="b", prune=BorrowedStep("theirs", 0.95, "taylor"))
    monkeypatch.setattr(command, "jobs", lambda: [make_jobs(1)[0], job])
    monkeypatch.setattr(command, "load_data", lambda *_: data)
    asked = ["reproduce", "rows", "--data", "there", *(f"--{what}={place}" for what, place in places.items())]
    plan = places["results"] / "plans" / "theirs.json"
    shown = CliRunner().invoke(app, [*asked, "--status"])
    assert shown.exit_code == 0 and f"the first for {plan};" in " ".join(shown.output.split())
    found = CliRunner().invoke(app, asked)
    words = " ".join(found.output.split())
    assert found.exit_code == 2 and f"1 of 2 runs wait for what Torch-Pruning removes, the first for {plan}" in words
    assert f"torch_pruning_plans.py --data there --networks {places['networks']} --out {plan.parent}" in words
    plan.parent.mkdir()
    for damaged, why in (
        ("{", "cannot be read: .*"),
        ("[]", "it holds list, .*"),
        ("{}", "it has no coupling, removed"),
    ):
        plan.write_text(damaged)
        with pytest.raises(hap.HapError, match=rf"theirs\.json .*{why}; make it again with benchmarks"):
            work_off([job], data, Folders(*places.values()), say=quiet)


def put_cifar10(folder: Path, images: int) -> None:
    """The archive's files with so many images in each of the six."""
    archive = folder / "cifar-10-batches-bin"
    archive.mkdir(parents=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (archive / f"{name}.bin").write_bytes(bytes(3073 * images))


def test_data_that_is_not_all_of_cifar10_is_refused_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_cifar10(tmp_path / "some", 4)
    assert len(load_data(tmp_path / "some", whole=False).train) == 20
    places = [f"--{what}={tmp_path / what}" for what in ("results", "networks", "work")]
    monkeypatch.chdir(tmp_path)

    def told(data: str) -> str:
        found = CliRunner().invoke(app, ["reproduce", "vgg16", "--data", data, *places])
        assert found.exit_code == 2
        return found.output

    assert "some holds 20 training and 4 test images of 3 x 32 x 32 in 10 classes; expected 50,000" in told("some")
    for name in ("digits", "cifar10"):
        found = told(name)
        assert f"{name} is not a folder: expected the folder that holds cifar-10-batches-bin" in found
        assert "--data-root" not in found


def test_unknown_targets_are_answered_with_all_that_there_are() -> None:
    found = CliRunner().invoke(app, ["reproduce", "nothing", "--status"])
    assert found.exit_code == 2 and "sensitivity" in found.output


# ---- the paper's jobs ---------------------------------------------------------------------------------------


def test_the_papers_jobs_have_distinct_names_and_start_from_jobs_that_exist() -> None:
    jobs = cifar10_jobs()
    names = [j.name for j in jobs]
    assert len(set(names)) == len(names)
    places = {name: i for i, name in enumerate(names)}
    assert all(j.dense is None or places[j.dense] < places[j.name] for j in jobs)
    protocols = {j.name.split("-")[1]: j.recipe.epochs for j in jobs if j.prune and "-epochs-" not in j.name}
    assert protocols == {"paper": 160, "best": 160, "short": 40}
    assert all(j.teacher == ("-best-" in j.name) for j in jobs if j.prune)


@pytest.mark.parametrize(
    ("target", "rows", "runs"),
    [
        ("resnet56", 30, 46),
        ("rankings", 22, 30),
        ("ablation", 21, 25),
        ("implants", 12, 22),
        ("vgg16", 6, 12),
        ("preresnet29", 2, 4),
        ("best", 13, 27),
        ("head-to-head", 12, 12),
        ("curves", 36, 36),
        ("dense", 8, 22),
    ],
)
def test_every_table_has_its_rows_and_seeds(target: str, rows: int, runs: int) -> None:
    jobs = [j for j in cifar10_jobs() if target in j.targets]
    assert len({j.name.rpartition("-seed")[0] for j in jobs}) == rows
    assert len(jobs) == runs


def test_the_telling_jobs_come_first() -> None:
    names = [j.name for j in cifar10_jobs()]
    order = [
        "resnet56-paper-hap-per-cost-10000-images-38.74-seed2",
        "resnet56-paper-hap-38.74-seed0",
        "resnet56-paper-hap-3-probes-38.74-seed0",
        "resnet56-paper-hap-38.74-seed2",
        "vgg16-dense-paper-seed0",
        "vgg16-paper-hap-per-cost-10000-images-7.5-seed2",
        "vgg16-paper-hap-7.5-seed0",
        "preresnet29-paper-hap-31.0-seed0",
        "resnet56-best-implant-53.0-seed0",
        "resnet56-paper-magnitude-38.74-seed0",
        "vgg16-best-implant-40.0-seed0",
        "wideresnet32-short-bn-scale-18.0-seed0",
        "wideresnet32-short-eigendamage-50.0-seed0",
    ]
    assert [names.index(n) for n in order] == sorted(names.index(n) for n in order)


def test_jobs_train_beside_others_of_their_network_and_recipe_alone(data: Data, folders: Folders) -> None:
    small, longer = make_jobs(1)[0], replace(make_jobs(2)[0], name="longer")
    seeded = replace(small, name="seed1", recipe=replace(small.recipe, seed=1))
    other = replace(small, name="other", model="smaller")
    said: list[str] = []
    work_off([small, other, longer, seeded], data, folders, say=said.append)
    finished = [line.partition(":")[0] for line in said if "epochs" in line]
    assert finished == ["dense", "seed1", "other", "longer"]


@pytest.mark.parametrize(("init", "reached"), [("zero", False), ("center", True)])
def test_a_gradient_reaches_implants_behind_a_negative_bias_unless_they_are_zero(init: str, reached: bool) -> None:
    torch.manual_seed(0)
    model, x = hap.models.build("small").eval(), torch.randn(4, 3, 8, 8)
    for name, module in model.named_modules():
        if name.endswith("bn1"):
            torch.nn.init.constant_(module.bias, -0.1)
    groups = hap.trace(model, x, "union")
    scores = hap.score(model, groups, [(x, torch.arange(4))], functional.cross_entropy, "magnitude")
    hap.apply_(model, hap.plan(groups, scores, hap.Budget(flops=0.5), hap.Pointwise(0.5, init)), x)
    functional.cross_entropy(model.train()(x), torch.arange(4)).backward()
    grads = [p.grad for name, p in model.named_parameters() if "conv1.implant" in name]
    assert grads and any(bool(grad.any()) for grad in grads) == reached


def test_implants_start_where_a_gradient_reaches_them() -> None:
    steps = {j.name: j.prune for j in cifar10_jobs() if isinstance(j.prune, PruneStep) and j.prune.implant}
    from_zero = {name for name, step in steps.items() if step.implant_init == "zero"}
    assert from_zero == {f"resnet56-paper-implant-{p}-seed{s}" for p in (40.7, 23.9) for s in (0, 1)}
    assert {step.implant_init for name, step in steps.items() if "-best-" in name} == {None}
    assert isinstance(steps["vgg16-best-implant-40.0-seed0"].make_implant(), hap.Pointwise)
    assert steps["vgg16-best-implant-40.0-seed0"].make_implant().init == "lstsq"


def test_estimates_are_in_epochs_of_resnet56() -> None:
    jobs = {j.name: j for j in cifar10_jobs()}
    assert estimate(jobs["resnet56-dense-paper-seed0"]) == 200
    assert estimate(jobs["resnet56-best-implant-53.0-seed0"]) == pytest.approx(160 * 4 / 3)
    assert estimate(jobs["vgg16-paper-hap-7.5-seed0"]) == pytest.approx(160 * 313201664 / 125747840)


def test_handed_out_networks_are_of_seed_0() -> None:
    names, jobs = headline_networks(), {j.name: j for j in cifar10_jobs()}
    assert names["resnet56-cifar10-hap-implant-40"] == "resnet56-paper-implant-centre-40.7-seed0"
    assert len(names) == 19 and all(jobs[run].recipe.seed == 0 for run in names.values())


def test_status_lists_the_jobs_in_order_with_their_state_and_cost(tmp_path: Path) -> None:
    places = [f"--{what}={tmp_path / what}" for what in ("results", "networks", "work")]
    found = CliRunner().invoke(app, ["reproduce", "vgg16", "--status", *places])
    lines = [line.split() for line in found.output.splitlines() if line.strip().startswith("vgg16")]
    assert lines[0] == ["vgg16-dense-paper-seed0", "ready", "498"]
    assert lines[3] == ["vgg16-paper-hap-per-cost-10000-images-29.7-seed0", "waiting", "399"]
    assert "0 of 15 networks trained" in found.output
    looks = CliRunner().invoke(app, ["reproduce", "sensitivity", *places])
    assert ["sensitivity-probes", "waiting", "-"] in [line.split() for line in looks.output.splitlines()]


# ---- figures about the scores -------------------------------------------------------------------------------


def test_looks_at_the_scores_leave_records(data: Data, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "FLOPS", removal.FLOPS[:1])
    put_dense(folders)
    looks = [
        Study("layers", "small", "layers", "dense"),
        Study("probes", "small", "probes", "dense", probes=3),
        Study("seconds", "small", "seconds", probes=2),
        Study("images", "small", "images", "dense", images=(8, 48)),
        Study("removal", "small", "removal", "dense", images=(8,)),
        Study("one-shot", "small", "one-shot", "dense"),
        Study("later", "small", "layers", "none yet"),
    ]
    names = ["layers", "probes", "seconds", "images", "removal", "one-shot"]
    assert sensitivity.status(looks, folders) == {"done": [], "ready": names, "waiting": ["later"]}
    sensitivity.take(looks, data, folders, "abc", quiet)
    records = {name: json.loads(folders.result(name).read_text()) for name in names}
    model = hap.load(folders.network("dense"), hap.models.build("small")).eval()
    groups = hap.trace(model, torch.zeros(1, 3, 8, 8), "union")
    scores = hap.score(model, groups, data.calibration(48, 0), functional.cross_entropy, "hessian")
    stored = torch.tensor(records["layers"]["layers"]["layer1.0.conv1"]["scores"], dtype=torch.float64)
    torch.testing.assert_close(stored, scores["layer1.0.conv1"], rtol=1e-4, atol=0)
    fates = {f for layer in records["layers"]["layers"].values() for f in layer["fate"]}
    assert fates == {"kept", "implanted", "removed"}
    assert [len(c["mean"]) for c in records["probes"]["channels"]] == [3] * 4
    assert records["seconds"]["exact_seconds"] > 0 and records["seconds"]["probes"] == 2
    few, all_images = records["images"]["rows"]
    assert (few["images"], all_images["images"]) == (8, 48) and 0 < few["carried_by_a_twentieth"] < 1
    assert all_images["rank_correlation"] > 0.99 and all_images["kept_in_both"] > few["kept_in_both"]
    assert records["removal"]["images"] == 8 and records["one-shot"]["tested_on"] == len(data.test)
    assert all(r["revision"] == "abc" for r in records.values())
    assert sensitivity.status(looks, folders)["ready"] == []


def test_the_stored_plans_of_torch_pruning_fit_resnet56_and_its_budgets() -> None:
    jobs = [j for j in cifar10_jobs() if isinstance(j.prune, BorrowedStep)]
    groups = hap.trace(hap.models.build("resnet56").eval(), torch.zeros(1, 3, 32, 32), "joint")
    assert len(jobs) == 6
    for job in jobs:
        record = json.loads((ROOT / "results" / "cifar10" / "plans" / f"{job.prune.name}.json").read_text())
        plan = hap.draft(groups, record["removed"])
        assert (record["dense"], record["criterion"]) == (job.dense, job.prune.criterion)
        assert 0.95 * job.prune.flops < record["macs_left"] <= job.prune.flops
        assert plan.after.macs / plan.before.macs == record["macs_left"] and record["images"] == 512

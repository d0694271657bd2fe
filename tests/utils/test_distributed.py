"""One process and several give the same scores, the same plan and the same training."""

from __future__ import annotations

import copy
import os
import runpy
import socket
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import hap
from cases import CASES
from checks import traced
from hap.cli import app
from hap.scoring import gauss_newton
from hap.utils import distributed

CRITERIA = {
    "exact": hap.HessianTrace(method="exact"),
    "hutchinson": hap.HessianTrace(method="hutchinson", probes=30, chunk=5),
    "taylor": hap.Taylor(),
    "fisher": hap.DiagonalFisher(),
    "obd": hap.OBD(probes=30),
    "reconstruction": hap.Reconstruction(),
}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    sizes = (4, 6, 3)
    return [
        (torch.randn(n, 3, 8, 8, generator=generator).double(), torch.randint(0, 5, (n,), generator=generator))
        for n in sizes
    ]


def scored(criterion: str, share: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    model, _ = CASES["residual"]()
    return dict(hap.score(model, traced("residual", "joint"), share, F.cross_entropy, CRITERIA[criterion]))


def plan_of(scores: dict[str, torch.Tensor]) -> str:
    return hap.plan(traced("residual", "joint"), hap.Scores(scores), hap.Budget(params=0.5)).to_json()


def refitted(share: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A pruned network that is solved anew on these inputs, of which each batch has four or eight."""
    model, example = CASES["residual"]()
    dense, groups = copy.deepcopy(model), traced("residual", "joint")
    plan = hap.plan(groups, hap.score(model, groups, None, None, "magnitude"), hap.Budget(channels=0.6))
    report = hap.refit_(hap.apply_(model, plan, example), dense, share, plan, progress=False)
    assert report.after < report.before
    about = {"error": torch.tensor(report.after), "solved": torch.tensor([x.ridge or 0.0 for x in report.layers])}
    return {name: tensor.detach() for name, tensor in model.state_dict().items()} | about


def in_fours() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(4)).double()
    return [(x[:8], x), (x[8:16], x), (x[16:], x)]


def sharded_scores(share: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Scores of a model whose parameters lie in shards over the processes, block by block."""
    from torch.distributed.fsdp import fully_shard  # takes long to import

    model, _ = CASES["residual"]()
    groups, mesh = traced("residual", "joint"), init_device_mesh("cpu", (2,))
    for block in (*model.children(), model):
        if next(block.parameters(), None) is not None:
            fully_shard(block, mesh=mesh)
    return dict(hap.score(model, groups, share, F.cross_entropy, CRITERIA["exact"])), model


def trained() -> dict[str, torch.Tensor]:
    """A network without BatchNorm, whose statistics would be those of each process's part of a batch."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (24, 1, 6, 6), dtype=torch.uint8, generator=generator)
    split = hap.data.Split(images, torch.randint(0, 3, (24,), generator=generator))
    data = hap.data.Data(split, split, 3, (0.5,), (0.5,), "noise")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    history = hap.train(model, data, hap.Recipe(epochs=2, batch=8, lr=0.05, ema=0.9, warmup=0), progress=False)
    assert history.epochs == 2
    return {n: p.detach() for n, p in model.named_parameters()} | {"loss": torch.tensor(history.loss)}


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for criterion in CRITERIA:
        share = batches()[:1] if rank == 0 else batches()[1:]
        torch.save(scored(criterion, share), f"{folder}/{criterion}-{rank}.pt")
    text = distributed.from_first(lambda: plan_of(torch.load(f"{folder}/exact-0.pt", weights_only=True)))
    Path(f"{folder}/plan-{rank}.json").write_text(text)
    torch.save(trained(), f"{folder}/trained-{rank}.pt")
    torch.save(refitted(in_fours()[:1] if rank == 0 else in_fours()[1:]), f"{folder}/refitted-{rank}.pt")
    even = [(x[: len(x) // 2 * 2], y[: len(y) // 2 * 2]) for x, y in batches()]
    for name, at_once in (("whole", 5), ("parts", 2)):
        gauss_newton.Survey.vectors_at_once = lambda self, count, n=at_once: n
        scores, model = sharded_scores(distributed.shard(even))
        torch.save(scores, f"{folder}/sharded-{name}-{rank}.pt")
    sharded = all(distributed.is_sharded(p) and p.grad is None for p in model.parameters())
    Path(f"{folder}/sharded-{rank}.txt").write_text(f"{sharded}\n" + "\n".join(refusals(rank, model)))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process while Python takes itself apart


def refusals(rank: int, sharded: nn.Module) -> list[str]:
    """What the processes say to what cannot be done together."""

    def fail() -> str:
        raise hap.HapError("no plan")

    groups = traced("residual", "joint")
    calls = (
        lambda: distributed.from_first(fail),
        lambda: distributed.agree(rank, "the epoch"),
        lambda: distributed.shard([(torch.zeros(1, 2), torch.zeros(1))]) if rank else fail(),
        lambda: hap.score(sharded, groups, batches(), F.cross_entropy, "taylor"),
        lambda: hap.score(sharded, groups, batches()[rank:], F.cross_entropy, CRITERIA["exact"]),
    )
    said = []
    for call in calls:
        with pytest.raises(hap.HapError) as caught:
            call()
        said.append(str(caught.value))
    return said


PRELOADED = ["hap.cli", "pytest", "torch.distributed.fsdp", "torch.export._trace", "typer.testing"]
"""What processes that are forked import once for all of them, some of it only when something is traced."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    forkserver.set_forkserver_preload(PRELOADED)
    mp.start_processes(work, (str(path),), nprocs=2, start_method="forkserver")
    return path


def same(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    assert seen.keys() == wanted.keys()
    return all(float((seen[n] - wanted[n]).abs().max()) <= tolerance * float(wanted[n].abs().max()) for n in wanted)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_two_processes_score_like_one(criterion: str, folder: Path) -> None:
    alone = scored(criterion, batches())
    for rank in range(2):
        assert same(torch.load(folder / f"{criterion}-{rank}.pt", weights_only=True), alone)


def test_two_processes_plan_like_one(folder: Path) -> None:
    plans = [(folder / f"plan-{rank}.json").read_text() for rank in range(2)]
    assert plans[0] == plans[1] == plan_of(scored("exact", batches()))


def test_two_processes_train_like_one(folder: Path) -> None:
    alone = trained()
    for rank in range(2):
        assert same(torch.load(folder / f"trained-{rank}.pt", weights_only=True), alone)


def test_two_processes_refit_like_one(folder: Path) -> None:
    alone = refitted(in_fours())
    for rank in range(2):
        assert same(torch.load(folder / f"refitted-{rank}.pt", weights_only=True), alone, 1e-8)


@pytest.mark.parametrize("at_once", ["whole", "parts"])
def test_sharded_parameters_score_like_whole_ones(at_once: str, folder: Path) -> None:
    """FSDP2 gathers one block at a time, going forward and back; the model is left in shards, without gradients."""
    even = [(x[: len(x) // 2 * 2], y[: len(y) // 2 * 2]) for x, y in batches()]
    alone = scored("exact", even)
    for rank in range(2):
        assert same(torch.load(folder / f"sharded-{at_once}-{rank}.pt", weights_only=True), alone, 1e-12)
        assert (folder / f"sharded-{rank}.txt").read_text().startswith("True\n")


def test_what_cannot_be_done_together_is_refused_everywhere(folder: Path) -> None:
    for rank in range(2):
        plan, epoch, samples, taylor, uneven = (folder / f"sharded-{rank}.txt").read_text().splitlines()[1:]
        assert plan == "no plan"
        assert epoch == "the epoch differs between the processes: [0, 1]; expected the same everywhere"
        assert "has no sample" in samples if rank else samples == "no plan"
        assert "sharded over the processes" in taylor and "sampled" in taylor
        assert "number of batches" in uneven


# ---- the command line ---------------------------------------------------------------------------------------

PRUNE = ["prune", "--params", "0.5", "--calibration", "16", "--device", "cpu"]


def of_two() -> list[dict[str, str]]:
    """What torchrun tells each of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def command(told: dict[str, str], arguments: list[str], said: Path, dies: bool = False) -> None:
    """`python -m hap ARGUMENTS` in a process that is forked; one that `dies` does so when it is to score."""
    os.environ.update(told)
    torch.set_num_threads(1)
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}-{told['RANK']}.{ending}", os.O_WRONLY | os.O_CREAT), number)
    if dies:
        hap.score = lambda *_: os._exit(7)
    sys.argv = ["hap", *arguments]
    runpy.run_module("hap", run_name="__main__")


def together(arguments: list[str], said: Path, second_dies: bool = False) -> list[int | None]:
    """How the command ends in two processes that are told what torchrun tells them. What they say is written beside
    `said`."""
    forkserver.set_forkserver_preload(PRELOADED)
    running = [
        mp.get_context("forkserver").Process(target=command, args=(told, arguments, said, second_dies and rank == 1))
        for rank, told in enumerate(of_two())
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=120)
    return [process.exitcode for process in running]


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = hap.models.build("digits_resnet").eval()
    about = {"model": "digits_resnet", "classes": 10, "data": "digits", "input": [1, 8, 8]}
    return hap.save(tmp_path / "dense.safetensors", model, about=about)


def test_a_command_in_two_processes(dense: Path, tmp_path: Path) -> None:
    """Planned like one process, written once, shown once."""
    ended = together([*PRUNE, str(dense), "--out", str(tmp_path / "two.safetensors")], tmp_path / "said")
    assert ended == [0, 0], (tmp_path / "said-0.err").read_text()
    assert "wrote" in (tmp_path / "said-0.out").read_text() and not (tmp_path / "said-1.out").read_text()
    alone = CliRunner().invoke(app, [*PRUNE, str(dense), "--out", str(tmp_path / "one.safetensors")])
    assert alone.exit_code == 0
    assert hap.read(tmp_path / "two.safetensors").plan == hap.read(tmp_path / "one.safetensors").plan


def test_a_process_that_dies_ends_the_others(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "pruned.safetensors"
    ended = together([*PRUNE, str(dense), "--out", str(out)], tmp_path / "said", second_dies=True)
    assert ended == [1, 7]
    stderr = (tmp_path / "said-0.err").read_text()
    assert "error: process 0 of 2 has lost another one" in stderr and "Traceback" not in stderr
    assert list(out.parent.iterdir()) == []


def test_commands_for_one_process_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    ended = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert ended.exit_code == 2 and "hap demo runs in one process" in ended.stderr
    assert not (tmp_path / "demo").exists()

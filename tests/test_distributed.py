"""One process and several give the same scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import hap
from cases import CASES

CRITERIA = {
    "exact": hap.HessianTrace(method="exact"),
    "hutchinson": hap.HessianTrace(method="hutchinson", probes=30, chunk=5),
    "taylor": hap.Taylor(),
    "fisher": hap.DiagonalFisher(),
    "obd": hap.OBD(probes=30),
}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    sizes = (4, 6, 3)
    return [
        (torch.randn(n, 3, 8, 8, generator=generator).double(), torch.randint(0, 5, (n,), generator=generator))
        for n in sizes
    ]


def scored(criterion: str, share: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    model, example = CASES["residual"]()
    return dict(hap.score(model, hap.trace(model, example), share, F.cross_entropy, CRITERIA[criterion]))


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for criterion in CRITERIA:
        share = batches()[:1] if rank == 0 else batches()[1:]
        torch.save(scored(criterion, share), f"{folder}/{criterion}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(path),), nprocs=2)
    return path


@pytest.mark.parametrize("criterion", CRITERIA)
def test_two_processes_score_like_one(criterion: str, folder: Path) -> None:
    alone = scored(criterion, batches())
    for rank in range(2):
        shared = torch.load(folder / f"{criterion}-{rank}.pt", weights_only=True)
        assert shared.keys() == alone.keys()
        for name in alone:
            assert torch.allclose(shared[name], alone[name], rtol=1e-5, atol=1e-5 * float(alone[name].abs().max()))

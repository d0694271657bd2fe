"""Scores find how much they can do at once by themselves, and go on by halves when memory runs out."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from cases import CASES
from checks import traced
from hap.scoring import gauss_newton, hutchinson, memory_chunks
from hap.scoring.base import ScoringContext, samples
from hap.scoring.memory_chunks import Pieces, held_by_graph

ONE = {
    "exact": hap.HessianTrace(method="exact"),
    "sampled": hap.HessianTrace(method="sampled", draws=5),
    "hutchinson": hap.HessianTrace(method="hutchinson", probes=12),
}


def problem() -> tuple[nn.Module, Any, list[Any]]:
    model, _ = CASES["residual"]()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 3, 8, 8, generator=generator).double()
    return model, traced("residual", "joint"), [(x, torch.randint(0, 5, (13,), generator=generator))]


def score(criterion: hap.Criterion) -> hap.Scores:
    model, groups, batches = problem()
    return hap.score(model, groups, batches, F.cross_entropy, criterion)


def same(a: hap.Scores, b: hap.Scores) -> bool:
    return all(torch.allclose(a[n], b[n], rtol=1e-10, atol=0) for n in b)


class Narrow:
    """Wraps a function so that it runs out of memory where it is asked for more than `most` at once."""

    def __init__(self, work: Any, most: int, count: Any) -> None:
        self.work, self.most, self.count = work, most, count
        self.asked: list[int] = []

    def __call__(self, *args: Any) -> Any:
        self.asked.append(self.count(*args))
        if self.asked[-1] > self.most:
            raise torch.OutOfMemoryError("injected")
        return self.work(*args)


def narrow_samples(monkeypatch: pytest.MonkeyPatch, most: int) -> Narrow:
    narrow = Narrow(gauss_newton._piece, most, lambda problem, batch, *rest: samples(batch))
    monkeypatch.setattr(gauss_newton, "_piece", narrow)
    return narrow


def narrow_probes(monkeypatch: pytest.MonkeyPatch, most: int) -> Narrow:
    work = hutchinson._products
    narrow = Narrow(work, most, lambda weights, gradients, share, vectors: len(next(iter(vectors.values()))))
    monkeypatch.setattr(hutchinson, "_products", narrow)
    return narrow


@pytest.mark.parametrize("method", ["exact", "sampled"])
def test_samples_are_halved_when_memory_runs_out(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = score(ONE[method])
    narrow = narrow_samples(monkeypatch, 3)
    seen = score(ONE[method])
    assert narrow.asked == [13, 6, 3, 3, 3, 3, 1]
    assert same(seen, wanted) and same(seen.errors, wanted.errors)


def test_probes_are_halved_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = score(ONE["hutchinson"])
    narrow = narrow_probes(monkeypatch, 2)
    seen = score(ONE["hutchinson"])
    assert narrow.asked[:3] == [9, 4, 2] and set(narrow.asked[2:]) == {2}  # 128 samples x probes at once, of 13 samples
    assert same(seen, wanted)


def test_what_does_not_fit_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_samples(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        score(ONE["exact"])

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(ScoringContext, "evaluate", full)
    with pytest.raises(hap.HapError, match=r"batch of 13 does not fit into memory.*smaller batches"):
        score(ONE["hutchinson"])


@pytest.mark.parametrize("method", ONE)
def test_little_free_memory_means_small_pieces(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = score(ONE[method])
    narrow = narrow_probes(monkeypatch, 99) if method == "hutchinson" else narrow_samples(monkeypatch, 99)
    monkeypatch.setattr(memory_chunks, "free_bytes", lambda device: 1000)
    assert same(score(ONE[method]), wanted)
    assert set(narrow.asked) == {1}


def test_pieces_cover_everything_once() -> None:
    pieces, seen = Pieces(4), []

    def work(part: slice) -> list[int]:
        if part.start == 4 and part.stop - part.start > 1:
            raise torch.OutOfMemoryError("injected")
        return list(range(10))[part]

    for _, values in pieces.of(10, work):
        seen += values
    assert seen == list(range(10)) and pieces.size == 1


def test_what_a_graph_holds() -> None:
    """A linear layer keeps its input, a ReLU its result; parameters do not count."""
    layer, x = nn.Linear(10, 20), torch.randn(3, 10)
    with held_by_graph() as held:
        output = F.relu(layer(x))
    assert held() == 4 * (x.numel() + output.numel())


def test_memory_of_resnet56_is_within_twice_a_training_steps() -> None:
    """By count: what the graph holds and the gradients alive at once, beside the graph of a training step."""
    model = hap.models.build("resnet56").eval()
    x, y = torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,))
    found = gauss_newton.survey(ScoringContext(model, hap.trace(model, x[:1]), [(x, y)], F.cross_entropy))
    with held_by_graph() as held:
        kept: Tensor = F.cross_entropy(model.train()(x), y)
    assert kept.requires_grad and found.vectors_at_once(10) == found.outputs == 10
    assert found.graph + gauss_newton.LIVE * found.outputs * found.largest <= held()  # of two images


def test_free_memory_is_that_of_this_machine() -> None:
    free = memory_chunks.free_bytes(torch.device("cpu"))
    assert 2**20 < free < 2**50
    assert memory_chunks.budget(torch.device("cpu")) <= 0.6 * free


@pytest.mark.parametrize("name", ONE)
def test_nothing_outlives_the_scores(name: str) -> None:
    """Neither graphs nor activations: a graph that holds itself would never go, whatever collects garbage."""

    def living() -> int:
        gc.collect()
        return sum(type(x) in (Tensor, nn.Parameter) for x in gc.get_objects())

    model, groups, batches = problem()
    counts = []
    for _ in range(3):
        hap.score(model, groups, batches, F.cross_entropy, ONE[name])
        counts.append(living())
    assert counts[0] == counts[1] == counts[2]

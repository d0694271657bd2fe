"""latency and budgets of time: what is timed and in which order, and that a budget is met whatever time depends on."""

import copy
import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hap
from cases import CASES, Case, randomise
from checks import assert_unchanged, run, snapshot
from hap.pruning.latency import Latency, Stopwatch

timing = importlib.import_module("hap.pruning.latency")  # hap.latency is the function


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ]
    return nn.Sequential(*layers).eval(), torch.randn(1, 3, 8, 8)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_what_is_recorded(backend: str) -> None:
    model, example = small()
    model.train()
    before, threads = snapshot(model), torch.get_num_threads()
    found = hap.latency(model, example, runs=5, warmup=1, backend=backend, threads=2)
    assert_unchanged(model, before)
    assert torch.get_num_threads() == threads
    assert (found.runs, found.warmup, found.threads, found.device, found.backend) == (5, 1, 2, "cpu", backend)
    assert len(found.times) == 5 and min(found.times) <= found.median <= max(found.times) and found.spread >= 0


def linear_layers() -> tuple[nn.Module, Tensor]:
    """Without a function between the layers, so that nothing of it has to go through a compiler of C++."""
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4))
    return randomise(model).eval(), torch.randn(3, 6)


@pytest.mark.parametrize(
    ("make", "backend"),
    [(CASES["residual"], "onnxruntime"), (CASES["named_inputs"], "onnxruntime"), (linear_layers, "compile")],
)
def test_backends_compute_what_the_model_does(make: Case, backend: str) -> None:
    model, example = make()
    model = model.float()
    example = torch.utils._pytree.tree_map(lambda x: x.float() if isinstance(x, Tensor) else x, example)
    with Stopwatch(example, backend) as watch:
        seen = torch.utils._pytree.tree_leaves(watch.add(model)())
    for a, b in zip(run(model, example), seen, strict=True):
        torch.testing.assert_close(a, torch.as_tensor(b), rtol=1e-4, atol=1e-5)


class Notes(nn.Module):
    def __init__(self, name: str, notes: list[tuple[str, bool]]):
        super().__init__()
        self.name, self.notes = name, notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append((self.name, self.training))
        return x


def test_models_take_turns_in_eval_mode() -> None:
    notes: list[tuple[str, bool]] = []
    models = [Notes(name, notes).train() for name in "ab"]
    found = hap.compare_latency(models, torch.zeros(1), runs=3, warmup=1)
    assert [len(f.times) for f in found] == [3, 3]
    assert (
        "".join(name for name, _ in notes) == "bbaa" + "aabb" + "bbaa" + "aabb"
    )  # a call that warms up, then one timed
    assert not any(training for _, training in notes)
    assert all(model.training for model in models)


def test_a_ratio_is_the_median_over_rounds() -> None:
    def of(*times: float) -> Latency:
        return Latency(0.0, 0.0, len(times), 0, 1, "cpu", "eager", times)

    assert of(1, 10, 100, 7, 2).ratio_to(of(2, 20, 200, 1, 4)) == 0.5  # four rounds agree, whatever the load was
    with pytest.raises(hap.HapError, match="2 rounds against 1"):
        of(1, 2).ratio_to(of(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "tensorrt"}, "backend is 'tensorrt'; expected one of eager, compile, onnxruntime"),
        ({"threads": 0}, "threads=0; expected at least 1"),
        ({"runs": 1}, "runs=1"),
        ({"warmup": -1}, "warmup=-1"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        hap.latency(*small(), **options)


# ---- budgets of time: on a machine whose times are known ----------------------------------------------------


def steps_of(multiple: int) -> Callable[[nn.Module, Tensor], float]:
    """Time of a machine that computes channels in blocks of so many, and has an overhead for each layer."""

    def seconds(model: nn.Module, example: Tensor) -> float:
        padded = [
            [-(-n // multiple) * multiple for n in m.weight.shape[:2]]
            for m in model.modules()
            if isinstance(m, nn.Conv2d)
        ]
        return sum(rows * columns + 100 for rows, columns in padded)

    return seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the clock: a call takes as long as the function says, 1% of noise added, sometimes twice as long."""

    def install(seconds: Callable[[nn.Module, Tensor], float]) -> None:
        draw = random.Random(0)

        def backend(model: nn.Module, watch: Stopwatch) -> Callable[[], float]:
            known = seconds(model, watch.example)
            return lambda: known * draw.gauss(1, 0.01) * (2 if draw.random() < 0.1 else 1)

        monkeypatch.setitem(timing.BACKENDS, "eager", backend)
        monkeypatch.setattr(timing, "_once", lambda call, device: call())

    return install


def macs(model: nn.Module, example: Tensor) -> float:
    return hap.cost(model, example).macs


def affine(model: nn.Module, example: Tensor) -> float:
    return macs(model, example) + 500_000


def found_for(
    model: nn.Module, example: Tensor, latency: float, **options: Any
) -> hap.pruning.plan_for_latency.TimedPlan:
    groups = hap.trace(model, example)
    scores = hap.score(model, groups, None, None, "magnitude")
    return hap.plan_for_latency(model, groups, scores, example, hap.Budget(latency=latency), **options)


@pytest.mark.parametrize("seconds", [macs, affine], ids=["proportional", "overhead"])
@pytest.mark.parametrize("latency", [0.3, 0.5, 0.8])
def test_a_budget_of_time_is_met(machine: Any, seconds: Any, latency: float) -> None:
    machine(seconds)
    model, example = small()
    before = snapshot(model)
    found = found_for(model, example, latency)
    assert_unchanged(model, before)
    pruned = hap.apply_(copy.deepcopy(model), found.plan, example)
    true = seconds(pruned, example) / seconds(model, example)
    assert 0.97 * latency <= true <= 1.03 * latency
    assert abs(true - found.ratio) <= 0.02 * true
    assert found.plan in [t.plan for t in found.trials]


@pytest.mark.parametrize("multiple", [8, 16])
def test_widths_follow_the_hardware(machine: Any, multiple: int) -> None:
    machine(steps_of(multiple))
    model, example = small()
    found = found_for(model, example, 0.5)
    assert found.round_to % multiple == 0
    assert all(len(kept) % multiple == 0 for kept in found.plan.kept.values())
    assert found.ratio <= 0.5


def test_widths_are_those_asked_for(machine: Any) -> None:
    machine(macs)
    found = found_for(*small(), 0.5, limits=hap.Limits(round_to=4))
    assert {t.round_to for t in found.trials} == {4}
    assert all(len(kept) % 4 == 0 for kept in found.plan.kept.values())


def test_implants_are_timed_too(machine: Any) -> None:
    machine(macs)
    model, example = small()
    found = found_for(model, example, 0.5, implant=0.3)
    assert any(found.plan.implanted.values())
    pruned = hap.apply_(copy.deepcopy(model), found.plan, example)
    assert 0.485 <= macs(pruned, example) / macs(model, example) <= 0.515


def test_a_budget_of_time_that_cannot_be_met(machine: Any) -> None:
    machine(affine)
    model, example = small()
    before = snapshot(model)
    with pytest.raises(
        hap.HapError, match=r"latency=0.05 cannot be reached: the fastest .* takes (0\.\d+) of"
    ) as caught:
        hap.prune_(model, example, criterion="magnitude", latency=0.05)
    assert_unchanged(model, before)
    reachable = float(str(caught.value).split("takes ")[1].split()[0])
    plan = hap.prune_(model, example, criterion="magnitude", latency=round(reachable + 0.05, 2))
    assert plan.after.macs < plan.before.macs


def test_a_plan_alone_cannot_meet_a_budget_of_time() -> None:
    model, example = small()
    groups = hap.trace(model, example)
    scores = hap.score(model, groups, None, None, "magnitude")
    with pytest.raises(hap.HapError, match=r"use hap\.plan_for_latency"):
        hap.plan(groups, scores, hap.Budget(latency=0.5))
    with pytest.raises(hap.HapError, match="the budget is on flops; expected Budget"):
        hap.plan_for_latency(model, groups, scores, example, hap.Budget(flops=0.5))


def test_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real clock: no promise of figures, but of a smaller network that works."""
    for name in ("RUNS", "MOST_RUNS"):
        monkeypatch.setattr(hap.pruning.plan_for_latency, name, 5)
    model, example = small()
    plan = hap.prune_(model, torch.cat([example] * 16), criterion="magnitude", latency=0.8, threads=1)
    assert plan.after.macs < plan.before.macs
    assert model(example).shape == (1, 10)

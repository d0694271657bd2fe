"""Examples and batches: any mapping will do for a dict, such as the one that a tokenizer returns."""

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.execution.calling import call_arguments, describe
from hap.execution.model_outputs import example_in_float64
from hap.utils import distributed
from huggingface import library, small


class Reader(nn.Module):
    """Two inputs by name, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, mask: Tensor, twice: bool = False) -> Tensor:
        y = self.second(self.first(x).relu()) * mask[:, None]
        return 2 * y if twice else y


def inputs(rows: int, seed: int = 0) -> dict[str, Any]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "mask": torch.ones(rows), "twice": True}


def test_any_mapping_names_arguments() -> None:
    example = inputs(2)
    assert call_arguments(UserDict(example)) == ((), example)
    assert describe(UserDict(example)) == describe(example)
    assert example_in_float64(UserDict(example))["x"].dtype == torch.float64
    assert list(example) == ["x", "mask", "twice"] and example["x"].dtype == torch.float32


def pruned_with(kind: Any, folder: Path) -> Any:
    """What a model's scores, plan and outputs are with examples and batches of a kind of mapping."""
    torch.manual_seed(0)
    model, example = Reader().eval(), kind(inputs(2))
    batches = [(kind(inputs(8, seed)), torch.arange(8) % 3) for seed in range(2)]
    groups = hap.trace(model, example)
    criteria = (hap.Taylor(), hap.DiagonalFisher(), hap.HessianTrace(), hap.HessianTrace("hutchinson", probes=4))
    scores = [hap.score(model, groups, batches, F.cross_entropy, c)["first"].tolist() for c in criteria]
    plan = hap.prune_(model, example, batches, F.cross_entropy, params=0.6, compensate=True)
    assert hap.cost(model, example).params == plan.after.params
    assert hap.latency(model, example, runs=2, warmup=0).runs == 2
    program = torch.export.load(hap.export(folder / "a.pt2", model, example)).module()
    return scores, plan.to_dict(), program(**inputs(5)).tolist()


def test_the_whole_way_with_another_mapping(tmp_path: Path) -> None:
    assert pruned_with(UserDict, tmp_path) == pruned_with(dict, tmp_path)


def test_every_process_takes_its_samples_out_of_another_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    ((x, target),) = distributed.shard([(UserDict(inputs(6)), torch.arange(6))])
    assert torch.equal(x["x"], inputs(6)["x"][1::2]) and target.tolist() == [1, 3, 5] and x["twice"] is True


def test_what_a_tokenizer_returns() -> None:
    transformers = library()
    model, example = small("bert")
    encoded = transformers.BatchEncoding(example)
    groups = hap.trace(model, encoded)
    assert len(hap.heads(groups)) == 2
    heads = hap.only(groups, hap.heads(groups))
    batches = [(encoded, torch.tensor([0, 1, 1]))]
    scores = hap.score(model, heads, batches, lambda out, y: F.cross_entropy(out.logits, y), hap.JointTrace(probes=2))
    plan = hap.plan(heads, scores, hap.Budget(channels=0.5))
    hap.apply_(model, plan, encoded)
    assert model(**encoded).logits.shape == (3, 2)


class Normalising(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 12, 3), nn.Tanh(), nn.Conv2d(12, 4, 3), nn.Flatten(), nn.LazyLinear(5))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).add_(1)
        return self.layers(x)


def test_a_forward_that_writes_to_its_input_changes_no_example_and_no_score() -> None:
    torch.manual_seed(0)
    model = Normalising().double().eval()
    x, y = torch.randn(4, 3, 8, 8).double(), torch.randint(5, (4,))
    model(x.clone())
    before = x.clone()
    groups = hap.trace(model, x)
    assert groups.units == 12 + 4
    scores = hap.score(model, groups, [(x, y)], F.cross_entropy, hap.JointTrace(probes=4, seed=0))
    plain = hap.trace(model.layers, before * 0.5 + 1)
    wanted = hap.score(model.layers, plain, [(before * 0.5 + 1, y)], F.cross_entropy, hap.JointTrace(probes=4, seed=0))
    for name, values in wanted.items():
        torch.testing.assert_close(scores[f"layers.{name}"], values)
    hap.prune_(model, x, criterion="magnitude", flops=0.5)
    assert torch.equal(x, before)


class Merging(nn.Module):
    """Adds a part to its weight for evaluation, and takes it out again for training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.part, self.merged = nn.Linear(6, 6), torch.ones(6, 6), False

    def train(self, mode: bool = True) -> "Merging":
        if mode == self.merged:
            self.layer.weight.data += -self.part if mode else self.part
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight if self.merged else self.layer.weight + self.part
        return F.linear(x, weight, self.layer.bias)


@pytest.mark.parametrize("training", [False, True])
def test_a_mode_that_changes_more_than_a_flag_is_restored(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), Merging(), nn.Linear(6, 2)).train(training)
    x = torch.randn(3, 4)
    before = model(x)
    hap.cost(model, x)
    assert hap.trace(model, x).units == 0  # its part would not fit what is left of the weight
    torch.testing.assert_close(model(x), before)
    assert all(m.training is training for m in model.modules())


class Table(nn.Module):
    """Writes its table out for evaluation alone, and has none else."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(6))
        self.train(True)

    def train(self, mode: bool) -> "Table":  # type: ignore[override]
        if mode and hasattr(self, "written"):
            del self.written
        elif not mode:
            self.written = self.values.detach() * 2
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.values * 2 if self.training else self.written)


@pytest.mark.parametrize("mode", ["training", "evaluating", "frozen"])
def test_modules_with_a_mode_of_their_own_are_left_as_they_were(mode: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), Table(), nn.Linear(6, 2)).train(mode != "evaluating")
    if mode == "frozen":
        model[1].eval()
    x = torch.randn(3, 4)
    before, modes = model(x), [m.training for m in model.modules()]
    groups = hap.trace(model, x)
    torch.testing.assert_close(model(x), before)
    assert [m.training for m in model.modules()] == modes
    assert groups.units == 0  # what is written out has its size


class Freezing(nn.Sequential):
    """Training it freezes its first layer."""

    def train(self, mode: bool = True) -> "Freezing":
        if mode:
            self[0].requires_grad_(False)
        return super().train(mode)


def test_what_is_trained_stays_so() -> None:
    model = Freezing(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    groups = hap.trace(model, torch.randn(3, 4))
    assert len(groups) == 1 and all(p.requires_grad for p in model.parameters())


class Same(nn.Module):
    """Asks whether it is given one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.own(q) if q is k else self.own(q) + self.cross(k)


def test_one_tensor_given_twice_stays_one() -> None:
    model, x = Same().eval(), torch.randn(3, 4)
    assert hap.cost(model, (x, x)).macs == 48 and hap.cost(model, (x, x.clone())).macs == 96

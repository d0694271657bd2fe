"""Reconstruction against layers that are really solved anew without each unit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hap
from checks import assert_unchanged, snapshot
from hap.scoring import reconstruction


def network() -> tuple[nn.Module, Tensor, list[Any]]:
    """Convolutions whose channels are mixtures of fewer, so that some can be predicted from others."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2)
    first.weight.data[4:] = first.weight[:2] * 0.9 + 0.1 * torch.randn(2, 3, 3, 3)
    model = nn.Sequential(first, nn.ReLU(), second, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 3)).double()
    x = torch.randn(64, 3, 7, 7, dtype=torch.float64)
    model.train()(x)
    model[3].weight.data.uniform_(0.3, 2)
    return model.eval(), x, [(x[:32], None), (x[32:], None)]


def rows_read(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        patches = nn.functional.unfold(model[1](model[0](x)), 3, stride=2)
    return patches.transpose(1, 2).flatten(0, 1)


def lost(rows: Tensor, wanted: Tensor, left: list[int]) -> float:
    """The squared error of the best affine map from the channels that are left."""
    columns = [9 * c + k for c in left for k in range(9)]
    design = torch.cat([rows[:, columns], torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
    return float((wanted - design @ torch.linalg.lstsq(design, wanted, driver="gelsd").solution).square().sum())


def test_each_unit_that_goes_next_is_the_one_that_least_squares_miss_least() -> None:
    model, x, batches = network()
    groups = hap.trace(model, x[:2])
    scores = hap.score(model, groups, batches, None, hap.Reconstruction(levels=hap.Magnitude(), positions=10**6))
    rows, scale = rows_read(model, x), (model[3].weight / (model[3].running_var + model[3].eps).sqrt()).detach()
    wanted = rows @ model[2].weight.detach().flatten(1).T * scale
    left = list(range(6))
    for unit in scores["0"].argsort().tolist()[:4]:
        errors = {c: lost(rows, wanted, [k for k in left if k != c]) for c in left}
        assert errors[unit] < 1.05 * min(errors.values()), (unit, errors)
        left.remove(unit)
    assert not {0, 1} <= set(left) or not {4, 5} <= set(left)


@pytest.mark.parametrize("at_once", [1, 9, 20, 40])
def test_updates_that_are_put_off_change_no_order(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, batches = network()
    groups = hap.trace(model, x[:2])
    usual = hap.score(model, groups, batches, None, "reconstruction")
    monkeypatch.setattr(reconstruction, "AT_ONCE", at_once)
    other = hap.score(model, groups, batches, None, "reconstruction")
    assert all(torch.equal(usual[name], other[name]) for name in groups)


def test_values_are_those_of_the_levels_in_each_group() -> None:
    model, x, batches = network()
    groups = hap.trace(model, x[:2])
    levels = hap.score(model, groups, None, None, "l1")
    scores = hap.score(model, groups, batches, None, hap.Reconstruction(levels=hap.L1()))
    assert scores.about["groups_in_order"] == 2
    for name in groups:
        assert torch.equal(scores[name].sort().values, levels[name].sort().values)
    assert not torch.equal(scores["0"], levels["0"])


def test_branches_of_a_sum_and_grouped_readers_keep_their_levels() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.a(x).relu()
            return self.head(self.c(y + self.b(y)).mean((2, 3)))

    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(8, 3, 6, 6)
    groups = hap.trace(model, x[:2], coupling="union")
    scores = hap.score(model, groups, [(x, None)], None, "reconstruction")
    levels = hap.score(model, groups, None, None, "magnitude")
    assert scores.about["groups_in_order"] == 0
    assert all(torch.equal(scores[n], levels[n]) for n in groups)


def test_several_inputs_of_a_unit_go_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 3)).eval()
    model[0].weight.data[3] = model[0].weight[1]  # a copy, which is missed least
    model[0].bias.data[3] = model[0].bias[1]
    x = torch.randn(400, 3, 6, 6)
    groups = hap.trace(model, x[:2])
    scores = hap.score(model, groups, [(x, None)], None, "reconstruction")
    assert int(scores["0"].argmin()) in (1, 3)
    assert int(scores["0"].argsort()[1]) not in (1, 3)


def test_inputs_that_never_vary_are_missed_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    model[0].weight.data[2] = 0
    model[0].bias.data[2] = 3.0
    model[0].weight.data[4], model[0].bias.data[4] = 0, -1.0
    x = torch.randn(100, 4)
    scores = hap.score(model, hap.trace(model, x[:2]), [(x, None)], None, "reconstruction")
    assert set(scores["0"].argsort()[:2].tolist()) == {2, 4}


def test_what_cannot_be_scored_is_refused_and_nothing_is_changed() -> None:
    model, x, batches = network()
    groups, before = hap.trace(model, x[:2]), snapshot(model)
    with pytest.raises(hap.HapError, match="needs data"):
        hap.score(model, groups, None, None, "reconstruction")
    with pytest.raises(hap.HapError, match="what a layer reads is not finite"):
        hap.score(model, groups, [(x * float("nan"), None)], None, "reconstruction")
    with pytest.raises(hap.HapError, match="positions=1"):
        hap.Reconstruction(positions=1)
    hap.score(model, groups, batches, None, "reconstruction")
    assert_unchanged(model, before)
    training = copy.deepcopy(model).train()
    with pytest.raises(hap.HapError, match="training mode"):
        hap.score(training, groups, batches, None, "reconstruction")

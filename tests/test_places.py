"""hap.places: the check of apply_ computes large maps at some places alone, and all of them where that does not do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import hap
from hap.errors import HapError
from hap.places import FEWEST, Coarse

SIDE = 8 * FEWEST
CONVOLUTIONS = [
    {}, {"padding": 1}, {"padding": "same"}, {"stride": 2, "padding": (1, 1)}, {"dilation": 2}, {"groups": 2},
    {"stride": 3, "padding": 2, "dilation": 2, "groups": 4},
]  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.between(self.first(x).relu())).relu()
        return self.head(x.mean((2, 3)))

    def between(self, x: Tensor) -> Tensor:
        return x


class Wary(Net):
    """Once it is wary, refuses maps in which neighbours are alike, as next to the places that were computed."""

    wary = False

    def between(self, x: Tensor) -> Tensor:
        if self.wary and torch.equal(x[..., 0], x[..., 1]):
            raise ValueError("neighbours are alike")
        return x


def planned(model: nn.Module, example: Tensor) -> Any:
    groups = hap.trace(model, example)
    return hap.plan(groups, hap.score(model, groups, None, None, "magnitude"), hap.Budget(flops=0.5))


@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_coarse_convolution_has_the_true_shape_and_true_values_at_its_places(
    axes: int, settings: dict[str, Any]
) -> None:
    call = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]
    settings = {k: (v[0] if isinstance(v, tuple) else v) for k, v in settings.items()}
    x = torch.randn(2, 4, *[45] * axes, dtype=torch.float64)
    weight = torch.randn(8, 4 // settings.get("groups", 1), *[3] * axes, dtype=torch.float64)
    whole = call(x, weight, **settings)
    with Coarse():
        coarse = call(x, weight, **settings)
    assert coarse.shape == whole.shape
    step = whole.shape[-1] // FEWEST
    computed = -(-whole.shape[-1] // step)
    first = [-(-i * whole.shape[-1] // computed) for i in range(computed)]  # where each of the values is first repeated
    places = torch.arange(computed) * step
    for axis in range(2, 2 + axes):
        coarse, whole = coarse.index_select(axis, torch.tensor(first)), whole.index_select(axis, places)
    torch.testing.assert_close(coarse, whole, rtol=0, atol=1e-12)


def test_small_maps_and_transposed_convolutions_are_computed_whole() -> None:
    small, large = torch.randn(1, 4, 2 * FEWEST - 1, 2 * FEWEST - 1), torch.randn(1, 4, SIDE, SIDE)
    weight, turned = torch.randn(6, 4, 1, 1), torch.randn(4, 6, 3, 3)
    with Coarse():
        seen = functional.conv2d(small, weight), functional.conv_transpose2d(large, turned)
    assert torch.equal(seen[0], functional.conv2d(small, weight))
    assert torch.equal(seen[1], functional.conv_transpose2d(large, turned))


def test_the_check_computes_a_fraction_of_large_maps() -> None:
    model, example = Net().eval(), torch.randn(1, 3, SIDE, SIDE)
    plan = planned(model, example)
    with FlopCounterMode(display=False) as counter:
        hap.apply_(model, plan, example)
    assert 0 < counter.get_total_flops() / 2 < plan.after.macs / 8


@pytest.mark.parametrize("kind", [Net, Wary])
def test_what_is_pruned_equals_the_dense_model_with_zeros_at_all_places(kind: type[Net]) -> None:
    model, example = kind().eval().double(), torch.randn(1, 3, SIDE, SIDE, dtype=torch.float64)
    plan = planned(model, example)
    model.wary = True
    zeroed = kind().eval().double()
    zeroed.load_state_dict(model.state_dict())
    tensors = dict(zeroed.named_parameters())
    with torch.no_grad():
        for cut in plan.cuts:
            gone = [i for i in range(cut.size) if i not in set(cut.keep)]
            tensors[cut.name].index_fill_(cut.dim, torch.tensor(gone), 0.0)
        wanted = zeroed(example)
        hap.apply_(model, plan, example)
        assert (model(example) - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_a_forward_that_takes_no_coarse_maps_is_checked_on_whole_ones() -> None:
    model, example = Wary().eval(), torch.randn(1, 3, SIDE, SIDE)
    plan = planned(model, example)
    model.wary = True
    with FlopCounterMode(display=False) as counter:
        hap.apply_(model, plan, example)
    assert counter.get_total_flops() / 2 > plan.after.macs / 2


def test_channels_that_are_mixed_up_are_seen_at_some_places_too() -> None:
    model, example = Net().eval(), torch.randn(1, 3, SIDE, SIDE)
    plan = planned(model, example)
    before = {name: p.clone() for name, p in model.named_parameters()}
    cuts = [replace(c, keep=c.keep[::-1]) if (c.name, c.dim) == ("head.weight", 1) else c for c in plan.cuts]
    assert tuple(cuts) != plan.cuts
    with pytest.raises(HapError, match="does not do what the plan says"):
        hap.apply_(model, replace(plan, cuts=tuple(cuts)), example)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

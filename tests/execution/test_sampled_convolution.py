"""The check of apply_ computes large maps at some places alone, and all of them where that does not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import hap
from hap.errors import HapError
from hap.execution.sampled_convolution import BETWEEN, FEWEST, SampledConvolutions, step_of
from hap.verification.comparison import Comparison
from hap.verification.verify import agree_at_some_places

SIDE = 56
CONVOLUTIONS: list[dict[str, Any]] = [{}, {"padding": 1}, {"padding": "same"}, {"padding": "valid"}]
CONVOLUTIONS += [{"stride": 2, "padding": 1}, {"dilation": 2}, {"groups": 2}]
CONVOLUTIONS += [{"stride": 2, "padding": 2, "dilation": 2, "groups": 4}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.between(self.first(x)).relu()).relu()
        return self.head(x.mean((2, 3)))

    def between(self, x: Tensor) -> Tensor:
        return x


class Wary(Net):
    """Once it is wary, refuses maps that change evenly, as they do between the places that were computed."""

    wary = False

    def between(self, x: Tensor) -> Tensor:
        if self.wary and bool((x[..., 2] - 2 * x[..., 1] + x[..., 0]).abs().max() < 1e-4):
            raise ValueError("too even")
        return x


def planned(model: nn.Module, example: Tensor, ignore: Sequence[str] = ()) -> Any:
    groups = hap.trace(model, example, ignore=ignore)
    return hap.plan(groups, hap.score(model, groups, None, None, "magnitude"), hap.Budget(params=0.6))


@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_coarse_convolution_has_the_true_shape_and_even_changes_between_true_values(
    axes: int, settings: dict[str, Any]
) -> None:
    call = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]
    x = torch.randn(2 if axes < 3 else 1, 4, *[SIDE + 1] * axes, dtype=torch.float64)
    weight = torch.randn(8, 4 // settings.get("groups", 1), *[3] * axes, dtype=torch.float64)
    whole = call(x, weight, **settings)
    with SampledConvolutions():
        coarse = call(x, weight, **settings)
    step = step_of(whole.shape[-1])
    assert step > 1
    some = whole[(..., *[slice(None, None, step)] * axes)]
    wanted = functional.interpolate(some, whole.shape[2:], mode=BETWEEN[2 + axes], align_corners=True)
    torch.testing.assert_close(coarse, wanted, rtol=0, atol=1e-12)


def test_steps_leave_enough_places_of_all_kinds() -> None:
    steps = {side: step_of(side) for side in range(300)}
    assert all(len(range(0, side, step)) >= FEWEST for side, step in steps.items() if step > 1)
    assert all(step % 2 and step % 3 for step in steps.values())
    assert [steps[side] for side in (0, 7, 14, 28, 56, 112, 224)] == [1, 1, 5, 5, 11, 17, 35]


def test_small_maps_and_transposed_convolutions_are_computed_whole() -> None:
    small, large = torch.randn(1, 4, 13, 13), torch.randn(1, 4, SIDE, SIDE)
    weight, turned = torch.randn(6, 4, 1, 1), torch.randn(4, 6, 3, 3)
    with SampledConvolutions():
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


class ByTurns(Net):
    """Puts maps together by turns, takes them apart, or looks at differences of neighbours."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "interleaved":
            self.other = nn.Conv2d(3, 12, 3, padding=1)
        elif how == "shuffled":
            self.first = nn.Conv2d(3, 48, 3, padding=1)
        elif how == "unshuffled":
            self.second = nn.Conv2d(48, 8, 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.first(x).relu()
        if self.how == "interleaved":
            y = torch.stack((y, self.other(x).relu()), -1).flatten(-2)
        elif self.how == "shuffled":
            y = functional.pixel_shuffle(y, 2)
        elif self.how == "unshuffled":
            y = functional.pixel_unshuffle(y, 2)
        elif self.how in ("differences", "signs"):
            steps = y[..., 1:] - y[..., :-1]
            y = steps if self.how == "differences" else y[..., 1:] * (steps + 1e-30) / (steps + 1e-30).abs()
        return self.head(self.second(y).relu().mean((2, 3)))


MIXED = {
    "interleaved": ("other.weight", 0, 1),
    "shuffled": ("first.weight", 0, 4),
    "unshuffled": ("second.weight", 1, 4),
    "differences": ("second.weight", 1, 1),
    "signs": ("second.weight", 1, 1),
    "plain": ("head.weight", 1, 1),
}
"""Which cut is mixed up, and how many of its entries belong together: the first of them stays where it is."""


def mixed(keep: tuple[int, ...], together: int) -> tuple[int, ...]:
    if together == 1:
        return keep[::-1]
    parts = [keep[i : i + together] for i in range(0, len(keep), together)]
    return tuple(k for part, other in zip(parts, parts[::-1], strict=True) for k in (part[0], *other[1:]))


@pytest.mark.parametrize("how", MIXED)
def test_channels_that_are_mixed_up_are_seen_at_some_places_too(how: str) -> None:
    torch.manual_seed(0)
    model, example = ByTurns(how).eval(), torch.randn(1, 3, SIDE, SIDE)
    plan = planned(model, example, ("second",) if how != "plain" else ())
    before = {name: p.clone() for name, p in model.named_parameters()}
    name, dim, together = MIXED[how]
    cuts = tuple(replace(c, keep=mixed(c.keep, together)) if (c.name, c.dim) == (name, dim) else c for c in plan.cuts)
    broken = replace(plan, cuts=cuts)
    assert cuts != plan.cuts
    assert not agree_at_some_places(Comparison(model, broken, example))
    with pytest.raises(HapError, match="does not do what the plan says"):
        hap.apply_(model, broken, example)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    hap.apply_(model, plan, example)


def test_outputs_that_are_zero_at_some_places_tell_nothing() -> None:
    model, example = Net().eval(), torch.zeros(1, 3, SIDE, SIDE)
    for layer in (model.first, model.second, model.head):
        nn.init.zeros_(layer.bias)
    example[..., 3:5, 3:5] = 1 + torch.rand(3, 2, 2)
    plan = planned(model, example, ("second",))
    assert not agree_at_some_places(Comparison(model, plan, example))
    hap.apply_(model, plan, example)

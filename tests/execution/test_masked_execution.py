"""Weights with zeros in place of what goes: multiplied without the zeros, the model computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import hap
from cases import CASES
from checks import gap, random_plan, traced
from hap.execution.masked_execution import ATTENTION, POINTWISE, NoEmptyHeads, RecordedResults, SkippingZeros
from hap.verification import comparison
from hap.verification.comparison import Comparison, cuts_of, sparse_weight
from hap.verification.verify import check_by_running, masked_outputs


def masked(model: nn.Module, plan: hap.Plan, example: object, skip: bool) -> list[object]:
    return masked_outputs(Comparison(model, plan, example), RecordedResults({}) if skip else None)


@pytest.mark.parametrize("name", CASES)
def test_skipping_zeros_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, example), groups = CASES[name](), traced(name, "joint")
    monkeypatch.setattr(comparison, "LARGE", 0)
    plan = random_plan(groups, 0)
    assert gap(masked(model, plan, example, False), masked(model, plan, example, True)) <= 1e-10
    check_by_running(Comparison(model, plan, example))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide, self.narrow = nn.Conv1d(4, 200, 1), nn.Linear(200, 300), nn.Linear(300, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.relu(self.wide(self.conv(x).mean(-1))))


class Reader(Plain):
    """Reads its weights as layers do, and in other ways too."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wide(self.conv(x).mean(-1)))
        size = self.wide.weight.size(0) / self.wide.weight.shape[0]
        both = torch.cat([self.wide.weight.sum(1), self.wide.weight.T[0]]).sum()
        return self.narrow(hidden) * size + functional.linear(hidden, weight=self.narrow.weight) * both


def test_zeros_are_neither_multiplied_nor_written_out() -> None:
    model, example = Reader().double().eval(), torch.randn(64, 4, 3, dtype=torch.float64)
    plan = hap.draft(hap.trace(Plain().double(), example), {"conv": range(150), "wide": range(270)})
    assert gap(masked(model, plan, example, False), masked(model, plan, example, True)) <= 1e-10
    counts = []
    for skip in (False, True):
        with FlopCounterMode(display=False) as counter:
            masked(Plain().double(), plan, example, skip)
        counts.append(counter.get_total_flops())
    assert counts[1] < 0.2 * counts[0]
    weight, cuts = model.wide.weight.detach(), cuts_of(plan)["wide.weight"]
    thin = sparse_weight("wide.weight", weight, Comparison(model, plan, example).cut["wide.weight"], {}, cuts)
    assert thin.placeholder().untyped_storage().nbytes() == weight.element_size()


class Unnoticed(nn.Linear):
    """Reads its weight where nobody sees that."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return functional.linear(x, self.weight, self.bias)


def test_where_a_weight_is_read_unnoticed_the_check_writes_zeros_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LARGE", 0)
    model, example = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), Unnoticed(20, 4)), torch.randn(3, 8)
    groups = hap.trace(model, example)
    plan = hap.draft(groups, {"0": range(10)})
    assert not masked(model, plan, example, True)[0].isfinite().any()  # type: ignore[attr-defined]
    hap.apply_(model, plan, example)
    assert model[2].weight.shape == (4, 10)


def test_what_both_models_compute_alike_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LARGE", 0)
    model, example = Plain().double(), torch.randn(64, 4, 3, dtype=torch.float64)
    plan = hap.draft(hap.trace(model, example), {"conv": range(100), "wide": range(150)})
    with FlopCounterMode(display=False) as both:
        check_by_running(Comparison(model, plan, example))
    with FlopCounterMode(display=False) as once:
        hap.apply_(model, plan, verify=False)(example)
    assert both.get_total_flops() == once.get_total_flops()


class Attending(nn.Module):
    """torch's own attention, which calls its layers and kernels from a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attend = nn.Linear(8, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide, self.last = nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.relu(self.wide(self.attend(x, x, x, need_weights=False)[0])))


@pytest.mark.parametrize(("gone", "times"), [({"wide": range(40)}, 1), ({"wide": range(40), "attend": [0, 2]}, 2)])
def test_inside_of_torchs_attention_zeros_and_what_is_known_are_left_out_too(
    gone: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "LARGE", 0)
    model, example = Attending().double().eval(), torch.randn(3, 7, 8, dtype=torch.float64)
    plan = hap.draft(hap.trace(model, example), gone)
    with FlopCounterMode(display=False) as both:
        check_by_running(Comparison(model, plan, example))
    with FlopCounterMode(display=False) as once:
        hap.apply_(model, plan, verify=False)(example)
    assert both.get_total_flops() <= times * once.get_total_flops()


class Overwriting(Plain):
    """Writes to what its layers read and return, by a number that depends on its size."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(self.conv(x).mean(-1)).relu_()
        result = self.narrow(hidden)
        hidden.mul_(self.wide.out_features)
        return result.mul_(self.wide.out_features)


def test_what_was_written_to_since_is_computed_again() -> None:
    model, example = Overwriting().double(), torch.randn(3, 4, 3, dtype=torch.float64)
    plan = hap.draft(hap.trace(Plain().double(), example), {"wide": range(150)})
    with pytest.raises(hap.HapError, match="the value of output 0 is off"):
        hap.apply_(model, plan, example)
    known = RecordedResults(dict(model.named_parameters()))
    with torch.no_grad(), known:
        model(example)
    x = torch.randn(3, 300, dtype=torch.float64)
    with torch.no_grad(), SkippingZeros({}, known):
        assert torch.equal(functional.linear(x, model.narrow.weight, model.narrow.bias), model.narrow(x))


class Slope(Plain):
    """Returns a derivative of what it computes, or computes it for each example alone."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "vmap":
            return torch.func.vmap(super().forward)(x)
        if self.way == "jvp":
            return torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))[1]
        if self.way == "func.grad":
            return torch.func.grad(lambda x: super(Slope, self).forward(x).sum())(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x)[0]


@pytest.mark.parametrize("way", ["vmap", "jvp", "func.grad", "autograd.grad"])
def test_forwards_that_differentiate_are_checked_too(way: str) -> None:
    model, example = Slope().double(), torch.randn(3, 4, 3, dtype=torch.float64)
    plan = hap.draft(hap.trace(Plain().double(), example), {"wide": range(150)})
    model.way = way
    assert hap.apply_(model, plan, example).wide.weight.shape == (150, 200)


class Brittle(Plain):
    """Fails on zeros in its weight."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.wide.bias.all():
            raise ValueError("zeros\nin the bias")
        return super().forward(x)


def test_a_reference_that_fails_is_an_error_in_words() -> None:
    model, example = Brittle().double(), torch.randn(3, 4, 3, dtype=torch.float64)
    plan = hap.draft(hap.trace(Plain().double(), example), {"wide": range(150)})
    with pytest.raises(hap.HapError, match=r"cannot be checked, so nothing was changed: .* ValueError: zeros$"):
        hap.apply_(model, plan, example)
    assert model.wide.weight.shape == (300, 200)


@pytest.mark.parametrize("mask", [None, (5, 5), (4, 5, 5), (2, 4, 5, 5)])
@pytest.mark.parametrize("flat", [False, True])
def test_attention_leaves_out_heads_of_zeros(mask: tuple[int, ...] | None, flat: bool) -> None:
    q, k, v = torch.randn(3, *([4] if flat else [2, 4]), 5, 8, dtype=torch.float64)
    if flat and mask is not None:
        mask = mask[-3:]
    v[..., 1:3, :, :] = 0
    bias = None if mask is None else torch.randn(mask, dtype=torch.float64)
    few = [x[..., [0, 3], :, :] for x in (q, k, v)]
    known = RecordedResults({})
    with known:
        small = ATTENTION(
            few[0], few[1], few[2], attn_mask=bias if bias is None or bias.ndim == 2 else bias[..., [0, 3], :, :]
        )
    with SkippingZeros({}, known), FlopCounterMode(display=False) as counter:
        result = ATTENTION(q, k, v, attn_mask=bias)
    assert torch.equal(result[..., [0, 3], :, :], small) and not result[..., 1:3, :, :].any()
    assert gap([result], [ATTENTION(q, k, v, attn_mask=bias)]) <= 1e-12
    assert counter.get_total_flops() == 0


@pytest.mark.parametrize("attention", [ATTENTION, torch.ops.aten.scaled_dot_product_attention.default])
def test_attention_without_heads_is_refused(attention: Any) -> None:
    q, none, thin = torch.randn(2, 3, 5, 8), torch.randn(2, 0, 5, 8), torch.randn(2, 3, 5, 0)
    with NoEmptyHeads():
        assert attention(q, q, value=q).shape == q.shape
        assert attention(q[:0], q[:0], q[:0]).shape == (0, 3, 5, 8)  # an empty batch
        with pytest.raises(hap.HapError, match=r"the key of an attention has shape \(2, 0, 5, 8\)"):
            attention(q, none, none)
        with pytest.raises(hap.HapError, match=r"the query of an attention has shape \(2, 3, 5, 0\)"):
            attention(thin, thin, value=q)


def name_of(func: Any) -> str:
    return func.__qualname__


@pytest.mark.parametrize("func", sorted(POINTWISE, key=name_of), ids=name_of)
@pytest.mark.parametrize("how", ["plain", "chunk", "channels last", "turned"])
def test_pointwise_functions_give_the_same_bits_wherever_an_element_lies(func: Any, how: str) -> None:
    torch.manual_seed(0)
    wide = torch.zeros(2, 3, 7, 46)
    rows = torch.arange(1, 38, 2)
    wide[..., rows] = 3 * torch.randn(2, 3, 7, len(rows))
    made = {
        "plain": lambda x: x,
        "chunk": lambda x: torch.cat([x, x], -1).chunk(2, -1)[1],
        "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "turned": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    }[how]
    named = {"approximate": "tanh"} if func is functional.gelu else {}
    narrow, whole = made(wide[..., rows].contiguous()), made(wide)
    with RecordedResults({}):
        some = func(narrow, **named)
    with SkippingZeros({}):
        every = func(whole, **named)
    assert torch.equal(some, every[..., rows])
    wanted = func(narrow, **named)
    assert some.stride() == wanted.stride()
    torch.testing.assert_close(some, wanted)

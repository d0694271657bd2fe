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
from hap.execution.masked_execution import ATTENTION, NoEmptyHeads
from hap.verification import comparison
from hap.verification.comparison import Comparison, cuts_of, sparse_weight
from hap.verification.verify import check_by_running, masked_outputs


def masked(model: nn.Module, plan: hap.Plan, example: object, skip: bool) -> list[object]:
    return masked_outputs(Comparison(model, plan, example), skip_zeros=skip)


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
    weight, cuts = model.wide.weight, cuts_of(plan)["wide.weight"]
    thin = sparse_weight(weight, Comparison(model, plan, example).cut["wide.weight"], {}, cuts)
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


class Overwriting(Plain):
    """Writes to what its layers read and return, by a number that depends on its size."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(self.conv(x).mean(-1)).relu_()
        result = self.narrow(hidden)
        hidden.mul_(self.wide.out_features)
        return result.mul_(self.wide.out_features)


def test_results_that_are_written_to_are_compared_as_they_are_then() -> None:
    model, example = Overwriting().double(), torch.randn(3, 4, 3, dtype=torch.float64)
    plan = hap.draft(hap.trace(Plain().double(), example), {"wide": range(150)})
    with pytest.raises(hap.HapError, match="the value of output 0 is off"):
        hap.apply_(model, plan, example)


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

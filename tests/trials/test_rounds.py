"""Attributes that are alike by chance, models that ask whether they are exported, and models that take long to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_find_unprunable import Heads, Hidden, counting, example, followers
from torch import Tensor, nn

import hap
from hap.graph.capture import Asked, exporting
from hap.trials import find_unprunable, removal_rounds, run_round


class Windowed(Heads):
    """Sees the last few tokens, `window` of them: by chance as many as there are heads."""

    def __init__(self) -> None:
        super().__init__(6)
        self.window = 6

    def forward(self, x: Tensor, memory: list[Tensor] | None = None) -> Tensor:
        return super().forward(x) + self.seen(x if memory is None else memory[0])

    def seen(self, x: Tensor) -> Tensor:
        return x[:, -self.window :].mean(1, keepdim=True)


class Remembering(Windowed):
    def forward(self, x: Tensor, memory: list[Tensor] | None = None) -> Tensor:
        assert memory is not None
        memory[0] = torch.cat([memory[0], x], 1)
        return super().forward(x, memory)


class Counting(Windowed):
    def forward(self, x: Tensor, memory: list[Tensor] | None = None) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.calls


class Lent(Windowed):
    lent: Tensor | None = None

    def forward(self, x: Tensor, memory: list[Tensor] | None = None) -> Tensor:
        assert self.lent is not None
        return super().forward(x) + self.lent


class Sideline(Windowed):
    """Its second output is not asked for when the model is traced."""

    def forward(self, x: Tensor, memory: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return Heads.forward(self, x), x * self.window


class Caller(nn.Module):
    def __init__(self, kind: type[Windowed]) -> None:
        super().__init__()
        self.inner, self.last = kind(), nn.Linear(24, 5)

    def forward(self, x: Tensor, both: bool = False) -> Any:
        self.inner.calls = 0
        self.inner.lent = x
        found = self.inner(x, [x])
        self.inner.lent = None
        first, second = found if isinstance(found, tuple) else (found, None)
        return (self.last(first), second) if both else self.last(first)


@pytest.mark.parametrize("kind", [Windowed, Remembering, Counting, Lent, Sideline])
def test_a_number_that_is_alike_by_chance_does_not_follow(kind: type[Windowed]) -> None:
    """Whatever a module does when it is called by itself. Two tokens do not show the window, longer inputs do."""
    torch.manual_seed(0)
    model = Caller(kind).double()
    assert followers(hap.trace(model, torch.randn(3, 2, 24).double())) == {("inner", "heads")}


class Asking(Heads):
    """Goes another way where torch exports: there a second number counts the heads."""

    asks = True

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and torch.compiler.is_exporting():
            x = x + self.out(self.qkv(x).unflatten(-1, (3, self.unrelated, 4)).unbind(-3)[0].flatten(-2)).mul(0)
        return super().forward(x)


class Deaf(Asking):
    asks = False


class Choosing(Asking):
    """Asks in a way that no truth value is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        return (Heads.forward, Asking.forward)[torch.compiler.is_exporting()](self, x)


class Passing(Asking):
    """Hands the answer on to something that takes nothing but a bool."""

    def forward(self, x: Tensor) -> Tensor:
        F.scaled_dot_product_attention(x, x, x, is_causal=torch.compiler.is_exporting())
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "more"), [*((k, {("0", "unrelated")}) for k in (Asking, Choosing, Passing)), (Deaf, set())]
)
def test_the_way_of_export_is_tried_if_the_model_asks(kind: type[Heads], more: set[Any], monkeypatch: Any) -> None:
    model = nn.Sequential(kind(6), Hidden(), nn.Linear(24, 5)).double()
    ways = counting(monkeypatch, find_unprunable.Search, "fits_in_export")
    assert followers(hap.trace(model, example())) == {("0", "heads")} | more
    assert bool(ways) is bool(more)


def test_hooks_do_not_count_as_asking() -> None:
    flag, model = Asked(), nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: None)
    with exporting(flag):
        model(torch.zeros(1, 2))
        assert not flag.heard
        assert not torch.compiler.is_exporting()
    assert flag.heard and torch.compiler.is_exporting() is False


def test_heavy_models_are_tried_once_with_few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Heads(6), Hidden(), Hidden(), nn.Linear(24, 5)).double()
    light = hap.trace(model, example())
    monkeypatch.setattr(run_round, "HEAVY_MODEL", 0)
    tried: list[removal_rounds.Round] = []
    removals = run_round.rounds_of

    def noting(*args: Any) -> list[removal_rounds.Round]:
        return tried.extend(found := removals(*args)) or found

    monkeypatch.setattr(run_round, "HEAVY_UNITS", 0)
    monkeypatch.setattr(run_round, "rounds_of", noting)
    heavy = hap.trace(model, example())
    assert len(tried) == 1
    fewer, more = tried[0]
    assert 6 - removal_rounds.FEW[1] <= len(fewer["0.qkv"]) <= 6 - removal_rounds.FEW[0]
    assert len(fewer["0.qkv"]) < len(more["0.qkv"]) < 6
    assert followers(heavy) == followers(light) and list(heavy) == list(light)

"""Examples that would let a wrong split into heads pass: constant ones, and those with one token."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hap
from hap.verification.informative_values import informative_example

HEADS, WIDTH = 4, 32


class Attention(nn.Module):
    """Heads as wide as what is left over: with fewer rows any number of heads runs. `hidden`: out of HAP's reach."""

    def __init__(self, hidden: bool = False):
        super().__init__()
        self.heads = object() if hidden else HEADS
        self.settings = {"heads": HEADS}
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads if isinstance(self.heads, int) else self.settings["heads"]
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Square(nn.Module):
    """As many heads as each is wide, so that either number may seem to count them."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.heads = 8, 8
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def loses_heads(model: nn.Module, example: Any, width: int, others: Tensor) -> float:
    """How far a model that lost two heads, as seen on an example, is from one with zeros in their place on others."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    dense = copy.deepcopy(model)
    groups = hap.trace(model, example)
    (name,) = hap.heads(groups)
    hap.apply_(model, hap.draft(groups, {name: [0, 2]}), example)
    for head in (0, 2):
        dense.get_submodule("out").weight.data[:, width * head : width * (head + 1)] = 0
    return float((model(others) - dense(others)).abs().max())


@pytest.mark.parametrize("value", [1.0, 0.0, -3.0])
def test_constant_inputs_give_way_to_noise(value: float) -> None:
    example, model = torch.full((2, 6, WIDTH), value), Attention()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the example does not show")
        assert loses_heads(model, example, 8, torch.randn(2, 6, WIDTH)) < 1e-5
    assert model.heads == 2
    assert bool((example == value).all())


def test_of_two_equal_numbers_the_right_one_follows_on_constant_inputs() -> None:
    model = Square()
    assert loses_heads(model, torch.ones(2, 6, 64), 8, torch.randn(2, 6, 64)) < 1e-5
    assert (model.heads, model.width) == (6, 8)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_zeros_stand_in_where_nothing_tells_the_heads_apart(alike: bool, hidden: bool) -> None:
    example = torch.randn(1, 1, WIDTH).expand(2, 6, WIDTH) if alike else torch.randn(2, 1, WIDTH)
    model = Attention(hidden)
    with pytest.warns(UserWarning, match="does not show how qkv is split into heads.*several different tokens"):
        assert loses_heads(model, example, 8, torch.randn(2, 6, WIDTH)) < 1e-5
    assert model.settings["heads"] == HEADS
    assert model.qkv.weight.shape == (3 * WIDTH // 2, WIDTH)


def test_heads_of_equal_token_ids_without_positions_are_not_guessed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, WIDTH), Attention())
    with pytest.warns(UserWarning, match=r"does not show how 1\.qkv is split"):
        groups = hap.trace(model, torch.full((2, 6), 7))
    assert groups.pads("1.qkv")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the example does not show")
        assert not hap.trace(model, torch.randint(20, (2, 6))).traits.zero_padded


def test_multihead_attention_on_one_token_keeps_its_heads_and_says_why() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + self.attention(x, x, x, need_weights=False)[0])

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="does not show"):
        groups = hap.trace(Wrapped().eval(), torch.randn(2, 1, WIDTH))
    assert not hap.heads(groups)
    assert "the example does not show how it is split into heads" in str(groups)
    assert hap.heads(hap.trace(Wrapped().eval(), torch.randn(2, 3, WIDTH)))


def test_heads_that_get_next_to_nothing_are_tried_with_larger_weights() -> None:
    class Faint(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(1e-4 * x)

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the example does not show")
        groups = hap.trace(Faint(), torch.randn(2, 6, WIDTH))
    assert hap.heads(groups) == ["qkv"] and not groups.traits.zero_padded
    assert [(x.attribute, len(x.classes)) for x in groups.rewiring.size_attributes] == [("heads", HEADS)]


def test_noise_is_kept_out_where_the_model_would_not_take_it() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, index: Tensor) -> Tensor:
            return x + (scale - 1).sqrt().sum() + index

    ones, index = torch.ones(2, 3), torch.zeros(3, dtype=torch.int64)
    x, scale, same = informative_example(Picky(), (ones, ones, index))
    assert not torch.equal(x, ones) and float(x.min()) >= 0.5
    assert scale is ones and same is index
    again = informative_example(Picky(), (ones, ones, index))[0]
    assert torch.equal(x, again)

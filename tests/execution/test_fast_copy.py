"""Copies are what copy.deepcopy makes."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hap.execution.fast_copy import deepcopied


class Odd(nn.Module):
    """Holds all sorts of things: itself in a list, a tensor and a view of it, one list by two names, another's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)
        self.b.weight = self.a.weight
        self.c, self.again = nn.BatchNorm1d(4), self.a
        self.sizes: list[int] = [1, 2]
        self.names: dict[Any, Any] = {"x": (1, [2]), ("y", 1): {3}}
        self.same, self.hidden, self.empty = self.sizes, [self, self.a], OrderedDict[str, Any]()
        self.table = torch.arange(6.0)
        self.part = self.table[2:4]
        self.c.register_forward_hook(_double)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x))


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class Counted(nn.Linear):
    """Has a way of its own to be copied."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        self.copies += 1
        return self


def test_what_is_one_stays_one_and_nothing_else_is_shared() -> None:
    model, x = Odd().eval(), torch.randn(2, 3)
    made = deepcopied(model, {})
    assert made.hidden[0] is made and made.hidden[1] is made.a is made.again
    assert made.b.weight is made.a.weight and made.a.weight is not model.a.weight
    assert made.same is made.sizes and made.sizes is not model.sizes
    assert made.names == model.names and made.names["x"][1] is not model.names["x"][1]
    assert type(made.empty) is OrderedDict and made.empty is not model.empty
    made.table.zero_()
    assert not made.part.any() and model.part.all()
    made.c.running_mean.add_(1)
    assert not model.c.running_mean.any()  # type: ignore[union-attr]
    made.c.running_mean.sub_(1)
    assert torch.equal(made(x), model(x)) and len(made.c._forward_hooks) == 1
    assert vars(made).keys() == vars(copy.deepcopy(model)).keys()


def test_what_is_in_the_memo_is_taken_from_there() -> None:
    model = Odd()
    shared = {id(p): p for p in model.parameters()}
    assert all(a is b for a, b in zip(deepcopied(model, shared).parameters(), model.parameters(), strict=True))


def test_a_module_that_copies_itself_does() -> None:
    layer = Counted(2, 2)
    assert deepcopied(nn.Sequential(layer), {})[0] is layer and layer.copies == 1


def test_computed_weights_are_copied() -> None:
    model, x = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4))), torch.randn(2, 3)
    made = deepcopied(model, {})
    assert torch.equal(made(x), model(x))
    assert {id(p) for p in made.parameters()}.isdisjoint(id(p) for p in model.parameters())


def test_what_belongs_to_a_graph_is_copied_without_it() -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU())
    wanted = model(x := torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    made = deepcopied(model, {})
    assert torch.equal(made[0].weight, model[0].weight) and made[0].weight.is_leaf
    assert torch.equal(made(x), wanted) and made[0].weight.grad_fn is not None

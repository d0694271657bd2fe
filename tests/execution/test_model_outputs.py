"""Models that return more than tensors: objects are left out, and tensors in dataclasses and mappings are not."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hap
from hap.execution.model_outputs import output_tensors


class Cache:
    """What torch knows nothing of."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, keys: Tensor) -> Tensor:
        self.keys.append(keys)
        return self.keys[-1]


@dataclass
class Answer:
    logits: Tensor
    cache: Any = None


class Decoder(nn.Module):
    """Attention whose keys it also returns, in an object."""

    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.heads, self.wrap = 4, wrap
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        cache = Cache()
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, cache.update(k), v)
        logits = self.last((x + self.out(mixed.transpose(1, 2).flatten(2))).mean(1))
        return self.wrap(logits, cache) if self.wrap else {"logits": logits, "cache": cache}


WRAPPED = {
    "dict": None,
    "tuple": lambda logits, cache: (logits, cache, 3),
    "dataclass": Answer,
    "mapping": lambda logits, cache: UserDict(logits=logits, cache=cache),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_cache_among_the_outputs_is_left_out(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Decoder(WRAPPED[kind]), torch.randn(3, 5, 16)
    groups = hap.trace(model, x)
    assert hap.heads(groups) == ["q"] and model.last.weight.shape == (3, 16)
    assert "last (an output of the model)" in str(groups)
    hap.apply_(model, hap.draft(groups, {"q": [1, 2]}), x)
    assert model.heads == 2
    tensors = [o for o in output_tensors(model, x) if isinstance(o, Tensor)]
    assert [t.shape for t in tensors] == [(3, 3)]


def test_scores_costs_and_exports_of_a_model_that_returns_its_cache(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = Decoder(Answer), torch.randn(3, 5, 16), torch.tensor([0, 2, 1])
    dense = copy.deepcopy(model)
    groups = hap.trace(model, x)
    heads = hap.only(groups, hap.heads(groups))
    for criterion in (hap.GateGradient(), hap.HessianTrace(probes=2), hap.JointTrace("gauss-newton")):
        scores = hap.score(model, heads, [(x, y)], lambda o, y: functional.cross_entropy(o.logits, y), criterion)
        assert all(len(s) == 4 for s in scores.values())
    hap.apply_(model, hap.plan(heads, scores, hap.Budget(channels=0.5)), x)
    assert hap.cost(model, x).macs < hap.cost(dense, x).macs
    program = torch.export.load(hap.export(tmp_path / "decoder.pt2", model, x))
    torch.testing.assert_close(program.module()(x)["logits"], model(x).logits, rtol=1e-4, atol=1e-5)
    assert isinstance(model(x).cache, Cache)


def test_heads_that_one_token_does_not_tell_apart_are_noticed_in_dataclasses_too() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="does not show how q is split into heads"):
        assert hap.trace(Decoder(Answer), torch.randn(3, 1, 16)).traits.zero_padded


def test_what_holds_no_tensors_is_refused_by_name() -> None:
    model = Decoder(lambda logits, cache: cache)
    with pytest.raises(hap.HapError, match="returns a Cache, in which no tensor is found"):
        hap.trace(model, torch.randn(3, 5, 16))

"""Heads of attention whose forward hands a layer's weight to functional.linear, and counts on all of what that returns.

No hook can stand behind such a layer, and no attribute tells the forward of fewer heads.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hap
from checks import gap, reference, run

WIDTH, HEADS, TOKENS = 8, 4, 5


class Handed(nn.Module):
    """Biases of queries and values alone, and one for each head and distance; the width is that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.register_buffer("k_bias", torch.zeros(WIDTH), persistent=False)
        self.table = nn.Parameter(torch.randn(2 * TOKENS - 1, HEADS))
        distances = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS) + TOKENS - 1
        self.register_buffer("distances", distances, persistent=False)

    def computed(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return functional.linear(x, weight=self.qkv.weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.computed(x).reshape(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.table[self.distances.view(-1)].view(length, length, -1).permute(2, 0, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, bias[None])
        return x + self.output(mixed.transpose(1, 2).reshape(n, length, width))

    def output(self, x: Tensor) -> Tensor:
        return self.out(x)


class OwnBias(Handed):
    """The layer's own bias, which is cut with it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.qkv.weight, self.qkv.bias)


class NoBias(Handed):
    def computed(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.qkv.weight)


class Separate(Handed):
    """Three layers, of which one is called."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def computed(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv
        return torch.cat((functional.linear(x, q.weight, self.q_bias), functional.linear(x, k.weight), v(x)), -1)


class BothHanded(Handed):
    """So is the layer that reads the heads."""

    def output(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.out.weight, self.out.bias)


class Multiplied(Handed):
    """The weight goes into a product that is no layer's."""

    def computed(self, x: Tensor) -> Tensor:
        return x @ self.qkv.weight.mT


class Copied(Handed):
    """The forward hands on a copy of the weight."""

    def computed(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.qkv.weight.clone())


def model_of(*layers: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    return model, torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)


def pruned_half(model: nn.Module, x: Tensor) -> tuple[nn.Module, hap.Plan]:
    groups = hap.trace(model, x)
    heads = hap.only(groups, hap.heads(groups))
    scores = hap.score(model, heads, None, None, hap.Random(seed=1))
    plan = hap.Plan.from_json(hap.plan(heads, scores, hap.Budget(channels=0.5)).to_json())
    pruned = hap.apply_(copy.deepcopy(model), plan, x)
    assert gap(run(pruned, x), reference(model, heads, plan, pruned, x)) <= 1e-10
    assert gap(run(pruned, x), run(model, x)) > 1e-3
    return pruned, plan


@pytest.mark.parametrize("layer", [Handed, OwnBias, NoBias, Separate, BothHanded])
def test_zeros_stand_in_behind_a_weight_that_is_handed_on(layer: Any) -> None:
    model, x = model_of(layer(), layer())
    groups = hap.trace(model, x)
    names = hap.heads(groups)
    assert len(names) == 2 and all(len(groups[n]) == HEADS for n in names)
    assert groups.traits.zero_padded == {c for n in names for c in groups[n].classes.tolist()}
    pruned, plan = pruned_half(model, x)
    count = hap.cost(pruned, x)
    assert (count.params, count.macs) == (plan.after.params, plan.after.macs) and count.macs < plan.before.macs
    left = [len(units) for units in plan.kept.values()]
    assert [m.out.weight.shape[1] for m in pruned[:2]] == [n * WIDTH // HEADS for n in left]
    assert all(isinstance(m, layer) and m.q_bias.shape == (WIDTH,) for m in pruned[:2])


@pytest.mark.parametrize("layer", [Multiplied, Copied])
def test_other_uses_of_a_weight_are_left_alone(layer: Any) -> None:
    model, x = model_of(layer())
    groups = hap.trace(model, x)
    assert not hap.heads(groups)
    assert any("counts on its size: RuntimeError: shape" in f.why for f in groups.frozen)


@pytest.mark.parametrize("layer", [Handed, BothHanded])
def test_a_pruned_model_is_like_any_other(layer: Any, tmp_path: Path) -> None:
    model, x = model_of(layer(), layer())
    pruned, plan = pruned_half(model, x)
    wanted = pruned(x)
    hap.save(tmp_path / "pruned.safetensors", pruned, plan)
    assert torch.equal(hap.load(tmp_path / "pruned.safetensors", copy.deepcopy(model))(x), wanted)
    assert torch.equal(copy.deepcopy(pruned)(x), wanted)
    pickled = io.BytesIO()
    torch.save(pruned, pickled)
    pickled.seek(0)
    assert torch.equal(torch.load(pickled, weights_only=False)(x), wanted)
    program = torch.export.load(hap.export(tmp_path / "pruned.pt2", pruned, x)).module()
    torch.testing.assert_close(program(x), wanted)
    torch.testing.assert_close(torch.compile(pruned, backend="eager", fullgraph=True)(x), wanted)
    assert type(pruned[0]) is type(pruned[1]) is not layer
    assert hap.heads(hap.trace(pruned, x)) == []
    wanted.square().sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in pruned.parameters())


@pytest.mark.parametrize("layer", [Handed, BothHanded])
def test_what_is_compensated_are_layers_that_are_called(layer: Any) -> None:
    model, x = model_of(layer())
    groups = hap.trace(model, x)
    plan = hap.draft(groups, {"0.qkv": [1]})
    before = model[0].out.weight.clone()
    hap.compensate_(model, plan, [(x, None)])
    assert torch.equal(model[0].out.weight, before) == (layer is BothHanded)
    hap.apply_(model, plan, x)
    assert model[0].out.weight.shape == (WIDTH, WIDTH - WIDTH // HEADS)


def test_a_plan_for_another_model_is_refused() -> None:
    model, x = model_of(Handed())
    _, plan = pruned_half(model, x)
    text = plan.to_json().replace('"inside": "0"', '"inside": "7"')
    with pytest.raises(hap.HapError, match="it has no module '7'"):
        hap.apply_(model, hap.Plan.from_json(text), x)

"""Heads of families whose forward does not simply do with fewer: shared tables, odd layouts, numbers out of reach."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from checks import gap, reference, run
from huggingface import library

WIDTH, HEADS = 32, 4
TEXT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": 60}
WORDS = TEXT | {"intermediate_size": 48, "max_position_embeddings": 40}
GROUPED = WORDS | {"num_key_value_heads": 2, "pad_token_id": 0}
T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 1,
    "num_heads": HEADS,
    "vocab_size": 60,
}
GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": 60, "n_positions": 40}

FAMILIES: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "one table for all layers, which the first makes": ("T5ForConditionalGeneration", T5, 5, HEADS, 1),
    "the same, and one of zeros for cross-attention": (
        "T5ForConditionalGeneration",
        T5 | {"num_layers": 2, "num_decoder_layers": 2},
        6,
        HEADS,
        4,
    ),
    "slopes of heads": (
        "BloomForCausalLM",
        {"hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": 60},
        2,
        HEADS,
        2,
    ),
    "one key for all queries, fused": ("FalconForCausalLM", TEXT, 2, HEADS, 0),
    "grouped queries, fused": (
        "FalconForCausalLM",
        TEXT | {"new_decoder_architecture": True, "num_kv_heads": 2},
        2,
        2,
        0,
    ),
    "how many heads stands in the configuration": ("Phi3ForCausalLM", GROUPED, 2, 2, 2),
    "norms over all heads": ("Olmo2ForCausalLM", GROUPED, 2, 2, 2),
    "heads in four blocks": ("CodeGenForCausalLM", GPT | {"rotary_dim": 4}, 2, HEADS, 2),
    "a layer that counts its outputs": ("OpenAIGPTLMHeadModel", GPT, 2, HEADS, 0),
}
"""Model class, settings, layers of attention, units in each, and in how many of them zeros stand in for what goes."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", FAMILIES)
def test_heads_of(what: str) -> None:
    name, settings, layers, units, padded = FAMILIES[what]
    network = getattr(library(), name)
    torch.manual_seed(0)
    model, ids = network(network.config_class(**settings)).eval(), torch.randint(3, 60, (2, 9))
    more = {"decoder_input_ids": ids[:, :5]} if "Conditional" in name else {}
    example = {"input_ids": ids, **more} | ({"use_cache": False} if "OpenAI" not in name else {})
    groups = hap.trace(model, example)
    names = hap.heads(groups)
    assert [len(groups[n]) for n in names] == [units] * layers
    assert sum(groups.pads(n) for n in names) == padded
    _halve(model, example, hap.only(groups, names))


def _halve(model: nn.Module, example: Any, heads: hap.Groups, within: float = 1e-5) -> tuple[nn.Module, hap.Plan]:
    """Without half of its heads, whichever, a model equals itself with these masked, and costs what the plan says."""
    for seed in range(3):
        plan = hap.plan(heads, hap.score(model, heads, None, None, hap.Random(seed=seed)), hap.Budget(channels=0.5))
        pruned = hap.apply_(copy.deepcopy(model), plan, example)
        assert sum(map(len, plan.kept.values())) == heads.units // 2
        assert gap(run(pruned, example), reference(model, heads, plan, pruned, example)) <= within
        assert gap(run(pruned, example), run(model, example)) > 10 * within
        count = hap.cost(pruned, example)
        assert (count.params, count.macs) == (plan.after.params, plan.after.macs) and count.macs < plan.before.macs
    return pruned, plan


def test_the_manual_shows_what_the_benchmark_found() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "results" / "heads" / "families.json").read_text())["rows"]
    table = runpy.run_path(str(root / "benchmarks" / "heads_of_families.py"))["table"](rows)
    assert table in (root / "docs" / "heads.md").read_text()
    assert all(row.get("gap", 0) <= 1e-5 for row in rows if row.get("masks", True))
    assert [row["family"] for row in rows if not row.get("masks", True)] == ["olmo2"]


class NormOfAll(nn.Module):
    """Attention of four heads of width 2, whose queries one norm spans, computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        q = q * (q.square().mean(-1, True) + 0.1).rsqrt()
        q, k, v = (part.view(*x.shape[:2], 4, 2).transpose(1, 2) for part in (q, self.k(x), self.v(x)))
        return x + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_plan_says_where_a_norm_spans_its_heads() -> None:
    """Zeros enter the norm, so what is left equals the model without the slices, not the one with masked heads."""
    torch.manual_seed(0)
    model, x = NormOfAll().double().eval(), torch.randn(2, 5, 8, dtype=torch.float64)
    groups = hap.trace(model, x)
    heads = hap.only(groups, hap.heads(groups))
    assert "zeros stand in for what goes and enter a norm" in str(heads)
    plan = hap.draft(heads, {"q": [0, 2]})
    assert plan.exact and not plan.masks and "the result is not that of masking it" in str(plan)
    assert hap.Plan.from_json(plan.to_json()) == plan
    pruned, masked, gone = hap.apply_(copy.deepcopy(model), plan, x), copy.deepcopy(model), [0, 1, 4, 5]
    masked.out.weight.data[:, gone] = 0
    assert gap(run(pruned, x), run(masked, x)) > 1e-3
    for layer in (masked.q, masked.k, masked.v):
        layer.weight.data[gone], layer.bias.data[gone] = 0, 0
    assert gap(run(pruned, x), run(masked, x)) < 1e-10
    none = hap.draft(heads, {})
    assert none.masks and "masking" not in str(none)


# ---- one by one ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention over tokens of width 8 with 4 heads, which `scores` turns into scores and `split` takes apart."""

    def __init__(self, scores: Callable[..., Tensor], outputs: int = 24):
        super().__init__()
        self.scores, self.heads = scores, 4
        self.qkv, self.out = nn.Linear(8, outputs), nn.Linear(8, 8)
        self.pool = nn.Conv1d(2, 2, 3, padding=1) if scores is pooled else None

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, -1, 2)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mixed = self.scores(self, q, k).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class OneKey(Attention):
    """All heads share one key and one value, the last two of what is computed at once."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.qkv(x).view(*x.shape[:2], self.heads + 2, 2)
        return tuple(p.transpose(1, 2) for p in (parts[:, :, :-2], parts[:, :, [-2]], parts[:, :, [-1]]))


def plain(self: Attention, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def repeated(self: Attention, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.expand(-1, q.shape[1], -1, -1).mT


def sloped(self: Attention, q: Tensor, k: Tensor) -> Tensor:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=q.dtype)
    return q @ k.mT + slopes[:, None, None] * torch.arange(k.shape[2], dtype=q.dtype)


def batched(self: Attention, q: Tensor, k: Tensor) -> Tensor:
    bias = torch.arange(k.shape[2], dtype=q.dtype).type_as(q).expand(q.shape[2], -1)
    return torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.5).view(q.shape[0], -1, *bias.shape)


def broadcast(self: Attention, q: Tensor, k: Tensor) -> Tensor:
    return q @ torch.broadcast_to(k, k.shape).mT + torch.zeros_like(q[..., :1]) + q.new_ones(1)


def pooled(self: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Keys are mixed with their neighbours, by one convolution for all heads, which stand in its batch."""
    mixed = self.pool(k.flatten(0, 1).mT).mT.unflatten(0, (len(k), -1))
    return q @ mixed.mT


def written(self: Attention, q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[:, :, 1:] = scores[:, :, 1:] * 0.5
    return scores


def drawn(model: nn.Module, scale: float = 1.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    for parameter in model.double().eval().parameters():
        parameter.data = scale * torch.randn_like(parameter)
    return model, torch.randn(2, 5, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layer", "padded"),
    [
        (Attention(plain), 0),
        (Attention(sloped), 4),
        (Attention(batched), 0),
        (Attention(broadcast), 0),
        (Attention(pooled), 0),
        (Attention(written), 0),
        (OneKey(plain, 12), 0),
        (OneKey(repeated, 12), 0),
    ],
    ids=["plain", "sloped", "batched", "broadcast", "pooled", "written", "one key", "one key repeated"],
)
def test_heads_go_from(layer: Attention, padded: int) -> None:
    model, x = drawn(nn.Sequential(layer, nn.Linear(8, 3)))
    groups = hap.trace(model, x)
    assert hap.heads(groups) == ["0.qkv"] and len(groups["0.qkv"]) == 4 and len(groups.traits.zero_padded) == padded
    pruned, _ = _halve(model, x, hap.only(groups, ["0.qkv"]), 1e-10)
    assert pruned[0].out.weight.shape == (8, 4)
    assert pruned[0].qkv.weight.shape[0] == (8 if isinstance(layer, OneKey) else 12)


def test_a_head_that_zeros_stand_in_for_is_gone_for_good(tmp_path: Any) -> None:
    """Saved, reloaded, trained and exported like any other; no second plan can be made for its layer."""
    model, x = drawn(nn.Sequential(Attention(sloped), nn.Linear(8, 3)))
    groups = hap.trace(model, x)
    assert "zeros stand in for what goes" in str(groups)
    assert not hap.narrowable(model, groups, x).head_spaces
    pruned, plan = _halve(model, x, hap.only(groups, ["0.qkv"]), 1e-10)
    hap.save(tmp_path / "pruned.safetensors", pruned, hap.Plan.from_json(plan.to_json()))
    again = hap.load(tmp_path / "pruned.safetensors", copy.deepcopy(model))
    assert torch.equal(again(x), pruned(x))
    program = torch.export.load(hap.export(tmp_path / "pruned.pt2", pruned, x)).module()
    torch.testing.assert_close(program(x), pruned(x))
    assert hap.heads(hap.trace(pruned, x)) == []
    pruned(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in pruned.parameters())


def test_what_is_no_head_is_frozen_where_it_may_not_shrink() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu() * torch.arange(6, dtype=x.dtype))

    model, x = drawn(Scaled())
    groups = hap.trace(model, x)
    assert len(groups) == 0 and ("mul", "meets something that is never cut") in {(f.what, f.why) for f in groups.frozen}


def test_heads_of_untrained_weights_keep_their_width() -> None:
    """Weights so small that all heads look at everything alike: heads of another width would give the same result."""

    class Counted(Attention):
        def split(self, x: Tensor) -> tuple[Tensor, ...]:
            q, k, v = self.qkv(x).chunk(3, -1)
            return tuple(p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (q, k, v))

    model, x = drawn(nn.Sequential(Counted(plain), nn.Linear(8, 3)), 1e-3)
    groups = hap.trace(model.float(), x.float())
    assert [(length.module, length.attribute) for length in groups.rewiring.size_attributes] == [("0", "heads")]


def test_a_parameter_without_elements_is_no_obstacle() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.attention = nn.Parameter(torch.empty(1, 0, 8)), Attention(plain)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.attention(torch.cat([self.none.expand(len(x), -1, -1), x], 1)))

    model, x = drawn(Tokens())
    assert hap.heads(hap.trace(model, x)) == ["attention.qkv"]

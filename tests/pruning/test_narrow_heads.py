"""Narrow heads: the leading directions of a head's products in place of the whole head, in unmodified modules."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from cases import CASES
from checks import gap, run
from hap.groups.groups import Groups
from hap.surgery.rotate_heads import CLOSE
from huggingface import HEADS, LAYERS, WIDTH, small

ROWS = WIDTH // HEADS
PLACES = {  # layer 0: the modules of queries, keys, values and outputs
    "bert": ("bert.encoder.layer.0.attention", "self.query", "self.key", "self.value", "output.dense"),
    "roberta": ("roberta.encoder.layer.0.attention", "self.query", "self.key", "self.value", "output.dense"),
    "mpnet": ("mpnet.encoder.layer.0.attention.attn", "q", "k", "v", "o"),
    "distilbert": ("distilbert.transformer.layer.0.attention", "q_lin", "k_lin", "v_lin", "out_lin"),
    "vit": ("vit.layers.0.attention", "q_proj", "k_proj", "v_proj", "o_proj"),
    "gpt2": ("transformer.h.0.attn", "c_attn", "c_attn", "c_attn", "c_proj"),
    "llama": ("model.layers.0.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
}
families = pytest.mark.parametrize("name", PLACES)


@cache
def _prepared(name: str) -> tuple[nn.Module, Any, Groups]:
    """A small model in float64 whose heads matter: large random weights and biases."""
    model, example = small(name)
    torch.manual_seed(5)
    model = model.double()
    for parameter in model.parameters():
        drawn = torch.randn_like(parameter)
        parameter.data = drawn * 0.3 if parameter.ndim > 1 else parameter.data + 0.2 * drawn
    example = {k: v.double() if v.is_floating_point() else v for k, v in example.items()}
    groups = hap.trace(model, example)
    return model, example, hap.narrowable(model, hap.only(groups, hap.heads(groups)), example)


def _slices(model: nn.Module, name: str, head: int) -> tuple[list[Tensor], ...]:
    """Of layer 0 the query, key, value and output slices of a head as (width, other) views, with biases as (width,)."""
    prefix, *leaves = PLACES[name]
    modules = dict(model.named_modules())
    found = []
    for place, leaf in enumerate(leaves):
        module = modules[f"{prefix}.{leaf}"]
        weight = module.weight.data.t() if name == "gpt2" else module.weight.data
        start = head * ROWS + (place * WIDTH if name == "gpt2" and place < 3 else 0)
        if place == 3:
            found.append([weight.t()[start : start + ROWS]])
        else:
            bias = [module.bias.data[start : start + ROWS]] if getattr(module, "bias", None) is not None else []
            found.append([weight[start : start + ROWS], *bias])
    return tuple(found)


def _truncate(left: list[list[Tensor]], right: list[Tensor], rank: int) -> None:
    """Put the best approximation of this rank in place of left^T right, by the SVD of the whole product."""
    both = [[part if part.ndim > 1 else part[:, None] for parts in side for part in parts] for side in (left, [right])]
    u, s, vh = torch.linalg.svd(torch.cat(both[0], 1).t() @ torch.cat(both[1], 1))
    for side, basis in ((left, u.t()), ([right], vh)):
        values, place = basis[:rank] * s[:rank, None].sqrt(), 0
        for parts in side:
            for part in parts:
                size = part.shape[1] if part.ndim > 1 else 1
                part.zero_()
                part[:rank] = values[:, place : place + size].view(rank, *part.shape[1:])
                place += size


@families
def test_a_narrow_head_is_the_dense_one_with_truncated_products(name: str) -> None:
    model, example, groups = _prepared(name)
    layer, other = groups
    plan = hap.draft(groups, {layer: [0], other: []}, {layer: [1]}, hap.NarrowHeads(rank=0.375))
    pruned = hap.apply_(copy.deepcopy(model), plan, example)
    dense = copy.deepcopy(model)
    grouped = 2 if name == "llama" else 1  # query heads that share a key and a value
    for head in range(grouped):
        for part in _slices(dense, name, head)[3]:
            part.zero_()  # the first head, or the two query heads of the first pair
    if name == "llama":  # the second pair: values and outputs alone
        value = [dict(dense.named_modules())[f"{PLACES[name][0]}.v_proj"].weight.data[ROWS : 2 * ROWS]]
        _truncate([_slices(dense, name, 2)[3], _slices(dense, name, 3)[3]], value, 3)
    else:
        query, key, value, out = _slices(dense, name, 1)
        _truncate([query], key, 3)
        _truncate([out], value, 3)
    assert gap(run(pruned, example), run(dense, example)) < (1e-6 if name == "llama" else 1e-9)
    assert gap(run(model, example), run(dense, example)) > 1e-3
    assert sum(p.numel() for p in pruned.parameters()) == plan.after.params < plan.before.params
    assert hap.cost(pruned, example).macs == plan.after.macs < plan.before.macs


@families
def test_all_of_the_width_is_the_same_model(name: str) -> None:
    model, example, groups = _prepared(name)
    plan = hap.draft(groups, {}, {n: range(len(g)) for n, g in groups.items()}, hap.NarrowHeads(rank=1.0))
    turned = hap.apply_(copy.deepcopy(model), plan, example)
    assert gap(run(turned, example), run(model, example)) < (1e-6 if name == "llama" else 1e-9)
    assert not torch.equal(_slices(turned, name, 1)[3][0], _slices(model, name, 1)[3][0])


@families
def test_rotary_embeddings_leave_values_and_outputs_alone(name: str) -> None:
    """Found by trying, not by name."""
    _, _, groups = _prepared(name)
    assert groups.units == LAYERS * (2 if name == "llama" else HEADS)
    assert len(groups.head_spaces) == groups.units * (1 if name == "llama" else 2)
    outputs = [s for s in groups.head_spaces if s.left[0].weight.endswith(f"{PLACES[name][4]}.weight")]
    assert len(outputs) == groups.units and {len(s.left) for s in outputs} == {2 if name == "llama" else 1}


@pytest.mark.parametrize("name", ["mpnet", "gpt2", "llama"])
def test_narrow_heads_are_saved_reloaded_exported_and_trained(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, example = small(name, layers=1)
    groups = hap.trace(model, example)
    heads = hap.narrowable(model, hap.only(groups, hap.heads(groups)), example)
    first = next(iter(heads))
    plan = hap.draft(heads, {first: [0]}, {n: [1] for n in heads}, hap.NarrowHeads())
    hap.apply_(model, plan, example)
    optimizer, target = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.tensor([0, 1, 1])
    losses = []
    for _ in range(12):
        losses.append(F.cross_entropy(model(**example).logits, target))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2
    hap.save(tmp_path / "narrow.safetensors", model, plan)
    again = hap.load(tmp_path / "narrow.safetensors", small(name, layers=1)[0])
    assert all(torch.equal(a, b) for a, b in zip(run(again, example), run(model, example), strict=True))
    assert hap.Plan.from_json(plan.to_json()) == plan == hap.read(tmp_path / "narrow.safetensors").plan
    session = runtime.InferenceSession(hap.export(tmp_path / "narrow.onnx", model, example))
    inputs = {i.name: v.numpy() for i, v in zip(session.get_inputs(), example.values(), strict=True)}
    seen = torch.from_numpy(session.run(None, inputs)[0])
    torch.testing.assert_close(seen, run(model, example)[0], rtol=1e-4, atol=1e-5)


# ---- planning -------------------------------------------------------------------------------------------------


def test_the_most_sensitive_of_those_that_would_go_are_narrowed() -> None:
    model, example, groups = _prepared("bert")
    scores = {n: torch.arange(4.0) + 4 * i for i, n in enumerate(groups)}
    plan = hap.plan(groups, scores, hap.Budget(flops=0.8), implant=hap.NarrowHeads(ratio=0.5, rank=0.25))
    assert plan.after.macs <= 0.8 * plan.before.macs
    parts = (plan.removed, plan.implanted, plan.kept)
    order = [next(i for i, part in enumerate(parts) if u in part[n]) for n in groups for u in range(4)]
    assert order == [0, 0, 1, 2, 1, 2, 2, 2]  # the last head of a layer stays
    pruned = hap.apply_(copy.deepcopy(model), plan, example)
    assert hap.cost(pruned, example).macs == plan.after.macs
    without = hap.plan(groups, scores, hap.Budget(flops=0.8))
    assert order.count(2) < sum(map(len, without.kept.values())) < order.count(1) + order.count(2)


def test_prune_blocks_and_prune_take_them() -> None:
    model, example, groups = _prepared("mpnet")
    for prune_ in (hap.prune_blocks_, hap.prune_):
        pruned, implant = copy.deepcopy(model), hap.NarrowHeads(0.8)
        plan = prune_(pruned, example, flops=0.6, criterion="random", implant=implant)
        assert any(plan.implanted[n] for n in groups) and not any(
            plan.implanted[n] for n in set(plan.kept) - set(groups)
        )
        assert hap.cost(pruned, example).macs == plan.after.macs <= 0.6 * plan.before.macs


def test_what_does_not_go_together_is_refused() -> None:
    model, example, _ = _prepared("mpnet")
    batches, implant = [(example, torch.tensor([0, 1, 1]))], hap.NarrowHeads(0.8)
    with pytest.raises(hap.HapError, match="expected flops="):
        hap.prune_blocks_(model, example, heads=0.5, criterion="random", implant=implant)
    with pytest.raises(hap.HapError, match="cannot be compensated"):
        hap.prune_(
            copy.deepcopy(model), example, batches, flops=0.6, criterion="random", implant=implant, compensate=True
        )


def test_the_lines_of_the_manual() -> None:
    text = (Path(__file__).parents[2] / "docs" / "heads.md").read_text().partition("## Narrower heads\n")[2]
    model, example = small("bert")
    groups = hap.trace(model, example)
    heads = hap.only(groups, hap.heads(groups))
    scores = hap.score(model, heads, None, None, "random")
    names: dict[str, Any] = {"hap": hap, "model": model, "heads": heads, "scores": scores, "example": example}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    assert any(names["plan"].implanted.values()) and hap.cost(model, example).macs == names["plan"].after.macs


def test_the_manual_shows_what_the_benchmark_measured() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "results" / "heads" / "narrow-mpnet.json").read_text())["rows"]
    text = (root / "docs" / "heads.md").read_text()
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(json.dumps(row["implant"]), []).append(f"{row['cosine']:.3f}")
    assert len(kinds) == 5 and all(f"| {' | '.join(cells)} |" in text for cells in kinds.values())


def test_says_what_is_missing_or_wrong() -> None:
    model, example, groups = _prepared("bert")
    plain, first = hap.only(hap.trace(model, example), groups), next(iter(groups))
    with pytest.raises(hap.HapError, match=r"expected groups from hap\.narrowable"):
        hap.draft(plain, {}, {first: [1]}, hap.NarrowHeads())
    with pytest.raises(hap.HapError, match="rank is 0"):
        hap.NarrowHeads(rank=0)
    everything = hap.narrowable(model, hap.trace(model, example), example)
    neurons = hap.mlps(everything)[0]
    with pytest.raises(hap.HapError, match=rf"unit 2 of '{neurons}' cannot be replaced"):
        hap.draft(everything, {}, {neurons: [2]}, hap.NarrowHeads())
    network = CASES["residual"]()
    with pytest.raises(hap.HapError, match="no head of this model can be"):
        hap.prune_(*network, flops=0.5, criterion="magnitude", implant=hap.NarrowHeads())


def test_a_second_pruning_leaves_layers_with_narrow_heads_alone(tmp_path: Path) -> None:
    model, example, groups = _prepared("gpt2")
    model, (layer, _) = copy.deepcopy(model), groups
    first = hap.draft(groups, {}, {layer: [1]}, hap.NarrowHeads())
    hap.apply_(model, first, example)
    again = hap.trace(model, example)
    assert layer not in hap.heads(again) and len(hap.mlps(again)) == LAYERS
    second = hap.prune_(model, example, flops=0.8, criterion="magnitude")
    assert hap.cost(model, example).macs == second.after.macs
    hap.save(tmp_path / "twice.safetensors", model, [first, second])
    fresh = hap.load(tmp_path / "twice.safetensors", small("gpt2")[0].double())
    assert torch.equal(run(fresh, example)[0], run(model, example)[0])


# ---- what lies between ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Four heads of width 4 on a stream of width 12, with something done to them on the way."""

    def __init__(self, between: str = "nothing"):
        super().__init__()
        self.between = between
        shared = 8 if between == "groups" else 16
        self.q, self.gate, self.k, self.v = (nn.Linear(12, width) for width in (16, 16, shared, shared))
        self.o, self.out = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.between == "groups":
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        if self.between == "norm":
            q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
        if self.between == "positions":
            q = q * torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[:, None] ** torch.arange(4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.between == "gate":
            mixed = mixed * torch.sigmoid(self.gate(x))
        return self.out(x + self.o(mixed))


@pytest.mark.parametrize(
    ("between", "spaces"), [("nothing", 8), ("groups", 4), ("norm", 4), ("positions", 4), ("gate", 0)]
)
def test_what_lies_between_decides(between: str, spaces: int) -> None:
    torch.manual_seed(0)
    model, x = Attention(between).double().eval(), torch.randn(2, 5, 12, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    groups = hap.trace(model, x)
    found = hap.narrowable(model, groups, x)
    assert hap.heads(groups) == ["q"] and len(found.head_spaces) == spaces
    assert {len(s.left) for s in found.head_spaces} <= {2 if between == "groups" else 1}
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_plan_for_another_forward_is_refused_and_changes_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    model, other = Attention().double().eval(), Attention("positions").double().eval()
    plan = hap.draft(hap.narrowable(model, hap.trace(model, x), x), {}, {"q": [1]}, hap.NarrowHeads())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(hap.HapError, match="depends on the basis of heads"):
        hap.apply_(other, plan, x)
    assert all(torch.equal(v, before[n]) for n, v in other.state_dict().items())
    short = nn.Sequential()
    short.q = nn.Linear(12, 3)
    with pytest.raises(hap.HapError, match="does not fit this model"):
        hap.apply_(short, plan, x)


def test_rounding_in_float32_is_told_from_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with TF32 on a GPU: what is off in float32 is looked at again in float64."""
    monkeypatch.setitem(CLOSE, torch.float32, 0.0)
    torch.manual_seed(0)
    model, other, x = Attention().eval(), Attention("positions").eval(), torch.randn(2, 5, 12)
    plan = hap.draft(hap.narrowable(model, hap.trace(model, x), x), {}, {"q": [1]}, hap.NarrowHeads())
    assert hap.cost(hap.apply_(model, plan, x), x).macs == plan.after.macs
    with pytest.raises(hap.HapError, match="depends on the basis of heads"):
        hap.apply_(other, plan, x)


def test_layers_that_are_used_twice_are_narrowed_for_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x + self.block(x).sum(-1, keepdim=True))

    torch.manual_seed(0)
    model, x = Twice().double().eval(), torch.randn(2, 5, 12, dtype=torch.float64)
    groups = hap.narrowable(model, hap.trace(model, x), x)
    assert len(groups.head_spaces) == 8
    plan = hap.draft(groups, {}, {"block.q": [1, 2]}, hap.NarrowHeads())
    assert hap.cost(hap.apply_(model, plan, x), x).macs == plan.after.macs < plan.before.macs


def test_layers_that_are_not_called_keep_the_width_of_their_heads() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + self.attention(x, x, x, need_weights=False)[0])

    model, x = Block().eval(), torch.randn(2, 5, 16)
    groups = hap.trace(model, x)
    assert len(hap.heads(groups)) == 1 and hap.narrowable(model, groups, x).head_spaces == ()


@pytest.mark.parametrize("verify", [True, False])
def test_weights_that_are_not_finite_are_refused_and_nothing_is_changed(verify: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), nn.Linear(3, 12), Attention()).double().eval()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    groups = hap.narrowable(model, hap.trace(model, x), x)
    plan = hap.draft(groups, {}, {name: [1] for name in hap.heads(groups)}, hap.NarrowHeads())
    model[2].v.weight.data[4:8] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(hap.HapError, match=r"2\.v\.weight holds values that are not finite"):
        hap.apply_(model, plan, x, verify=verify)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)

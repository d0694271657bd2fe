"""Heads and MLP neurons as units, criteria on them, and the models that people have them in."""

from __future__ import annotations

import copy
import json
import runpy
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hap
from cases import CASES
from checks import gap, reference, run, traced
from exact import full_hessian
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import units_of
from hap.scoring.over_all_slices import all_slices
from huggingface import HEADS, HIDDEN, LAYERS, SETTINGS, library, small
from traced_once import tracing_once


class Encoder(nn.Module):
    """Two blocks of attention (4 heads of width 2) and MLP on a stream of width 8, a pooler and a classifier."""

    def __init__(self, width: int = 8, heads: int = 4, classes: int = 3):
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    n: nn.Linear(*shape)
                    for n, shape in (
                        ("q", (width, width)),
                        ("k", (width, width)),
                        ("v", (width, width)),
                        ("o", (width, width)),
                        ("up", (width, 12)),
                        ("down", (12, width)),
                    )
                }
            )
            for _ in range(2)
        )
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (layer[n](x).unflatten(-1, (-1, 2)).transpose(1, 2) for n in "qkv")
            x = x + layer["o"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](x)))
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


@pytest.fixture
def encoder() -> tuple[Encoder, Tensor, list[Any]]:
    torch.manual_seed(3)
    model = Encoder().double().eval()
    x, y = torch.randn(6, 5, 8, dtype=torch.float64), torch.randint(0, 3, (6,))
    return model, x[:2], [(x[:4], y[:4]), (x[4:], y[4:])]


@pytest.fixture(autouse=True, scope="module")
def _one_trace() -> Iterator[None]:
    """Models of transformers that several tests prune are traced once."""
    with tracing_once():
        yield


@cache
def encoder_groups() -> Groups:
    """What a trace finds in the encoder, which each test gets anew with the same numbers."""
    with torch.random.fork_rng():
        return hap.trace(Encoder().double().eval(), torch.randn(2, 5, 8, dtype=torch.float64))


# ---- which groups are what ----------------------------------------------------------------------------------


def test_heads_and_neurons_are_told_from_the_rest() -> None:
    groups = encoder_groups()
    assert hap.heads(groups) == ["layers.0.q", "layers.1.q"]
    assert hap.mlps(groups) == ["layers.0.up", "layers.1.up"]
    assert "pooler" in groups and {len(groups[n]) for n in hap.heads(groups)} == {4}


class Normed(Encoder):
    """Queries and keys are normed head by head: by torch's norms, or by hand with the weight first, as is common."""

    def __init__(self, norm: str, widths: tuple[int, ...] = (2, 2)):
        super().__init__()
        self.norm, self.widths = norm, widths
        self.norms = nn.ModuleList(getattr(nn, norm, nn.RMSNorm)(w) for w in widths)

    def normed(self, x: Tensor, layer: int) -> Tensor:
        norm = self.norms[layer]
        return norm.weight * (x / (x.square().mean(-1, True) + 0.1).sqrt()) if self.norm == "by hand" else norm(x)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            q, k, v = (layer[n](x).unflatten(-1, (-1, self.widths[i])).transpose(1, 2) for n in "qkv")
            q, k = self.normed(q, i), self.normed(k, i)
            x = x + layer["o"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.classifier(x[:, 0])


def drawn(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.double().eval().parameters():
        parameter.data = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm", "by hand"])
def test_heads_go_whole_where_each_is_normed(norm: str) -> None:
    model, x = drawn(Normed(norm)), torch.randn(2, 5, 8, dtype=torch.float64)
    groups = hap.trace(model, x)
    names = [f"layers.{i}.q" for i in range(2)]
    assert hap.heads(groups) == names and [len(groups[n]) for n in names] == [4, 4]
    plan = hap.draft(groups, {names[0]: [1], names[1]: [0, 2, 3]})
    pruned = hap.apply_(copy.deepcopy(model), plan, x)
    assert pruned.layers[1]["k"].weight.shape == (2, 8) and pruned.norms[1].weight.shape == (2,)
    assert gap(run(pruned, x), reference(model, groups, plan, pruned, x)) <= 1e-10


def test_a_layer_of_one_head_does_not_speak_for_the_others() -> None:
    model, x = drawn(Normed("by hand", (8, 2))), torch.randn(2, 5, 8, dtype=torch.float64)
    groups = hap.trace(model, x)
    assert hap.heads(groups) == ["layers.1.q"] and "layers.0.q" not in groups


class Mixing(nn.Module):
    """Attention over tokens of width 24 with heads of width 8, in the way `mix` says, and nothing else."""

    def __init__(self, mix: Any, heads: int, fused: bool, outputs: int = 24):
        super().__init__()
        self.mix, self.heads, self.fused, width = mix, heads, fused, 8 * heads
        if fused:
            self.qkv = nn.Linear(24, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(24, width) for _ in range(3))
        self.out, self.head = nn.Linear(outputs, 24), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
        return self.head((x + self.out(self.mix(q, k, v))).mean(1))


def at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(q[:, i] @ k[:, i].mT).softmax(-1) @ v[:, i] for i in range(3)], -1)


def averaged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) @ v).mean(1)


def with_average_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1).mean(1, True) @ v).transpose(1, 2).flatten(2)


def over_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q.mT @ k).softmax(-1) @ v.mT).permute(0, 3, 1, 2).flatten(2)


def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = torch.arange(8 * q.shape[2], dtype=q.dtype).view(-1, 8).cos()
    q, k = (x * table + torch.cat([-x[..., 4:], x[..., :4]], -1) * table for x in (q, k))
    return at_once(q, k, v)


BOTH = (False, True)


@pytest.mark.parametrize(
    ("mix", "heads", "outputs", "found"),
    [
        (at_once, 3, 24, BOTH),
        (over_channels, 3, 24, BOTH),
        (rotated, 3, 24, BOTH),
        (at_once, 1, 8, ()),
        (over_channels, 1, 8, ()),
        (rotated, 1, 8, ()),
        (one_by_one, 3, 24, ()),
        (averaged, 3, 8, ()),
        (with_average_weights, 3, 24, (True,)),
    ],
)
@pytest.mark.parametrize("fused", BOTH)
def test_heads_are_whole_or_none(mix: Any, heads: int, outputs: int, found: Any, fused: bool) -> None:
    """The width of a head is no head, and what attention is made of is no MLP. `found`: if fused, or if not."""
    model, x = drawn(Mixing(mix, heads, fused, outputs)), torch.randn(2, 5, 24, dtype=torch.float64)
    groups = hap.trace(model, x)
    assert [len(groups[n]) for n in hap.heads(groups)] == [heads] * (fused in found) and hap.mlps(groups) == []
    for name in hap.heads(groups):
        slices = {(p.weight, p.dim): p.unit for p in all_slices(groups, groups[name])}
        whole = np.repeat(np.arange(heads), 8)
        assert len(slices) == (2 if fused else 4) and all(
            (u.reshape(-1, 8 * heads) == whole).all() for u in slices.values()
        )


class Talking(Mixing):
    """A layer mixes the scores of all heads. Values and what reads them go as heads; queries and keys are in all."""

    def __init__(self) -> None:
        super().__init__(self.talk, 3, False)
        self.talks = nn.Linear(3, 3)

    def talk(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.talks((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_scores_that_layers_mix_are_no_heads() -> None:
    model, x = drawn(Talking()), torch.randn(2, 5, 24, dtype=torch.float64)
    groups = hap.trace(model, x)
    (name,) = hap.heads(groups)
    assert {"v", "talks"} == set(groups[name].modules) and len(groups[name]) == 3
    plan = hap.draft(hap.only(groups, [name]), {name: [0, 2]})
    pruned = hap.apply_(copy.deepcopy(model), plan, x)
    model.out.weight.data[:, :8] = model.out.weight.data[:, 16:] = 0
    assert gap(run(pruned, x), run(model, x)) < 1e-10


class Spatial(nn.Module):
    """A gate that mixes tokens by a fixed matrix: hidden neurons, not heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down, self.head = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 2)
        self.tokens = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.down(self.up(x) * (self.tokens @ self.gate(x)))).mean(1))


def test_a_product_with_a_constant_is_no_attention() -> None:
    groups = hap.trace(drawn(Spatial()), torch.randn(2, 5, 8, dtype=torch.float64))
    assert hap.mlps(groups) == ["up"] and hap.heads(groups) == []


class Twice(nn.Module):
    """What attention gives is projected two times, as in Timesformer: nothing there is a neuron of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.more, self.head = (nn.Linear(8, n) for n in (8, 8, 8, 8, 8, 2))

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x) + x)
        return self.head((x + self.more(self.out(mixed))).mean(1))


def test_what_leaves_attention_is_no_mlp() -> None:
    groups = hap.trace(drawn(Twice()), torch.randn(2, 5, 8, dtype=torch.float64))
    assert "out" in groups and hap.mlps(groups) == []


@pytest.mark.parametrize("budget", [{"heads": 0.01}, {"mlp": 0.01}], ids=str)
def test_errors_name_the_budget_that_was_given(encoder: Any, budget: dict[str, float]) -> None:
    model, example, _ = encoder
    said = next(iter(budget))
    with pytest.raises(hap.HapError, match=rf"^{said}=0.01 cannot be reached"):
        hap.prune_blocks_(model, example, criterion="random", **budget)
    with pytest.raises(hap.HapError, match=rf"^{said}=1.5; expected the fraction that is LEFT"):
        hap.prune_blocks_(model, example, criterion="random", **{said: 1.5})


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_last_head_of_each_layer_is_not_taken_apart(name: str) -> None:
    model, example, _ = _model(name)
    hap.prune_blocks_(model, example, heads=1 / HEADS, criterion="random")
    with pytest.raises(hap.HapError, match=r"no attention heads were found .*one head has none to spare"):
        hap.prune_blocks_(model, example, heads=0.5, criterion="random")
    groups = hap.trace(model, example)
    assert [len(groups[n]) for n in hap.mlps(groups)] == [HIDDEN] * LAYERS


def test_convolutional_networks_have_no_heads() -> None:
    groups = hap.trace(*next(iter(CASES.values()))())
    assert hap.heads(groups) == []
    with pytest.raises(hap.HapError, match="no attention heads were found"):
        hap.plan_blocks(groups, {}, heads=0.5)


def test_a_head_owns_its_output_slice_too() -> None:
    groups = encoder_groups()
    slices = {(p.weight, p.dim): p.unit.tolist() for p in all_slices(groups, groups["layers.1.q"])}
    assert set(slices) == {
        ("layers.1.q.weight", 0),
        ("layers.1.k.weight", 0),
        ("layers.1.v.weight", 0),
        ("layers.1.o.weight", 1),
    }
    assert all(unit == [0, 0, 1, 1, 2, 2, 3, 3] for unit in slices.values())


def test_budgets_on_heads_and_on_neurons(encoder: Any) -> None:
    model, example, _ = encoder
    groups = encoder_groups()
    scores = hap.score(model, groups, None, None, "magnitude")
    plan = hap.plan_blocks(groups, scores, heads=0.5, mlp=0.75)
    kept = {n: len(units) for n, units in plan.kept.items()}
    assert kept["layers.0.q"] + kept["layers.1.q"] == 4 and min(kept["layers.0.q"], kept["layers.1.q"]) >= 1
    assert kept["layers.0.up"] + kept["layers.1.up"] == 18
    assert set(kept) == {"layers.0.q", "layers.1.q", "layers.0.up", "layers.1.up"}
    both = hap.plan_blocks(groups, scores, flops=0.5)
    assert both.after.macs <= 0.5 * both.before.macs
    pruned = hap.apply_(copy.deepcopy(model), both, example)
    assert hap.cost(pruned, example).macs == both.after.macs
    assert pruned.pooler.weight.shape == model.pooler.weight.shape


@pytest.mark.parametrize("budget", [{"heads": 0.5}, {"mlp": 0.5}, {"heads": 0.75, "mlp": 0.5}, {"flops": 0.6}], ids=str)
def test_one_call_prunes_blocks(encoder: Any, budget: dict[str, float]) -> None:
    model, example, batches = encoder
    dense = copy.deepcopy(model)
    plan = hap.prune_blocks_(model, example, batches, F.cross_entropy, criterion=hap.JointTrace(probes=4), **budget)
    part = hap.only(encoder_groups(), plan.kept)
    assert gap(run(model, example), reference(dense, part, plan, model, example)) < 1e-10
    assert any("q" in n for n in plan.kept) == ("mlp" not in budget or "heads" in budget)
    assert hap.cost(model, example).macs == plan.after.macs < plan.before.macs


def test_one_head_stays_in_each_layer() -> None:
    groups = encoder_groups()
    scores = {n: torch.arange(len(g)) + (100.0 if n == "layers.1.q" else 0.0) for n, g in groups.items()}
    kept = hap.plan_blocks(groups, scores, heads=0.25).kept
    assert kept == {"layers.0.q": [3], "layers.1.q": [3]}


@pytest.mark.parametrize("given", [{}, {"heads": 0.5, "flops": 0.5}, {"mlp": 0.5, "flops": 0.5}])
def test_one_kind_of_budget_at_a_time(given: dict[str, float]) -> None:
    with pytest.raises(hap.HapError, match="expected heads and/or mlp, or flops alone"):
        hap.plan_blocks(encoder_groups(), {}, **given)


@pytest.mark.parametrize("coupling", ["joint", "union"])
@pytest.mark.parametrize("case", sorted(CASES)[:12:2])
def test_only_leaves_all_else_whole(case: str, coupling: str) -> None:
    """Any choice of groups can be planned by itself, and the result runs and is what the plan says."""
    model, example = CASES[case]()
    groups = traced(case, coupling)
    names = list(groups)[::2]
    if not names:
        pytest.skip("nothing can be removed from this network")
    part = hap.only(groups, names)
    scores = hap.score(model, part, None, None, "magnitude")
    plan = hap.plan(part, scores, hap.Budget(channels=0.7))
    assert list(plan.kept) == names and plan.before.macs == hap.cost(model, example).macs
    pruned = hap.apply_(copy.deepcopy(model), plan, example)
    assert hap.cost(pruned, example).params == plan.after.params


def test_only_refuses_what_is_not_there() -> None:
    groups = encoder_groups()
    with pytest.raises(hap.HapError, match="no group 'layers"):
        hap.only(groups, ["layers.7.q"])
    with pytest.raises(hap.HapError, match="no groups are named"):
        hap.only(groups, [])


# ---- criteria against their definitions ---------------------------------------------------------------------


def _slices(groups: Any, name: str) -> list[tuple[str, int, np.ndarray]]:
    return [(p.weight, p.dim, p.unit) for p in all_slices(groups, groups[name])]


def _equation_six(model: nn.Module, groups: Any, name: str, diagonal: dict[str, Tensor]) -> Tensor:
    """trace(H_pp) / (2 |p|) * ||w_p||^2 with one p for all slices of a unit, unit by unit."""
    weights = dict(model.named_parameters())
    values = []
    for unit in range(len(groups[name])):
        parts = [(w, torch.from_numpy(np.flatnonzero(units == unit)), d) for w, d, units in _slices(groups, name)]
        trace = sum(diagonal[w].index_select(d, i).sum() for w, i, d in parts)
        own = [weights[w].detach().index_select(d, i) for w, i, d in parts]
        values.append(trace / (2 * sum(t.numel() for t in own)) * sum(t.square().sum() for t in own))
    return torch.stack(values)


@pytest.mark.parametrize("deflate", [0, 40])
def test_joint_trace_by_probes_meets_the_full_hessian(encoder: Any, deflate: int) -> None:
    model, _, batches = encoder
    groups = hap.only(encoder_groups(), ["layers.1.q"])
    diagonal = {}
    for weight, _, _ in _slices(groups, "layers.1.q"):
        with sdpa_kernel(SDPBackend.MATH):
            square = full_hessian(model, [weight], batches, F.cross_entropy)
        diagonal[weight] = square.diagonal().view_as(dict(model.named_parameters())[weight])
    wanted = _equation_six(model, groups, "layers.1.q", diagonal)
    scores = hap.score(model, groups, batches, F.cross_entropy, hap.JointTrace(probes=150, deflate=deflate))
    assert ((scores["layers.1.q"] - wanted).abs() < 4 * scores.errors["layers.1.q"]).all()
    assert scores.about == {"method": "hutchinson", "probes": 150} | ({"deflate": 40} if deflate else {})
    plain = hap.score(model, groups, batches, F.cross_entropy, hap.JointTrace(probes=150, seed=1))
    noise = [s.errors["layers.1.q"].square().mean().sqrt() for s in (scores, plain)]
    assert (noise[0] < 0.8 * noise[1]) if deflate else (0.7 < noise[0] / noise[1] < 1.4)


def test_joint_trace_by_draws_meets_the_gauss_newton_matrix(encoder: Any) -> None:
    model, _, batches = encoder
    groups = hap.only(encoder_groups(), hap.heads(encoder_groups()))
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    names = list(dict.fromkeys(w for g in groups for w, _, _ in _slices(groups, g)))
    diagonal = {n: torch.zeros_like(parameters[n]) for n in names}
    total = sum(len(y) for _, y in batches)
    for sample in (s for x, _ in batches for s in x):

        def logits(w: dict[str, Tensor], sample: Tensor = sample) -> Tensor:
            return torch.func.functional_call(model, w, (sample[None],))[0]

        with sdpa_kernel(SDPBackend.MATH):
            jacobian = torch.func.jacrev(logits)({n: parameters[n] for n in names})
        q = logits({}).detach().softmax(0)
        root = torch.linalg.cholesky(torch.diag(q) - torch.outer(q, q) + 1e-14 * torch.eye(3, dtype=q.dtype))
        for n in names:
            diagonal[n] += torch.einsum("ck,c...->k...", root, jacobian[n]).square().sum(0) / total
    scores = hap.score(model, groups, batches, F.cross_entropy, hap.JointTrace("gauss-newton", draws=300))
    for name in groups:
        wanted = _equation_six(model, groups, name, diagonal)
        torch.testing.assert_close(scores[name], wanted, rtol=0.1, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_second_derivatives_in_half_precision_are_refused(encoder: Any, dtype: torch.dtype) -> None:
    model, _, batches = encoder
    groups = units_of(encoder_groups(), "heads")
    half = copy.deepcopy(model).to(dtype)
    for criterion in (hap.JointTrace(probes=2), hap.JointTrace(probes=2, deflate=2)):
        with pytest.raises(hap.HapError, match=r"too coarse for second derivatives; call model.float\(\) first"):
            hap.score(half, groups, [(x.to(dtype), y) for x, y in batches], F.cross_entropy, criterion)


@pytest.mark.parametrize(
    "criterion", [hap.JointTrace(probes=2), hap.JointTrace("gauss-newton"), hap.GateGradient()], ids=str
)
def test_scores_that_are_not_finite_are_refused(encoder: Any, criterion: hap.Criterion) -> None:
    model, _, batches = encoder
    groups = units_of(encoder_groups(), "heads")
    model = copy.deepcopy(model)
    model.layers[0]["o"].register_full_backward_hook(lambda module, into, out: (into[0] * float("nan"),))
    with pytest.raises(hap.HapError, match="is not finite"):
        hap.score(model, groups, batches, F.cross_entropy, criterion)


def test_gauss_newton_refuses_another_loss(encoder: Any) -> None:
    model, _, batches = encoder
    groups = units_of(encoder_groups(), "heads")

    def smoothed(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.3)

    with pytest.raises(hap.HapError, match="knows the cross-entropy alone"):
        hap.score(model, groups, batches, smoothed, hap.JointTrace("gauss-newton"))


@pytest.mark.parametrize("per_layer", [False, True])
def test_gate_gradient_is_the_gradient_of_gates(encoder: Any, per_layer: bool) -> None:
    """Gates are written out: a factor for each sample and head on what the output projection reads."""
    model, _, batches = encoder
    groups = units_of(encoder_groups(), "heads")
    scores = hap.score(model, groups, batches, F.cross_entropy, hap.GateGradient(per_layer))
    total = sum(len(y) for _, y in batches)
    for number, name in enumerate(groups):
        wanted = torch.zeros(4, dtype=torch.float64)
        for x, y in batches:
            gates = torch.ones(len(x), 4, dtype=torch.float64, requires_grad=True)
            hook = model.layers[number]["o"].register_forward_pre_hook(
                lambda module, args, gates=gates: (args[0] * gates.repeat_interleave(2, 1)[:, None],)
            )
            loss = F.cross_entropy(model(x), y, reduction="sum")
            hook.remove()
            wanted += torch.autograd.grad(loss, gates)[0].abs().sum(0) / total
        torch.testing.assert_close(scores[name], wanted / wanted.norm() if per_layer else wanted)


def test_whole_magnitude_covers_all_slices(encoder: Any) -> None:
    model, _, _ = encoder
    groups = units_of(encoder_groups(), "heads")
    layer = model.layers[0]
    rows = sum(layer[n].weight.detach().view(4, 2, 8).square().sum((1, 2)) for n in "qkv")
    columns = layer["o"].weight.detach().view(8, 4, 2).square().sum((0, 2))
    scores = hap.score(model, groups, None, None, hap.Whole(hap.Magnitude()))
    torch.testing.assert_close(scores["layers.0.q"], (rows + columns) / 64)


@pytest.mark.parametrize(
    "criterion", [hap.L1(), hap.Taylor(), hap.DiagonalFisher(), hap.OBD(probes=3)], ids=lambda c: c.name
)
def test_whole_adds_the_output_slice_to_others(encoder: Any, criterion: hap.Criterion) -> None:
    model, _, batches = encoder
    groups = units_of(encoder_groups(), "heads")
    more = hap.score(model, groups, batches, F.cross_entropy, hap.Whole(criterion))
    less = hap.score(model, groups, batches, F.cross_entropy, criterion)
    assert all((more[n] != less[n]).all() for n in groups)
    assert hap.Whole(criterion).to_dict() == {"name": "whole", "of": criterion.to_dict()}


def test_the_hessian_sees_through_fused_attention(encoder: Any) -> None:
    model, _, batches = encoder
    groups = units_of(encoder_groups(), "heads")
    scores = hap.score(model, groups, batches, F.cross_entropy, hap.HessianTrace("hutchinson", probes=2))
    assert all(v.isfinite().all() and (v != 0).all() for v in scores.values())


def test_whole_refuses_what_knows_rows_only() -> None:
    with pytest.raises(hap.HapError, match="use JointTrace"):
        hap.Whole(hap.HessianTrace())


def test_head_criteria_leave_the_model_alone(encoder: Any) -> None:
    model, _, batches = encoder
    groups = units_of(encoder_groups(), "heads")
    before = {n: p.clone() for n, p in model.state_dict().items()}
    for criterion in (hap.JointTrace(probes=2), hap.JointTrace("gauss-newton"), hap.GateGradient()):
        hap.score(model, groups, batches, F.cross_entropy, criterion)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Hidden(nn.Module):
    """A reader whose weight is used without its layer being called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.up(x)), self.down.weight, self.down.bias).mean(1)


@pytest.mark.parametrize("criterion", [hap.GateGradient(), hap.JointTrace("gauss-newton")], ids=lambda c: c.name)
def test_says_where_a_layer_is_hidden(criterion: hap.Criterion) -> None:
    model, x = Hidden().eval(), torch.randn(2, 5, 4)
    groups = hap.trace(model, x)
    with pytest.raises(hap.HapError, match=r"what down.weight is applied to is hidden"):
        hap.score(model, groups, [(x, torch.tensor([0, 1]))], F.cross_entropy, criterion)
    assert hap.score(model, groups, [(x, torch.tensor([0, 1]))], F.cross_entropy, hap.JointTrace(probes=2))


@pytest.mark.parametrize("options", [{"method": "exact"}, {"probes": 1}, {"draws": 0}, {"deflate": -1}])
def test_joint_trace_refuses_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(hap.HapError, match="expected"):
        hap.JointTrace(**options)


# ---- the models that people have ----------------------------------------------------------------------------


def _loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


@cache
def _traced(name: str) -> tuple[nn.Module, Any, Groups]:
    model, example = small(name)
    return model, example, hap.trace(model, example)


def _model(name: str) -> tuple[nn.Module, Any, Groups]:
    """A small model of its own for a test, its example and its groups."""
    model, example, groups = _traced(name)
    return copy.deepcopy(model), example, groups


def _five_lines(page: str) -> str:
    """The lines of a page that prune heads."""
    text = (Path(__file__).parents[2] / page).read_text().partition("# Attention heads\n")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    return code[code.index("groups = ") :]


def test_the_readme_and_the_manual_show_the_same_five_lines() -> None:
    bare = [
        [line.partition("#")[0].rstrip() for line in _five_lines(p).splitlines()]
        for p in ("README.md", "docs/heads.md")
    ]
    assert bare[0] == bare[1] and len(bare[0]) == 5


@pytest.mark.parametrize("name", SETTINGS)
def test_the_lines_of_the_readme_prune_heads_of(name: str, tmp_path: Any) -> None:
    """As they stand there; then equal to the head-masked dense model, and reloaded into one from_pretrained gives."""
    model, example, _ = _model(name)
    dense, batches = copy.deepcopy(model), [(example, torch.tensor([0, 1, 1]))]
    dense.save_pretrained(tmp_path / "dense")  # which writes into its configuration
    names: dict[str, Any] = {"hap": hap, "model": model, "example": example, "batches": batches, "loss": _loss}
    exec(_five_lines("README.md"), names)
    heads, plan = names["heads"], names["plan"]

    per_layer = HEADS // (2 if name == "llama" else 1)
    assert heads.units == LAYERS * per_layer and all(len(g) == per_layer for g in heads.values())
    assert sum(map(len, plan.kept.values())) == LAYERS * per_layer // 2 and all(plan.kept.values())
    assert hap.cost(model, example).macs == plan.after.macs < plan.before.macs
    assert gap(run(model, example), reference(dense, heads, plan, model, example)) < 1e-5
    hap.save(tmp_path / "pruned.safetensors", model, plan)
    again = hap.load(tmp_path / "pruned.safetensors", type(model).from_pretrained(tmp_path / "dense"))
    assert all(torch.equal(a, b) for a, b in zip(run(again, example), run(model, example), strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_neurons_of_mlps_too(name: str) -> None:
    model, example, groups = _model(name)
    assert [len(groups[n]) for n in hap.mlps(groups)] == [HIDDEN] * LAYERS
    scores = hap.score(model, groups, None, None, "magnitude")
    plan = hap.plan_blocks(groups, scores, heads=0.5, mlp=0.5)
    dense = copy.deepcopy(model)
    hap.apply_(model, plan, example)
    part = hap.only(groups, plan.kept)
    assert gap(run(model, example), reference(dense, part, plan, model, example)) < 1e-5


@pytest.mark.parametrize(
    "criterion", [hap.JointTrace(probes=3), hap.JointTrace("gauss-newton")], ids=lambda c: c.method
)
@pytest.mark.parametrize("name", SETTINGS)
def test_curvature_of_heads(name: str, criterion: hap.Criterion) -> None:
    model, example, groups = _model(name)
    heads = units_of(groups, "heads")
    scores = hap.score(model, heads, [(example, torch.tensor([0, 1, 1]))], _loss, criterion)
    values = torch.cat(list(scores.values()))
    assert values.isfinite().all() and len(values.unique()) == heads.units
    assert criterion.method == "hutchinson" or (values > 0).all()


def test_an_encoder_without_half_its_heads_trains_and_exports(tmp_path: Any) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, example = small("roberta", layers=1)
    heads = units_of(hap.trace(model, example), "heads")
    plan = hap.plan(heads, hap.score(model, heads, None, None, "random"), hap.Budget(channels=0.5))
    hap.apply_(model, plan, example)
    optimizer, target = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.tensor([0, 1, 1])
    losses = []
    for _ in range(20):
        losses.append(_loss(model(**example), target))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2
    session = runtime.InferenceSession(hap.export(tmp_path / "pruned.onnx", model, example))
    inputs = {i.name: v.numpy() for i, v in zip(session.get_inputs(), example.values(), strict=True)}
    seen = torch.from_numpy(session.run(None, inputs)[0])
    torch.testing.assert_close(seen, run(model, example)[0], rtol=1e-4, atol=1e-5)


def test_the_encoder_decoder_example() -> None:
    library()
    path = Path(__file__).parents[2] / "examples" / "encoder_decoder.py"
    example: Any = SimpleNamespace(**runpy.run_path(str(path)))
    assert example.spell(4072) == "four thousand seventy two".split() and example.spell(319)[-1] == "nineteen"
    inputs, labels = example.batch([7, 40])
    words = [[example.VOCABULARY[i] for i in row if i >= 0] for row in labels]
    assert words == [["seven", "</s>"], ["forty", "</s>"]] and inputs["decoder_input_ids"][0, 1] == labels[0, 0]
    rows = example.experiment(seed=0, steps=8, share=0.5, probes=2)
    assert [row["criterion"] for row in rows] == ["dense", "hessian", "gradient", "magnitude", "random"]
    for row in rows[1:]:
        assert sum(row["heads_left"].values()) == 12 and len(row["heads_left"]) == 6 and all(row["heads_left"].values())
        assert any("encoder_attn" in name for name in row["heads_left"])


def test_the_manual_shows_the_latencies_that_were_measured() -> None:
    root = Path(__file__).parents[2]
    record = json.loads((root / "results" / "glue" / "latency-cpu.json").read_text())
    text = (root / "docs" / "heads.md").read_text()
    cells: dict[str, list[str]] = {}
    for row in record["rows"]:
        ratios = [a / b for a, b in zip(row["dense"]["times"], row["pruned"]["times"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        cells.setdefault(row["backend"], []).append(f"{median:.2f} ({low:.2f} to {high:.2f})")
    assert all(f"| {backend} | {' | '.join(found)} |" in text for backend, found in cells.items()) and len(cells) == 2
    assert f"has {record['macs_left']:.1%} of its multiply-adds left" in text


def test_the_manual_shows_what_the_example_measured() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "results" / "heads" / "encoder-decoder.json").read_text())["rows"]
    text = (root / "docs" / "heads.md").read_text()
    order = ["dense", "hessian", "gradient", "magnitude", "random"]
    for field, names in (("accuracy", order), ("before_tuning", order[1:])):
        means = [np.mean([row[field] for row in rows if row["criterion"] == name]) for name in names]
        assert " | ".join(f"{100 * mean:.1f}" for mean in means) + " |" in text

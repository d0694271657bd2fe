"""apply_: the pruned model is the dense one with zeros, on every network of the table, in both couplings."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

import hap
from cases import CASES
from checks import (
    TRACES,
    check_pruned,
    check_tight,
    gap,
    random_plan,
    random_scores,
    reachable,
    reference,
    run,
    same,
    snapshot,
    traced,
)
from hap.groups.groups import Groups
from hap.planning.plan import Cut
from hap.surgery.cut import cut_tensors
from hap.surgery.multihead_attention import FewerHeads

SPANNED = (
    "group_norm_few",
    "layer_norm_mlp",
    "layer_norm_without_affine",
    "rms_norm_mlp",
    "convnext_block",
    "standardised_weight",
    "weight_normalised",
    "spatial_attention",
)
every_trace = pytest.mark.parametrize(("name", "coupling"), TRACES)


@every_trace
def test_random_plans(name: str, coupling: str) -> None:
    model, example = CASES[name]()
    groups = traced(name, coupling)
    for seed, share in enumerate((0.3, 0.7)):
        plan = random_plan(groups, seed, share)
        assert plan.exact or name in SPANNED
        check_pruned(model, groups, plan, example)


@every_trace
def test_ends_and_halves_of_each_group(name: str, coupling: str) -> None:
    """One group at a time: its first unit, its last, the first half, every other one. The half is verified as well."""
    model, example = CASES[name]()
    groups = traced(name, coupling)
    for group in (n for n in groups if len(groups[n]) > 1):
        size = len(groups[group])
        ends, halves = (range(1), range(size - 1, size)), (range(size // 2), range(0, size, 2))
        for units in sorted(set(map(tuple, (*ends, *halves)))):  # of two or three units, some of these are the same
            if not empties(groups, group, set(units)):
                plan = hap.draft(groups, {group: units})
                check_pruned(model, groups, plan, example, verify=len(units) == size // 2)


def empties(groups: Groups, name: str, units: set[int]) -> bool:
    """Whether some layer would be left without outputs, or some split without a part."""
    gone = set(groups[name].classes[list(units)].tolist())
    counted = any(set(length.classes.tolist()) <= gone for length in groups.rewiring.size_attributes)
    return counted or any(set(p.unit[p.unit >= 0].tolist()) <= units for p in groups[name].producers)


@pytest.mark.parametrize("kind", ["flops", "params", "channels"])
@every_trace
def test_budgets(name: str, coupling: str, kind: str) -> None:
    groups = traced(name, coupling)
    if not len(groups):
        with pytest.raises(hap.HapError, match="nothing in this model can be removed"):
            hap.plan(groups, {}, hap.Budget(**{kind: 0.5}))
        return
    scores = random_scores(groups)
    fractions = reachable(groups, kind, [0.85, 0.5])
    for fraction in fractions:
        budget = hap.Budget(**{kind: fraction})
        plan = hap.plan(groups, scores, budget, limits=hap.Limits(per_layer=1.0))
        check_tight(groups, plan, budget)
        if kind == "flops":  # what is removed for the others is checked in other tests
            model, example = CASES[name]()
            check_pruned(model, groups, plan, example)
    assert fractions or max(map(len, groups.values())) < 8


@every_trace
def test_float32(name: str, coupling: str) -> None:
    model, example = CASES[name]()
    groups = traced(name, coupling)
    single = torch.utils._pytree.tree_map(lambda t: t.float(), example)
    check_pruned(model.float(), groups, random_plan(groups, 0), single, 1e-5)


@every_trace
def test_empty_plan_changes_nothing(name: str, coupling: str) -> None:
    model, example = CASES[name]()
    plan = hap.draft(traced(name, coupling), {})
    assert (plan.cuts, plan.grafts, plan.widenings) == ((), (), ())
    assert plan.before == plan.after
    before, wanted = snapshot(model), run(model, example)
    hap.apply_(model, plan, example=example)
    after = snapshot(model)
    assert all(torch.equal(after["tensors"][n][2], before["tensors"][n][2]) for n in before["tensors"])
    assert after["hooks"] == before["hooks"] and after["classes"] == before["classes"]
    assert same(run(model, example), wanted)


@every_trace
def test_pruned_model_trains_and_copies(name: str, coupling: str) -> None:
    model, example = CASES[name]()
    plan = random_plan(traced(name, coupling), 1)
    pruned = hap.apply_(copy.deepcopy(model), plan, example=example)
    assert pruned.state_dict().keys() == model.state_dict().keys()
    left = dict(pruned.named_modules())
    for old, new in ((m, left[name]) for name, m in model.named_modules()):
        assert type(old) is type(new) or isinstance(new, FewerHeads)
    twin = copy.deepcopy(pruned)
    assert same(run(twin, example), run(pruned, example))
    twin.load_state_dict(pruned.state_dict())
    pruned.train()
    optimiser = torch.optim.SGD(pruned.parameters(), 0.01, momentum=0.9)
    out = call(pruned, example)
    loss = sum(x.square().mean() for x in torch.utils._pytree.tree_leaves(out))
    loss.backward()
    grads = [p.grad for p in pruned.parameters() if p.grad is not None]
    assert grads and all(torch.isfinite(g).all() for g in grads)
    optimiser.step()
    pairs = zip(pruned.parameters(), twin.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert all(torch.isfinite(x).all() for x in run(pruned, example))


def call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


@every_trace
def test_prune_twice(name: str, coupling: str) -> None:
    """Trace the pruned model as if it were new, and prune that; a widened stream is only ever frozen."""
    model, example = CASES[name]()
    first = hap.apply_(model, random_plan(traced(name, coupling), 2, 0.3), example=example)
    groups = hap.trace(first, example)
    check_pruned(first, groups, random_plan(groups, 3, 0.4), example)


@pytest.mark.parametrize(("name", "coupling"), [("residual", "union"), ("channel_shuffle", "joint")])
def test_compile(name: str, coupling: str) -> None:
    model, example = CASES[name]()
    implant = hap.Pointwise(init="center")
    pruned = hap.apply_(model, random_plan(traced(name, coupling), 0, 0.6, implant), example=example)
    assert any(hasattr(m, "implant") for m in pruned.modules())
    compiled = torch.compile(pruned, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert gap(run(pruned, example), [compiled(example)]) <= 1e-12


def test_optimizer_and_ties_see_the_cut() -> None:
    model, example = CASES["tied_parameters"]()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    hap.apply_(model, random_plan(traced("tied_parameters", "joint"), 0), example=example)
    assert model.a.weight is model.b.weight
    held = {id(p) for g in optimiser.param_groups for p in g["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_channels_last_stays() -> None:
    model, example = CASES["residual"]()
    model = model.to(memory_format=torch.channels_last)
    hap.apply_(model, random_plan(traced("residual", "joint"), 0), example=example)
    assert model.b1[0][0].weight.is_contiguous(memory_format=torch.channels_last)


def test_flags_modes_and_gradients() -> None:
    """Requires_grad and modes stay, gradients of what was cut go, others stay."""
    model, example = CASES["plain"]()
    model.train()
    model[0][1].eval()
    model[1][0].weight.requires_grad_(False)
    model(example).sum().backward()
    hap.apply_(model, hap.draft(traced("plain", "joint"), {"0.0": [0]}), example=example)
    assert model.training and not model[0][1].training
    assert not model[1][0].weight.requires_grad and model[0][0].weight.requires_grad
    assert model[0][0].weight.grad is None
    assert model[4].bias.grad is not None


class Counts(nn.Module):
    """Doubles what enters when that has five channels: not what any plan says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + (x.shape[1] == 5))


def test_a_forward_that_counts_its_channels_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)).double().eval()
    model.register_forward_hook(lambda m, args, output: output / m[0].weight.shape[0])
    groups = hap.trace(model, torch.randn(1, 3, 8, 8, dtype=torch.float64))
    assert not len(groups) and "returns something else than with zeros there" in str(groups)


def test_verify_refuses_and_leaves_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3)).double().eval()
    example = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    plan = hap.draft(hap.trace(model, example), {"0": [0]})
    model = nn.Sequential(*model[:1], Counts(), *model[1:]).eval()
    cuts = tuple(dataclasses.replace(c, name=c.name.replace("1.", "2.")) for c in plan.cuts)
    plan = dataclasses.replace(plan, cuts=cuts)
    before, wanted = snapshot(model), run(model, example)
    with pytest.raises(hap.HapError, match=r"does not do what the plan says.*output 0 is off by"):
        hap.apply_(model, plan, example=example)
    assert same(run(model, example), wanted)
    assert snapshot(model)["hooks"] == before["hooks"] and model[0].out_channels == 6
    hap.apply_(model, plan, verify=False)
    assert model[0].out_channels == 5


class Brittle(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 5:
            raise RuntimeError("five channels")
        return x


def test_a_pruned_model_that_does_not_run_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Brittle(), nn.Conv2d(6, 2, 3)).double().eval()
    example = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    plan = hap.draft(hap.trace(model, example), {"0": [0]})
    with pytest.raises(hap.HapError, match="five channels"):
        hap.apply_(model, plan, example=example)
    assert model[0].out_channels == 6


def test_verify_without_example_makes_one() -> None:
    for name in ("plain", "two_inputs", "named_inputs"):
        model, example = CASES[name]()
        groups = traced(name, "joint")
        plan = random_plan(groups, 0)
        pruned = hap.apply_(copy.deepcopy(model), plan)
        assert gap(reference(model, groups, plan, pruned, example), run(pruned, example)) <= 1e-10


def test_union_adds_zeros_only_where_needed() -> None:
    """A branch that keeps all of the stream's channels gets no scatter."""
    model, example = CASES["residual"]()
    groups = traced("residual", "union")
    plan = hap.draft(groups, {"b1.1.0": [0, 3]})
    assert [(w.module, w.index, w.width) for w in plan.widenings] == [("b1.1.1", (1, 2, 4, 5), 6)]
    pruned = hap.apply_(model, plan, example=example)
    assert pruned.stem[0].out_channels == 6 and pruned.b1[1][0].out_channels == 4
    both_gone = hap.draft(groups, {"b1.1.0": [0, 3], "stem.0": [0, 3]})
    assert both_gone.widenings == ()
    assert [c.keep for c in both_gone.cuts if c.name == "b2.0.0.weight" and c.dim == 1] == [(1, 2, 4, 5)]


class Written(nn.Module):
    """Attention with a bias for each head, which evaluation writes out once."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(8, 24), nn.Linear(8, 8)
        self.biases = nn.Parameter(torch.randn(4, 3))
        self.written: Tensor | None = None

    def train(self, mode: bool = True) -> "Written":
        self.written = None if mode else self.written
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.written is None or self.training:
            self.written = self.biases[:, (torch.arange(5)[:, None] - torch.arange(5)).abs().clamp(max=2)]
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 6)).transpose(1, 2).chunk(3, -1)
        return self.out(((q @ k.mT + self.written).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Summed(Written):
    """Notes something of each head whenever it is to be evaluated."""

    def train(self, mode: bool = True) -> "Written":
        if not mode:
            self.sums = self.biases.detach().view(self.heads, 3).sum(1)
        return super().train(mode)


def test_attributes_follow_before_a_model_is_evaluated_again() -> None:
    torch.manual_seed(0)
    model, example = nn.Sequential(Summed(), nn.Linear(8, 3)).double().eval(), torch.randn(2, 5, 8).double()
    groups = hap.trace(model, example)
    plan = hap.draft(groups, {hap.heads(groups)[0]: [0, 2]})
    for verify in (True, False):
        pruned = hap.apply_(copy.deepcopy(model), plan, example, verify=verify)
        assert isinstance(pruned, nn.Sequential) and isinstance(pruned[0], Summed)
        assert pruned[0].heads == len(pruned[0].sums) == 2


def test_what_was_written_out_for_evaluation_is_written_anew() -> None:
    torch.manual_seed(0)
    model, example = nn.Sequential(Written(), nn.Linear(8, 3)).double().eval(), torch.randn(2, 5, 8).double()
    model(example)
    groups = hap.trace(model, example)
    heads = hap.heads(groups)
    assert [len(groups[n]) for n in heads] == [4]
    hap.apply_(model, hap.draft(groups, {heads[0]: [0, 2]}), example)
    assert not any(m.training for m in model.modules()) and model(example).shape == (2, 5, 3)


def test_integers_follow_weights_that_a_hook_computes() -> None:
    each = nn.utils.prune.l1_unstructured(nn.Conv2d(6, 6, 3, groups=6), "weight", 0.3)
    model, example = (
        nn.Sequential(nn.Conv2d(3, 6, 3), each, nn.ReLU(), nn.Conv2d(6, 4, 3)).eval(),
        torch.randn(2, 3, 9, 9),
    )
    groups = hap.trace(model, example)
    keep = [0, 2, 3]
    with torch.no_grad():
        kept = model[2](each(model[0](example)))[:, keep]
        wanted = nn.functional.conv2d(kept, model[3].weight[:, keep], model[3].bias)
    hap.apply_(model, hap.draft(groups, {"1": [1, 4, 5]}), example)
    assert (each.groups, each.in_channels, each.out_channels, model[0].out_channels) == (3, 3, 3, 3)
    assert each.weight.shape == each.weight_orig.shape == each.weight_mask.shape == (3, 1, 3, 3)
    torch.testing.assert_close(model(example), wanted)


@pytest.mark.parametrize("shape", [(1500, 1100), (700, 300, 3, 3)])
def test_a_large_matrix_is_cut_along_both_axes_as_a_small_one_is(shape: tuple[int, ...]) -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(shape))
    layer.last = nn.Parameter(torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1))
    keep = tuple(tuple(torch.randperm(size)[: size // 2 + 1].tolist()) for size in shape[:2])
    order = [(name, dim) for name in ("weight", "last") for dim in (1, 0)]
    plan = SimpleNamespace(cuts=tuple(Cut(name, dim, shape[dim], keep[dim]) for name, dim in order))
    for name, shorter in cut_tensors(layer, plan).items():  # type: ignore[arg-type]
        assert torch.equal(shorter, getattr(layer, name)[list(keep[0])][:, list(keep[1])]), name
    assert [*cut_tensors(layer, plan, {"last"})] == ["last"]  # type: ignore[arg-type]

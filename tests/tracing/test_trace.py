"""trace: which channels live and die together, found without touching the model."""

import dataclasses
import gc
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hap
from cases import CASES
from checks import COUPLINGS, TRACES, UNLIKE_IN_UNION, assert_unchanged, check_pruned, random_plan, snapshot, traced

both = pytest.mark.parametrize("coupling", COUPLINGS)
every_trace = pytest.mark.parametrize(("name", "coupling"), TRACES)

# Groups by hand, and in union coupling where that differs. What is not here has no freedom to speak of.
JOINT = {
    "plain": {"0.0": 8, "1.0": 6},
    "vgg": {"0.0": 6, "2.0": 8, "5": 10},
    "reflect_padding": {"0": 6, "2": 5},
    "efficient_channel_attention": {"a.0": 7, "b": 1},
    "conv1d": {"0": 6, "3": 8},
    "conv3d": {"0": 6, "3": 5},
    "mlp": {"0": 9, "2": 7},
    "inplace_functional": {"a.0": 6},
    "residual": {"stem.0": 6, "b1.0.0": 5, "b2.0.0": 8, "b2.1.0": 8},
    "preactivation": {"stem": 6, "b1.2.0": 6, "shortcut": 7, "b2.0": 7},
    "bottleneck": {"stem.0": 5, "b1.0.0": 4, "b1.1.0": 4, "b1.2.0": 9, "b2.0.0": 4, "b2.1.0": 4},
    "residual_on_input": {"a": 6},
    "residual_with_branches": {"stem.0": 6, "c": 8},
    "scaled_residual": {"stem.0": 6},
    "dense_block": {"stem": 6, "a": 4, "b": 4},
    "inception": {"stem.0": 6, "a.0": 4, "b.0.0": 3, "b.1.0": 5, "c.0": 4, "d.0": 3, "mix.0": 7},
    "concatenated_flattened": {"a": 4, "b": 5},
    "split_concat": {"a.0": 6, "mix.0": 6},
    "repeated_channels": {"a": 4, "c": 4, "b": 6},
    "grouped_many": {"0.0": 4, "2.0": 6},
    "grouped_few": {"0.0": 4, "1.0": 5, "2.0": 6},
    "depthwise": {"0.0": 7, "2.0": 6},
    "inverted_residual": {"stem.0": 4, "b.0.0": 9},
    "squeeze_excite": {"stem.0": 6, "down": 3},
    "squeeze_excite_linear": {"a.0": 6, "down": 4, "b": 5},
    "spatial_attention": {"a.0": 7, "b": 6, "c": 8},
    "summed_over_channels": {"a.0": 7, "c": 8},
    "decomposed_positions": {"qkv": 3},
    "spatial_gate": {"a.0": 7, "c": 6},
    "shared_module": {"stem.0": 6},
    "tied_parameters": {"stem.0": 6, "a": 7},
    "functional_weight": {"a": 6, "b": 7},
    "learned_query": {"a": 8},
    "spatial_parameters": {"a.0": 6, "b": 7, "c": 6},
    "transposed": {"a.0": 6, "up": 7, "b.0": 5},
    "grouped_transposed": {"a.0": 4},
    "unet_transposed": {"down1.0": 5, "down2.0": 8, "up": 6, "mix.0": 6},
    "unet_upsampled": {"down1.0": 5, "down2.0": 8, "mix.0": 6},
    "group_norm_many": {"0": 6, "3": 6},
    "group_norm_few": {"0": 6, "3": 6, "5": 5},
    "layer_norm_mlp": {"0": 9, "3": 7},
    "instance_norm": {"0": 6, "3": 7, "6": 5},
    "convnext_block": {"stem": 6, "up": 10},
    "two_inputs": {"a.0": 6, "c": 7},
    "named_inputs": {"a.0": 6, "b.0": 4, "c.0": 7},
    "outputs_in_tuple": {"stem.0": 6, "a": 7},
    "outputs_in_dict": {"stem.0": 6},
    "hard_coded_view": {"a.0": 6},
    "hard_coded_groups": {"a.0": 6, "c": 6},
    "custom_operator": {"a.0": 6, "c": 6},
    "nothing_to_remove": {},
    "attention_with_tables": {"q": 3, "out": 6},
    "attention_by_hand": {"embed": 12, "attention.q": 4, "up": 9},
    "attention_fused": {"embed": 12, "attention.q": 3, "up": 9},
    "attention_grouped_queries": {"embed": 12, "attention.q": 3, "up": 9},
    "matrix_product_with_parameter": {"a": 7, "w": 8},
}
UNION = JOINT | {
    "inplace_functional": {"a.0": 6, "b.0": 6},
    "residual": {"stem.0": 6, "b1.0.0": 5, "b1.1.0": 6, "b2.0.0": 8, "b2.1.0": 8, "shortcut.0": 8},
    "preactivation": {"stem": 6, "b1.2.0": 6, "b1.2.3": 6, "shortcut": 7, "b2.0": 7, "b2.3": 7},
    "bottleneck": {
        "stem.0": 5,
        "b1.0.0": 4,
        "b1.1.0": 4,
        "b1.2.0": 9,
        "shortcut.0": 9,
        "b2.0.0": 4,
        "b2.1.0": 4,
        "b2.2.0": 9,
    },
    "inverted_residual": {"stem.0": 4, "b.0.0": 9, "b.4.0": 4},
    "unet_upsampled": {"down1.0": 5, "down2.0": 8, "mix.0": 6, "side.0": 6},
}
# What the table allows to vary: the trace may find more or fewer units here as long as the plans hold.
LOOSE = (
    "residual_on_input",
    "residual_with_branches",
    "scaled_residual",
    "squeeze_excite",
    "convnext_block",
    "two_inputs",
    "learned_query",
)


@pytest.mark.parametrize("name", JOINT)
def test_joint_groups(name: str) -> None:
    assert {n: len(g) for n, g in traced(name, "joint").items()} == JOINT[name]


@pytest.mark.parametrize("name", sorted(set(UNION) - set(LOOSE)))
def test_union_groups(name: str) -> None:
    assert {n: len(g) for n, g in traced(name, "union").items()} == UNION[name]


@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("custom_operator", "hap_tests::halved", "no rule for this operator"),
        ("products_of_activations", "matmul", "stretched over an axis that is cut"),
        ("hard_coded_view", "b", "counts on its size"),
        ("split_concat", "stem.0", "counts on its size"),
        ("summed_over_channels", "sum", "reduces over an axis"),
        ("softmax_over_channels", "softmax", "normalises over an axis"),
        ("filtered_by_activations", "conv2d", "its weight is computed"),
        ("plain", "4", "an output of the model"),
    ],
)
def test_frozen_is_listed(name: str, what: str, why: str) -> None:
    groups = traced(name, "joint")
    found = [f for f in groups.frozen if f.why.startswith(why[:20]) or why in f.why]
    assert found, [(f.what, f.why) for f in groups.frozen]
    assert what in {f.what for f in found}
    assert all(f.why in str(groups) for f in found)


def test_what_a_forward_raised_is_named() -> None:
    frozen = {f.what: f.why for f in traced("hard_coded_view", "joint").frozen}
    assert re.fullmatch(
        r"the model's forward counts on its size: RuntimeError: shape '\[2, 28\]' is invalid for input of size \d+",
        frozen["b"],
    )


class InnerWidth(nn.Module):
    """Says how wide its hidden layer is, by code and not by an attribute; or returns something else without parts."""

    def __init__(self, raises: bool):
        super().__init__()
        self.up, self.down, self.raises = nn.Linear(8, 20), nn.Linear(20, 8), raises

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).view(-1, 20) if self.raises else self.up(x) / self.up.weight.shape[0]
        return x + self.down(hidden)


@pytest.mark.parametrize("raises", [True, False])
def test_what_was_raised_is_named_for_each_of_a_kind(raises: bool) -> None:
    model = nn.Sequential(*(InnerWidth(raises) for _ in range(3))).eval()
    frozen = {f.what: f.why for f in hap.trace(model, torch.randn(5, 8)).frozen}
    reason, seen = "the model's forward counts on its size", ": RuntimeError: shape '[-1, 20]' is invalid for input"
    if not raises:
        reason, seen = "without some of it the model returns something else than with zeros there", ": the value of"
    for i in range(3):
        assert frozen[f"{i}.up"].startswith(reason + ", like 0.up" * (i > 0) + seen)
        assert raises or frozen[f"{i}.up"].endswith("; it counts on its size, or a rule is wrong")


def _as_in_training(name: str) -> tuple[nn.Module, Any]:
    """A network with modules in both modes, a frozen parameter and a gradient."""
    model, example = CASES[name]()
    model.train()
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    next(model.parameters()).requires_grad_(False)
    last = list(model.parameters())[-1]
    last.grad = torch.ones_like(last)
    return model, example


@every_trace
def test_same_again_and_the_model_is_left_as_found(name: str, coupling: str) -> None:
    model, example = _as_in_training(name)
    before, first = snapshot(model), traced(name, coupling)
    again = hap.trace(model, example, coupling, stream=True)
    assert_unchanged(model, before)
    assert list(again) == list(first)
    assert hap.draft(again, {}).to_dict() == hap.draft(first, {}).to_dict()
    assert random_plan(again, 5) == random_plan(first, 5)


@both
@pytest.mark.parametrize("name", ["residual", "attention_by_hand", "attention_fused", "layer_norm_mlp"])
def test_a_model_whose_stream_is_left_alone_is_left_as_found(name: str, coupling: str) -> None:
    model, example = _as_in_training(name)
    before = snapshot(model)
    hap.trace(model, example, coupling)
    assert_unchanged(model, before)


def alike(a: Any, b: Any) -> bool:
    """Whether two values hold the same all the way down."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(alike(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


@pytest.mark.parametrize("name", CASES)
def test_couplings_differ_only_where_branches_are_summed(name: str) -> None:
    """Other tests try a case in union coupling only where that differs from joint coupling."""
    joint, union = traced(name, "joint"), traced(name, "union")
    assert (joint.coupling, union.coupling) == ("joint", "union")
    assert alike(dataclasses.replace(union, coupling="joint"), joint) == (name not in UNLIKE_IN_UNION)


@every_trace
def test_structure_is_sound(name: str, coupling: str) -> None:
    """Every class of a parameter has a unit or a stream, every unit one home, every axis its full length."""
    groups = traced(name, coupling)
    units = [c for g in groups.values() for c in g.classes.tolist()]
    assert len(units) == len(set(units)) == groups.units and 0 not in units
    streams = {int(w) for s in groups.rewiring.output_scatters for w in s.wide}
    for (weight, dim), classes in groups.axes.items():
        assert len(classes) == groups.shapes[weight][dim]
        assert set(classes.tolist()) <= {0, *units, *streams}
    for group_name, group in groups.items():
        weight = group.producers[0].weight
        several = name == "two_weights_in_one_module" and group_name.startswith("0.")
        assert group_name == group.name == (weight if several else weight.rpartition(".")[0] or weight)
        for producer in group.producers:
            of_axis = groups.axes[producer.weight, producer.dim]
            assert np.array_equal(
                np.where(producer.unit >= 0, group.classes[producer.unit], -1)[producer.unit >= 0],
                of_axis[producer.unit >= 0],
            )
            assert producer.unit.max() >= 0
        assert group_name in str(groups)


def test_ignore_takes_names_and_patterns() -> None:
    model, example = CASES["residual"]()
    groups = hap.trace(model, example, ignore=("b2.*",))
    assert list(groups) == ["stem.0", "b1.0.0"]
    assert ("b2.0.0", "left alone as asked") in {(f.what, f.why) for f in groups.frozen}
    assert "b1.0.0" not in hap.trace(model, example, ignore=["b1.0.0"])


@pytest.mark.parametrize("ignored", ["b1.1.0", "stem.0", "shortcut.0", "b2.1.0"])
def test_ignore_one_branch_of_a_stream(ignored: str) -> None:
    """The stream keeps what the branch that is left alone adds to it."""
    model, example = CASES["residual"]()
    groups = hap.trace(model, example, "union", ignore=(ignored,))
    assert ignored not in groups and len(groups) >= 4
    for seed in range(4):
        check_pruned(model, groups, random_plan(groups, seed), example)


# Frozen by the model's own input or output, which needs no word more; or units of a weight with another name.
KNOWN = (
    "weight_normalised",
    "masked_weights",
    "masked_on_the_way_up",
    "residual_on_input",
    "depthwise_of_input_on_sum",
    "outputs_in_dict",
)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"tied_parameters", "tied_on_two_sums", "module_with_two_names"}))
def test_what_is_not_a_unit_is_listed(name: str) -> None:
    """Every layer's outputs are units, or the trace says why not: as many reasons as there are causes, at least one."""
    groups = traced(name, "joint")
    whole = {p.weight for g in groups.values() for p in g.producers if (p.unit >= 0).any()}
    model, _ = CASES[name]()
    owners = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)
    silent = [n for n, m in model.named_modules() if isinstance(m, owners) and f"{n}.weight" not in whole]
    ends = [f for f in groups.frozen if f.why == "an output of the model"]
    others = [f for f in groups.frozen if f not in ends]
    assert ends
    assert others or len(silent) <= len(ends) or name in KNOWN, silent


def test_train_mode_and_eval_mode_give_the_same_groups() -> None:
    model, example = CASES["vgg"]()
    model.train()
    groups = hap.trace(model, example)
    assert {n: len(g) for n, g in groups.items()} == JOINT["vgg"]


def test_float32_and_other_batch_sizes_give_the_same_groups() -> None:
    model, example = CASES["bottleneck"]()
    groups = hap.trace(model.float(), example.float()[:1])
    assert {n: len(g) for n, g in groups.items()} == JOINT["bottleneck"]


def test_a_new_rule_widens_what_can_be_cut() -> None:
    model, example = CASES["custom_operator"]()
    hap.rules.RULES["hap_tests::halved"] = hap.rules.pointwise
    try:
        groups = hap.trace(model, example)
    finally:
        del hap.rules.RULES["hap_tests::halved"]
    assert {n: len(g) for n, g in groups.items()} == {"a.0": 6, "b": 7, "c": 6}


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("smooth", "gelu"),
        ("squeeze_excite", "sigmoid"),
        ("products_of_activations", "matmul"),
        ("mlp", "tanh"),
        ("custom_operator", "halved"),
        ("shared_module", "again.weight"),
        ("tied_parameters", "a.weight"),
        ("layer_norm_mlp", "layer_norm"),
        ("instance_norm", "instance_norm"),
        ("group_norm_many", "group_norm"),
        ("batch_norm_without_affine", "batch_norm"),
        ("softmax_over_channels", "softmax"),
        ("unit_length", "norm"),
    ],
)
def test_curved_networks_are_told(name: str, word: str) -> None:
    curved = traced(name, "joint").curved
    assert curved is not None and word in curved


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "vgg",
        "residual",
        "preactivation",
        "depthwise",
        "prelu",
        "inception",
        "unet_upsampled",
        "transposed",
        "dense_block",
    ],
)
def test_piecewise_linear_networks_are_told(name: str) -> None:
    assert traced(name, "joint").curved is None


class Dynamic(nn.Module):
    """A layer whose weight comes from the activations: linear in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.make, self.head = nn.Linear(6, 5), nn.Linear(6, 20), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.linear(self.a(x), self.make(x.mean(0)).view(4, 5)))


def test_a_computed_weight_is_curved() -> None:
    groups = hap.trace(Dynamic().double().eval(), torch.randn(3, 6, dtype=torch.float64))
    assert groups.curved is not None


class ResponseNorm(nn.Module):
    """Adds to what it is given the same, scaled by how strong a channel is against the mean of all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strength = x.norm(dim=1, keepdim=True)
        return x + self.weight.view(1, 1, -1) * (x * strength / strength.mean(-1, keepdim=True)) + self.bias


def test_a_norm_that_adds_its_input_to_the_same_is_no_residual_stream() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), ResponseNorm(12), nn.Linear(12, 4)).double().eval()
    example = torch.randn(2, 5, 6, dtype=torch.float64)
    groups = hap.trace(model, example)
    assert {n: len(g) for n, g in groups.items()} == {"0": 12} and groups.traits.spanned
    plan = hap.prune_(model, example, criterion="magnitude", flops=0.5)
    assert model[3].in_features == len(model[2].weight) == 12 - len(plan.removed["0"]) < 12


def test_the_residual_stream_is_left_alone_unless_asked_for() -> None:
    model, example = CASES["convnext_block"]()
    groups = hap.trace(model, example)
    assert set(groups) == {"up"} and "ask for it with stream=True" in str(groups)
    assert set(hap.trace(model, example, stream=True)) == {"stem", "up"}
    plan = hap.prune_(model, example, criterion="magnitude", params=0.8, stream=True)
    assert set(plan.kept) == {"stem", "up"}


def test_layers_that_share_a_table_lose_their_own_heads() -> None:
    model, example = CASES["attention_with_shared_bias"]()
    groups = hap.trace(model, example)
    assert {n: len(groups[n]) for n in ("one.q", "two.q")} == {"one.q": 4, "two.q": 4}
    plan = hap.draft(groups, {"one.q": [0], "two.q": [1, 3]})
    assert {n.module: (n.argument, n.index) for n in plan.narrowings} == {
        "one": (1, (1, 2, 3)),
        "two": ("bias", (0, 2)),
    }
    assert hap.Plan.from_json(plan.to_json()) == plan
    check_pruned(model, groups, plan, example)


class Coincidence(nn.Module):
    """Two numbers are 16, and only one of them is the width of what is viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.span = 16, 16
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.table = nn.Parameter(torch.randn(32, 4) * 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).view(len(x), self.width)) + self.table[self.span + torch.arange(len(x))]


def test_a_number_that_is_equal_by_chance_does_not_follow() -> None:
    groups = hap.trace(Coincidence().eval(), torch.randn(2, 8))
    assert [x.attribute for x in groups.rewiring.size_attributes] == ["width"]


class Picking(nn.Module):
    """Channels of the middle layer are also read at constant positions."""

    def __init__(self, width: int, places: list[int]):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 6), nn.Linear(6, width), nn.Linear(width, 3)
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x).relu()).relu()
        return self.three(x) + x[:, torch.tensor(self.places)].sum(1, keepdim=True)


@pytest.mark.parametrize(("places", "kept"), [([3], [0, 1, 2, 3]), ([2, -2], [0, 1, 2, 198, 199]), ([-1], [199])])
def test_what_constant_positions_are_counted_past_stays(places: list[int], kept: list[int]) -> None:
    model, example = Picking(200, places).double().eval(), torch.randn(3, 8, dtype=torch.float64)
    groups = hap.trace(model, example)
    assert len(groups["one"]) == 6
    assert np.flatnonzero(groups.axes["two.weight", 0] == 0).tolist() == kept
    hap.apply_(model, random_plan(groups, 0), example)


def test_a_single_entry_of_a_reshaped_bias_freezes_its_layer() -> None:
    class Entry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).relu()) + self.one.bias.view(4, 3)[0, 0]

    assert not hap.trace(Entry().eval(), torch.randn(2, 8))


@pytest.mark.parametrize("collecting", [True, False])
def test_a_trace_leaves_the_garbage_collector_as_it_was(collecting):
    model, example = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), torch.randn(1, 3, 8, 8)
    before = gc.isenabled()
    try:
        gc.enable() if collecting else gc.disable()
        hap.trace(model, example)
        assert gc.isenabled() == collecting
        with pytest.raises(hap.HapError):
            hap.trace(model, torch.randn(1, 5, 8, 8))
        assert gc.isenabled() == collecting
    finally:
        gc.enable() if before else gc.disable()


def test_what_trials_made_goes_without_the_garbage_collector():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Unflatten(1, (8, 36)), nn.Flatten(), nn.Linear(288, 5)
    ).eval()
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(x, nn.Parameter) for x in gc.get_objects())
        groups = hap.trace(model, torch.randn(1, 3, 8, 8))
        assert sum(isinstance(x, nn.Parameter) for x in gc.get_objects()) == before
        assert groups.classes > 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("einsum_layers", {"a": 7, "b": 6, "c": 8}),
        ("attention_by_einsum", {"q": 3, "out": 6}),
        ("experts", {"up": 7, "a": 8, "b": 6}),
        ("gated_linear_units", {"a.0": 6, "b": 5}),
        ("picked_places", {"a.0": 7, "b": 6}),
        ("masked_weights", {"0.parametrizations.weight": 8, "2.parametrizations.weight": 6}),
        ("masked_on_the_way_up", {"0": 6, "2.parametrizations.weight": 5}),
        ("weights_in_odd_places", {"a": 7}),
    ],
)
def test_what_a_forward_multiplies_or_picks_by_itself_has_units(name: str, units: dict[str, int]) -> None:
    assert {group: len(found) for group, found in hap.trace(*CASES[name](), stream=True).items()} == units


def test_layers_that_stay_without_a_rule_that_says_so_are_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Conv2d(3 + 4, 16, 3, padding=1), nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = c = x.new_zeros(len(x), 4, *x.shape[-2:])
            for t in range(x.shape[1]):
                i, f, o, g = self.cell(torch.cat([x[:, t], h], 1)).split(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return self.head(h)

    groups = hap.trace(Recurrent().eval(), torch.randn(2, 3, 3, 6, 6))
    assert not groups.units and ("cell", "meets something that is never cut") in [
        (f.what, f.why) for f in groups.frozen
    ]

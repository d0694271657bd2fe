"""plan: budgets, limits, what is given back, and plans as values."""

import json
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

import hap
from cases import CASES
from checks import COUPLINGS, TRACES, check_pruned, check_tight, random_plan, random_scores, reachable, traced, traces
from hap.groups.groups import Groups

every_case = pytest.mark.parametrize("name", CASES)
both = pytest.mark.parametrize("coupling", COUPLINGS)
every_trace = pytest.mark.parametrize(("name", "coupling"), TRACES)
WIDE = hap.Limits(per_layer=1.0)


def chain(*widths: int) -> tuple[nn.Module, torch.Tensor]:
    """A perceptron with these numbers of hidden units, without biases: costs are easy to sum."""
    sizes = (4, *widths, 3)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers).double().eval(), torch.randn(1, 4, dtype=torch.float64)


def counts(plan: hap.Plan) -> dict[str, int]:
    return {n: len(plan.kept[n]) for n in plan.kept}


# ---- values -------------------------------------------------------------------------------------------------


@every_trace
def test_json_round_trip(name: str, coupling: str) -> None:
    groups = traced(name, coupling)
    for implant in (None, hap.Pointwise(init="center"), hap.SpatialLowRank(rank=3), hap.LowRank(seed=4)):
        plan = random_plan(groups, 0, implant=implant)
        again = hap.Plan.from_json(plan.to_json())
        assert again == plan
        assert again.to_json() == plan.to_json()
        assert json.loads(plan.to_json()) == json.loads(json.dumps(plan.to_dict()))


@every_case
def test_every_unit_has_one_fate(name: str) -> None:
    groups = traced(name, "joint")
    plan = random_plan(groups, 1, implant=hap.Pointwise(init="zero"))
    for group in groups:
        parts = [*plan.kept[group], *plan.implanted[group], *plan.removed[group]]
        assert sorted(parts) == list(range(len(groups[group])))
    assert plan.after.channels == sum(len(plan.kept[n]) + len(plan.implanted[n]) for n in groups)


def test_prints_as_a_table() -> None:
    groups = traced("residual", "joint")
    plan = hap.draft(groups, {"stem.0": [0, 1]}, {"b1.0.0": [4]}, hap.Pointwise(init="center"))
    lines = str(plan).splitlines()
    assert lines[0].split() == ["layer", "before", "kept", "implanted", "removed"]
    assert lines[1].split() == ["stem.0", "6", "4", "0", "2"]
    assert lines[2].split() == ["b1.0.0", "5", "4", "1", "0"]
    assert lines[5].split() == ["total", "27", "24", "1", "2"]
    assert f"{plan.before.params:,} -> {plan.after.params:,}" in lines[6] and lines[6].startswith("params")
    assert f"{plan.before.macs:,} -> {plan.after.macs:,}" in lines[7] and lines[7].startswith("MACs")


def test_plan_does_not_depend_on_weights() -> None:
    model, example = CASES["residual"]()
    other = hap.trace(torch.nn.Module.apply(model, _fill), example)
    scores = random_scores(other)
    budget = hap.Budget(flops=0.5)
    assert hap.plan(other, scores, budget) == hap.plan(traced("residual", "joint"), scores, budget)


def _fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.01)


def test_costs_by_hand() -> None:
    groups = hap.trace(*chain(10, 8))
    plan = hap.draft(groups, {"0": [0, 1, 2], "1": [7]})
    assert (plan.before.params, plan.before.macs, plan.before.channels) == (40 + 80 + 24, 144, 18)
    assert (plan.after.params, plan.after.macs, plan.after.channels) == (4 * 7 + 7 * 7 + 7 * 3, 98, 14)


# ---- budgets ------------------------------------------------------------------------------------------------


def test_lowest_scores_go_first() -> None:
    groups = hap.trace(*chain(10))
    scores = {"0": torch.tensor([5.0, 1, 9, 2, 8, 3, 7, 4, 6, 0])}
    assert hap.plan(groups, scores, hap.Budget(channels=0.6)).removed == {"0": [1, 3, 5, 9]}


def test_ties_and_repeats_give_the_same_plan() -> None:
    groups = traced("bottleneck", "union")
    scores = {n: torch.ones(len(g)) for n, g in groups.items()}
    budget = hap.Budget(flops=0.37)
    first = hap.plan(groups, scores, budget, implant=0.3)
    assert first == hap.plan(groups, scores, budget, implant=0.3)
    assert first.to_json() == hap.plan(traced("bottleneck", "union"), scores, budget, implant=0.3).to_json()


@cache
def _hundred() -> Groups:
    return hap.trace(*chain(100))


@pytest.mark.parametrize("fraction", [k / 100 for k in range(7, 101)])
def test_channel_budgets_are_exact(fraction: float) -> None:
    """As many of 100 units stay as the fraction says, whatever floating point makes of the product."""
    groups = _hundred()
    plan = hap.plan(groups, random_scores(groups), hap.Budget(channels=fraction))
    assert plan.after.channels == round(100 * fraction)


@pytest.mark.parametrize("kind", ["params", "flops", "channels", "activations"])
def test_everything_left_removes_nothing(kind: str) -> None:
    groups = traced("residual", "union")
    plan = hap.plan(groups, random_scores(groups), hap.Budget(**{kind: 1.0}), implant=0.5)
    assert plan.before == plan.after and plan.cuts == ()
    assert not any(plan.removed.values()) and not any(plan.implanted.values())


@pytest.mark.parametrize(
    ("name", "coupling"), traces(["residual", "inception", "bottleneck", "residual_with_branches", "grouped_few"])
)
@pytest.mark.parametrize("kind", ["params", "flops", "channels", "activations"])
@pytest.mark.parametrize("per_cost", [False, True])
def test_tight_at_many_fractions(name: str, kind: str, per_cost: bool, coupling: str) -> None:
    groups = traced(name, coupling)
    fractions = reachable(groups, kind, [0.97, 0.83, 0.71, 0.55, 0.42, 0.33, 0.26])
    assert len(fractions) >= 4
    for seed, fraction in enumerate(fractions):
        budget = hap.Budget(**{kind: fraction})
        check_tight(
            groups, hap.plan(groups, random_scores(groups, seed), budget, limits=WIDE, per_cost=per_cost), budget
        )


@both
def test_unreachable_says_what_is_reachable(coupling: str) -> None:
    groups = traced("residual", coupling)
    for kind in ("params", "flops", "channels", "activations"):
        with pytest.raises(hap.HapError, match=rf"{kind}=0.001 cannot be reached.*at least") as caught:
            hap.plan(groups, random_scores(groups), hap.Budget(**{kind: 0.001}))
        said = float(str(caught.value).partition("at least ")[2].split()[0])
        plan = hap.plan(groups, random_scores(groups), hap.Budget(**{kind: said}))
        assert hap.Budget(**{kind: said}).of(plan.after) <= said * hap.Budget(**{kind: said}).of(plan.before)
        assert all(len(plan.kept[n]) >= 1 for n in groups)
        lower = hap.Budget(**{kind: said - 2e-4})
        with pytest.raises(hap.HapError, match="cannot be reached"):
            hap.plan(groups, random_scores(groups), lower)


def test_per_cost_prefers_dear_units() -> None:
    """Two layers with equal scores: the one whose units cost more goes first; without the option it is by score."""
    groups = hap.trace(*chain(10, 40))  # a unit of layer 0 costs 4 + 40, one of layer 1 10 + 3
    scores = {"0": torch.full((10,), 1.1), "1": torch.full((40,), 1.0)}
    by_score = hap.plan(groups, scores, hap.Budget(params=0.9))
    by_cost = hap.plan(groups, scores, hap.Budget(params=0.9), per_cost=True)
    assert counts(by_score)["0"] == 10 and counts(by_score)["1"] < 40
    assert counts(by_cost)["0"] < 10 and counts(by_cost)["1"] == 40


# ---- limits -------------------------------------------------------------------------------------------------


def test_per_layer_limit() -> None:
    groups = hap.trace(*chain(20, 20))
    scores = {"0": torch.arange(20.0), "1": 100 + torch.arange(20.0)}
    plan = hap.plan(groups, scores, hap.Budget(channels=0.6), limits=hap.Limits(per_layer=0.5))
    assert plan.removed == {"0": list(range(10)), "1": list(range(6))}
    with pytest.raises(hap.HapError, match=r"at least 0.5000"):
        hap.plan(groups, scores, hap.Budget(channels=0.3), limits=hap.Limits(per_layer=0.5))


def test_default_limit_is_ninety_five_percent() -> None:
    groups = hap.trace(*chain(40, 40))
    scores = {"0": torch.arange(40.0), "1": 100 + torch.arange(40.0)}
    plan = hap.plan(groups, scores, hap.Budget(channels=0.5))
    assert counts(plan) == {"0": 2, "1": 38}


def test_minimum_and_leave() -> None:
    groups = hap.trace(*chain(10, 10, 10))
    scores = {"0": torch.arange(10.0), "1": 100 + torch.arange(10.0), "2": 200 + torch.arange(10.0)}
    plan = hap.plan(groups, scores, hap.Budget(channels=0.6), limits=hap.Limits(minimum=4, leave=("1",)))
    assert counts(plan) == {"0": 4, "1": 10, "2": 4}
    assert hap.plan(groups, scores, hap.Budget(channels=0.7), limits=hap.Limits(leave=("[01]",))).removed["0"] == []


def test_no_layer_is_emptied() -> None:
    """A layer that makes only some of a group's units keeps one of them, however low their scores."""
    model, example = CASES["residual_with_branches"]()
    groups = traced("residual_with_branches", "joint")
    scores = {"stem.0": torch.ones(6), "c": torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])}
    plan = hap.plan(groups, scores, hap.Budget(channels=0.7), limits=WIDE)
    assert set(plan.kept["c"]) & {4, 5, 6, 7}
    check_pruned(model, groups, plan, example)


@pytest.mark.parametrize("step", [2, 4, 8])
@both
def test_round_to(step: int, coupling: str) -> None:
    for name in ("residual", "vgg", "inception"):
        groups = traced(name, coupling)
        model, example = CASES[name]()
        limits = hap.Limits(round_to=step, per_layer=1.0)
        least = hap.plan(groups, random_scores(groups), hap.Budget(params=1.0), limits=limits)
        assert counts(least) == {n: len(g) for n, g in groups.items()}
        for seed, fraction in enumerate((0.9, 0.75, 0.6)):
            try:
                plan = hap.plan(groups, random_scores(groups, seed), hap.Budget(params=fraction), limits=limits)
            except hap.HapError as error:
                if "cannot be reached" not in str(error) or step < 4:
                    raise
                continue
            assert plan.after.params <= fraction * plan.before.params
            for group in groups:
                kept = len(plan.kept[group])
                assert kept % step == 0 or kept == len(groups[group]), (name, group, kept)
                assert kept >= 1
            check_pruned(model, groups, plan, example)


def test_round_to_gives_back_whole_blocks() -> None:
    groups = hap.trace(*chain(16, 16))
    plan = hap.plan(groups, random_scores(groups), hap.Budget(params=0.5), limits=hap.Limits(round_to=4))
    assert all(n % 4 == 0 for n in counts(plan).values())
    assert plan.after.params <= 0.5 * plan.before.params
    assert any(plan.removed.values())
    for group in (n for n in groups if plan.removed[n]):  # four more of any layer would not fit
        more = hap.draft(groups, plan.removed | {group: plan.removed[group][4:]})
        assert more.after.params > 0.5 * plan.before.params


# ---- implants in the budget ---------------------------------------------------------------------------------

KINDS = [
    hap.Pointwise(0.3, init="center"),
    hap.Pointwise(1.0, init="zero"),
    hap.DepthwiseSeparable(0.5),
    hap.SpatialLowRank(0.5),
    hap.LowRank(),
]


@pytest.mark.parametrize("implant", KINDS, ids=lambda i: f"{type(i).__name__}-{i.ratio}")
@pytest.mark.parametrize(("name", "coupling"), traces(["residual", "inception", "bias_without_norm"]))
def test_budgets_count_implants(name: str, implant: hap.Implant, coupling: str) -> None:
    model, example = CASES[name]()
    groups = traced(name, coupling)
    used = 0
    for kind, fraction in (("params", 0.8), ("flops", 0.6), ("params", 0.6)):
        budget = hap.Budget(**{kind: fraction})
        plan = hap.plan(groups, random_scores(groups), budget, implant=implant, limits=WIDE)
        used += sum(map(len, plan.implanted.values()))
        check_tight(groups, plan, budget)
        check_pruned(model, groups, plan, example)
    assert used > 0


def test_implants_are_the_most_sensitive_of_what_goes() -> None:
    groups = traced("plain", "joint")
    plan = hap.plan(groups, random_scores(groups), hap.Budget(flops=0.4), implant=hap.Pointwise(0.4, init="center"))
    scores = random_scores(groups)
    flat = lambda part: [float(scores[n][u]) for n in groups for u in part[n]]  # noqa: E731
    assert flat(plan.implanted) and flat(plan.removed)
    assert min(flat(plan.implanted)) > max(flat(plan.removed))


def test_only_large_kernels_get_implants() -> None:
    groups = traced("bottleneck", "union")
    plan = hap.plan(groups, random_scores(groups), hap.Budget(flops=0.4), implant=hap.Pointwise(1.0, init="center"))
    assert {n for n, units in plan.implanted.items() if units} <= {"stem.0", "b1.1.0", "b2.1.0"}
    assert any(plan.implanted.values())


def test_a_ratio_is_a_pointwise_implant() -> None:
    groups = traced("plain", "joint")
    scores, budget = random_scores(groups), hap.Budget(flops=0.4)
    assert hap.plan(groups, scores, budget, 0.3) == hap.plan(groups, scores, budget, hap.Pointwise(ratio=0.3))
    assert hap.plan(groups, scores, budget, 0) == hap.plan(groups, scores, budget)


def test_low_rank_ignores_scores() -> None:
    groups = traced("plain", "joint")
    budget = hap.Budget(flops=0.6)
    plans = [hap.plan(groups, random_scores(groups, s), budget, implant=hap.LowRank()) for s in range(3)]
    assert plans[0] == plans[1] == plans[2]
    assert not any(plans[0].removed.values()) and any(plans[0].implanted.values())
    other = hap.plan(groups, random_scores(groups), budget, implant=hap.LowRank(seed=1))
    assert other.implanted != plans[0].implanted


# ---- drafts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("removed", "implanted", "implant", "words"),
    [
        ({"nowhere": [0]}, None, None, "nowhere"),
        ({"0.0": [8]}, None, None, "8"),
        ({"0.0": [-1]}, None, None, "-1"),
        ({"0.0": [0]}, {"0.0": [0]}, hap.Pointwise(), "0.0"),
        ({}, {"0.0": [0]}, None, "implant"),
    ],
)
def test_drafts_that_make_no_sense_are_refused(removed: dict, implanted: dict, implant: object, words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        hap.draft(traced("plain", "joint"), removed, implanted, implant)


# ---- several limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_cost", [False, True])
@pytest.mark.parametrize(("name", "coupling"), traces(["residual", "inception"]))
def test_several_limits_all_hold_and_are_used_up(name: str, per_cost: bool, coupling: str) -> None:
    groups = traced(name, coupling)
    for seed, (flops, params) in enumerate([(0.6, 0.6), (0.5, 0.8), (0.9, 0.5)]):
        budget = hap.Budget(flops=flops, params=params)
        plan = hap.plan(groups, random_scores(groups, seed), budget, limits=WIDE, per_cost=per_cost)
        check_tight(groups, plan, budget)


def test_ranking_by_cost_makes_more_of_two_limits() -> None:
    model = hap.models.build("resnet20").eval()
    groups = hap.trace(model, torch.zeros(1, 3, 32, 32), "union")
    scores = hap.score(model, groups, None, None, "magnitude")
    plain = hap.plan(groups, scores, hap.Budget(flops=0.4, params=0.4))
    mixed = hap.plan(groups, scores, hap.Budget(flops=0.4, params=0.4), per_cost=True)
    used = [min(p.after.macs / p.before.macs, p.after.params / p.before.params) for p in (plain, mixed)]
    assert used[1] > 2 * used[0]


def test_text_that_is_no_plan_and_steps_on_modules_that_are_not_there_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    plan = hap.draft(hap.trace(model, torch.randn(2, 4)), {"0": [1]})
    with pytest.raises(hap.HapError, match="the plan is not valid JSON"):
        hap.Plan.from_json(plan.to_json()[:-1])
    values = plan.to_dict()
    values["widenings"] = [{"module": "7", "index": [0, 1], "width": 3, "dim": 1, "inside": None}]
    with pytest.raises(hap.HapError, match="it has no module '7'"):
        hap.Plan.from_dict(values).check_fits(model)


def test_where_units_are_read_in_whole_blocks_implanted_ones_come_last() -> None:
    """The implant's outputs are then put behind the convolution's, and nothing has to be sorted while it runs."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)).eval()
    groups = hap.trace(model, torch.randn(1, 3, 4, 4))
    plan = hap.draft(groups, {"0": [1]}, {"0": [2]}, hap.Pointwise(ratio=0.5))
    kept = {cut.name: cut.keep for cut in plan.cuts}
    assert kept["0.weight"] == (0, 3, 4, 5)
    assert kept["3.weight"] == tuple(4 * unit + place for unit in (0, 3, 4, 5, 2) for place in range(4))
    assert plan.grafts[0].rows == (2,) and plan.grafts[0].order is None

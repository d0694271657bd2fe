"""Several rounds: one plan on the dense model in the end, an exact budget, and nothing that comes back by accident."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_repair import error, network
from torch import nn

import hap
from cases import CASES
from checks import assert_unchanged, copied, gap, random_plan, run, snapshot, traced
from hap.scoring import Criterion, Scores, ScoringContext
from hap.surgery.cut import masked_copy


def pruned(dense: nn.Module, example: Any, batches: Any, **how: Any) -> tuple[nn.Module, hap.Plan]:
    model = copy.deepcopy(dense)
    return model, hap.prune_(model, example, batches, criterion="magnitude", flops=0.4, **how)


@pytest.mark.parametrize("repair", [None, "refit", "norms", "compensate"])
def test_the_last_round_has_an_exact_budget_and_a_plan_on_the_dense_model(repair: str | None, tmp_path: Any) -> None:
    dense, example, batches = network()
    model, plan = pruned(dense, example, batches, repair=repair, rounds=3)
    _, once = pruned(dense, example, batches)
    assert hap.cost(model, example).macs == plan.after.macs <= 0.4 * plan.before.macs
    assert plan.before == once.before
    hap.save(tmp_path / "pruned.safetensors", model, plan)
    loaded = hap.load(tmp_path / "pruned.safetensors", copy.deepcopy(dense)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(example), model(example))


def test_rounds_with_a_refit_come_nearer_than_without() -> None:
    dense, example, batches = network()
    fresh = torch.randn(256, 3, 8, 8)
    refitted, _ = pruned(dense, example, batches, repair="refit", rounds=2)
    plain, _ = pruned(dense, example, batches, rounds=2)
    assert error(refitted, dense, fresh) < 0.5 * error(plain, dense, fresh)


def test_scores_that_stay_alike_choose_the_same_in_one_round_and_in_several() -> None:
    dense, example, _ = network()
    _, once = pruned(dense, example, None)
    _, thrice = pruned(dense, example, None, rounds=3)
    assert once.removed == thrice.removed


def test_each_round_scores_what_the_rounds_before_left() -> None:
    seen = []

    class Recorded(Criterion):
        name = "recorded"

        def scores(self, problem: ScoringContext) -> Scores:
            seen.append([problem.model[place].weight.detach().clone() for place in (0, 3)])
            return hap.Reversed(hap.Magnitude()).scores(problem)  # zeros would be the most sensitive ones

    dense, example, batches = network()
    model = copy.deepcopy(dense)
    plan = hap.prune_(model, example, batches, criterion=Recorded(), flops=0.4, rounds=3, repair="refit")
    assert torch.equal(seen[0][0], dense[0].weight)
    zeros = [set(torch.nonzero(w.flatten(1).abs().sum(1) == 0).flatten().tolist()) for w, _ in seen]
    assert zeros[0] < zeros[1] < zeros[2] < set(plan.removed["0"])
    left = torch.tensor(plan.kept["3"])[:, None], torch.tensor(plan.kept["0"])
    assert not torch.allclose(seen[2][1][left], dense[3].weight[left])


def test_implants_are_placed_in_the_last_round() -> None:
    dense, example, batches = network()
    model, plan = pruned(dense, example, batches, repair="refit", rounds=2, implant=0.5)
    assert plan.implanted["0"] or plan.implanted["3"]
    assert hap.cost(model, example).macs == plan.after.macs


@pytest.mark.parametrize(
    "name", ["residual", "grouped_transposed", "depthwise", "recurrent_layers", "attention_fused", "tied_parameters"]
)
def test_a_masked_copy_holds_the_values_of_the_pruned_model_and_zeros(name: str) -> None:
    model, example = CASES[name]()
    groups = traced(name, "union")
    plan = random_plan(groups, seed=0)
    smaller = hap.apply_(copied(model), plan, example)
    with torch.no_grad():
        for tensor in smaller.parameters():
            tensor.mul_(1.5)
    masked = masked_copy(model, smaller, plan)
    same = hap.apply_(copied(masked), plan, example)
    assert all(torch.equal(a, b) for a, b in zip(smaller.parameters(), same.parameters(), strict=True))
    left = sum(int(t.count_nonzero()) for t in masked.parameters())
    assert left == sum(int(t.count_nonzero()) for t in smaller.parameters())
    assert gap(run(masked, example), run(smaller, example)) < 1e-10


@pytest.mark.parametrize("rounds", [0, 1.5, True, "2"])
def test_rounds_that_are_no_number_are_refused(rounds: Any) -> None:
    dense, example, _ = network()
    before = snapshot(dense)
    with pytest.raises(hap.HapError, match=r"rounds=.*whole number of at least 1"):
        hap.prune_(dense, example, criterion="magnitude", flops=0.4, rounds=rounds)
    assert_unchanged(dense, before)


def test_what_takes_one_round_says_so() -> None:
    dense, example, batches = network()
    with pytest.raises(hap.HapError, match=r"latency=0\.5 takes one round"):
        hap.prune_(dense, example, batches, F.cross_entropy, latency=0.5, rounds=2)
    with pytest.raises(hap.HapError, match="NarrowHeads turns heads"):
        hap.prune_(dense, example, criterion="magnitude", flops=0.5, rounds=2, implant=hap.NarrowHeads(ratio=0.5))

"""A tolerated drop in place of a budget: the smallest network that holds it, with what was tried."""

import copy
from typing import Any

import pytest
import test_repair
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from checks import assert_unchanged, snapshot
from hap.pruning.plan_for_drop import drop_and_bound, held_out_losses

HOW: dict[str, Any] = {"criterion": "magnitude", "per_cost": True}


def network() -> tuple[nn.Module, Any, list[Any]]:
    """A network with fewer samples than repairs are compared on."""
    dense, example, [(x, _)] = test_repair.network()
    return dense, example, [(x[:256], None)]


def agreement(dense: nn.Module, count: int = 2000) -> Any:
    """For each of some fresh samples 100 where a model answers as the dense one does, else 0."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        x = torch.randn(count, 3, 8, 8)
    with torch.no_grad():
        answers = dense(x).argmax(1)
    return lambda model: 100.0 * (model(x).argmax(1) == answers)


def test_the_smallest_network_within_the_tolerance_is_found() -> None:
    dense, example, batches = network()
    evaluate, sizes = agreement(copy.deepcopy(dense)), []
    for most in (25.0, 45.0):
        model = copy.deepcopy(dense)
        plan = hap.prune_(model, example, batches, max_drop=most, evaluate=evaluate, **HOW)
        drop = 100 - float(evaluate(model).mean())
        (tried,) = [t for t in plan.curve if t.flops == plan.after.macs / plan.before.macs]
        assert drop == pytest.approx(tried.drop) and drop < tried.bound <= most
        assert tried.flops == min(t.flops for t in plan.curve if t.within)
        assert all(t.bound > most for t in plan.curve if t.flops < tried.flops)
        assert hap.cost(model, example).macs == plan.after.macs
        sizes.append(tried.flops)
    assert sizes[1] < sizes[0] < 1


def test_the_plan_keeps_what_was_tried_in_files(tmp_path: Any) -> None:
    dense, example, batches = network()
    model = copy.deepcopy(dense)
    plan = hap.prune_(model, example, batches, max_drop=50.0, evaluate=agreement(dense, 200), **HOW)
    assert 2 < len(plan.curve) <= 7 and hap.Plan.from_json(plan.to_json()) == plan
    hap.save(tmp_path / "pruned.safetensors", model, plan)
    assert hap.read(tmp_path / "pruned.safetensors").plan == plan


def test_a_tolerated_rise_looks_at_the_losses_of_samples_held_out() -> None:
    dense, example, batches = network()
    with torch.no_grad():
        labelled = [(x, dense(x).argmax(1)) for x, _ in batches]
    expected = F.cross_entropy(dense(labelled[0][0][3::4]), labelled[0][1][3::4], reduction="none")
    assert torch.allclose(held_out_losses(dense, labelled, F.cross_entropy), expected, atol=1e-6)
    model = copy.deepcopy(dense)
    plan = hap.prune_(model, example, labelled, F.cross_entropy, max_rise=0.2, **HOW)
    rise = float((held_out_losses(model, labelled, F.cross_entropy) - expected).mean())
    assert plan.after.macs < plan.before.macs and rise < 0.2


def test_one_number_is_held_against_the_tolerance_itself() -> None:
    assert drop_and_bound(torch.tensor([0.9]), torch.tensor([0.87])) == pytest.approx((0.03, 0.03))


def test_bounds_hold_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    wrong = 0
    for _ in range(400):
        lost = (torch.rand(500, generator=generator) < 0.02).double()
        wrong += drop_and_bound(torch.ones(500).double(), 1 - lost)[1] < 0.02
    assert wrong <= 400 * 0.05 / 7 * 2
    few = torch.ones(20).double()
    assert drop_and_bound(torch.cat([few, 0 * few]), torch.cat([few, 0 * few]))[1] > 0.03
    assert drop_and_bound(few, few)[1] > 0.03  # all right, and no drop seen: still not certain


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"max_drop": 1.0}, "max_drop=1.0 needs evaluate"),
        ({"max_rise": 1.0}, "max_rise=1.0 needs batches"),
        ({"max_drop": 1.0, "flops": 0.5}, "max_drop=1.0, flops=0.5; give a tolerated drop or a budget"),
        ({"flops": 0.5, "evaluate": float}, "evaluate is for max_drop"),
        ({"flops": 0.5, "augment": abs}, "augment is for repair='distil'"),
        ({"max_drop": 1.0, "evaluate": float, "repair": "norms"}, "expected repair 'refit' or 'none', not 'norms'"),
        ({"max_drop": -1, "evaluate": float}, "max_drop=-1; expected a number above 0"),
        ({"max_drop": 1.0, "evaluate": lambda m: float("nan")}, "evaluate returns nan; expected a finite number"),
        ({"max_drop": 1.0, "evaluate": lambda m: torch.rand(0)}, "evaluate returns"),
        ({"max_drop": 1e-9, "evaluate": lambda m: -hap.cost(m, torch.randn(1, 3, 8, 8)).macs * -1.0}, "cannot be held"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_and_nothing_is_lost(how: dict[str, Any], message: str) -> None:
    dense, example, batches = network()
    before = snapshot(dense)
    with pytest.raises(hap.HapError, match=message.replace(".", r"\.")):
        hap.prune_(dense, example, None if "max_rise" in how else batches, **how, **HOW)
    assert_unchanged(dense, before)


def test_losses_of_outputs_that_are_no_samples_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0, 1))
    batch = torch.randn(8, 5, 4), torch.randint(0, 3, (40,))
    with pytest.raises(hap.HapError, match="8 samples go in and 40 come out"):
        held_out_losses(model, [batch], F.cross_entropy)


def test_no_repair_can_be_asked_for() -> None:
    dense, example, batches = network()
    model = copy.deepcopy(dense)
    how = {**HOW, "max_drop": 90.0, "evaluate": agreement(dense, 200)}
    plan = hap.prune_(model, example, batches, repair="none", **how)
    assert torch.equal(model[0].weight, dense[0].weight[plan.kept["0"]])
    assert torch.equal(model[1].running_mean, dense[1].running_mean[plan.kept["0"]])


def test_values_of_another_number_are_refused() -> None:
    def evaluate(model: nn.Module) -> Tensor:
        return torch.ones(model[0].out_channels)

    dense, example, batches = network()
    with pytest.raises(hap.HapError, match="values for a pruned model and 12 for the dense one"):
        hap.prune_(dense, example, batches, max_drop=1.0, evaluate=evaluate, **HOW)

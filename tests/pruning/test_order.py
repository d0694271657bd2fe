"""One order, every size: an order gives the plan that scoring anew gives, and one that does not fit says why."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_repair import network
from torch import nn

import hap
from cases import CASES
from checks import assert_unchanged, copied, snapshot
from hap.pruning import prune
from hap.scoring import Criterion, Scores, ScoringContext

CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("residual", {"criterion": "reversed-l1"}),
    ("residual", {"criterion": hap.Random(seed=3), "per_cost": True, "coupling": "union"}),
    ("convnext_block", {"criterion": "l1", "stream": True, "per_cost": True}),
]
SIZES: list[dict[str, Any]] = [
    {"flops": 0.37},
    {"params": 0.7, "flops": 0.8},
    {"channels": 0.5, "implant": 0.3},
    {"params": 0.6, "limits": hap.Limits(round_to=2, per_layer=0.6)},
]


@pytest.fixture
def tracing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced is no part of these tests: the copies of one model are traced once for each coupling and so on."""
    trace, found = prune.trace_whole_or_parts, dict[str, Any]()

    def remembering(model: nn.Module, example: Any, *how: Any) -> Any:
        if str(how) not in found:
            found[str(how)] = trace(model, example, *how)
        return found[str(how)]

    monkeypatch.setattr(prune, "trace_whole_or_parts", remembering)


@pytest.mark.usefixtures("tracing_once")
@pytest.mark.parametrize(("name", "choices"), CHOICES)
def test_every_size_gets_the_plan_that_scoring_anew_gives(name: str, choices: dict[str, Any]) -> None:
    model, example = CASES[name]()
    before = snapshot(model)
    order = hap.Order.from_json(hap.order(model, example, **choices).to_json())
    assert_unchanged(model, before)
    for size in SIZES:
        anew = hap.prune_(copied(model), example, **size, **choices, verify=False)
        assert hap.prune_(copied(model), example, **size, order=order, verify=False) == anew
        assert any(anew.removed.values())


@pytest.mark.usefixtures("tracing_once")
def test_nothing_is_scored_again_and_the_refit_is_the_same() -> None:
    dense, example, batches = network()
    calls = []

    def loss(output: torch.Tensor, target: None) -> torch.Tensor:
        calls.append(len(output))
        return output.square().mean()

    how = {"criterion": hap.Taylor(), "ignore": ("0",)}
    order = hap.order(dense, example, batches, loss, **how)
    assert calls and order.ignore == ("0",) and list(order.scores) == ["3"]
    twins, scored = (copied(dense), copied(dense)), len(calls)
    plan = hap.prune_(twins[0], example, batches, loss, flops=0.7, repair="refit", order=order)
    assert len(calls) == scored
    assert plan == hap.prune_(twins[1], example, batches, loss, flops=0.7, repair="refit", **how)
    assert all(torch.equal(a, b) for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True))


@pytest.mark.usefixtures("tracing_once")
def test_a_tolerated_drop_by_an_order() -> None:
    dense, example, batches = network()

    def near(model: nn.Module) -> torch.Tensor:
        return -(model(example) - target).abs().mean(1)

    with torch.no_grad():
        target = dense(example)
    how: dict[str, Any] = {"max_drop": 0.2, "evaluate": near, "repair": "none"}
    order = hap.order(dense, example, criterion="magnitude", per_cost=True)
    by_order = hap.prune_(copied(dense), example, batches, order=order, **how)
    assert by_order == hap.prune_(copied(dense), example, batches, criterion="magnitude", per_cost=True, **how)
    assert len(by_order.curve) > 1


@pytest.mark.usefixtures("tracing_once")
def test_heads_that_are_narrowed_go_in_the_same_order() -> None:
    model, example = CASES["attention_fused"]()
    how: dict[str, Any] = {"flops": 0.8, "implant": hap.NarrowHeads(ratio=0.5, rank=0.5)}
    order = hap.order(model, example, criterion="magnitude")
    by_order = hap.prune_(copied(model), example, order=order, **how)
    assert by_order == hap.prune_(copied(model), example, criterion="magnitude", **how)


# ---- what is refused ----------------------------------------------------------------------------------------------

SMALL = hap.Order({"0": [1.0, 2.0]}, {"name": "magnitude"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"criterion": "l1"}, r"criterion=l1 is given beside an order, which has 2 units .* by magnitude"),
        ({"criterion": hap.L1()}, r"criterion=L1 is given beside an order"),
        ({"coupling": "joint"}, r"coupling=joint is given beside an order, .* leave out one of them"),
        ({"ignore": ["0"]}, r"ignore=\['0'\] is given beside an order"),
        ({"stream": True}, r"stream=True is given"),
        ({"per_cost": True}, r"per_cost=True is given"),
        ({"rounds": 2}, r"rounds=2 takes scores anew after each, and an order has those of the dense model alone"),
        ({"order": SMALL.to_json()}, r"order is str; expected what hap.order or hap.Order.from_json returned"),
    ],
)
def test_what_an_order_has_chosen_already(given: dict[str, Any], words: str) -> None:
    dense, example, _ = network()
    before = snapshot(dense)
    with pytest.raises(hap.HapError, match=words):
        hap.prune_(dense, example, flops=0.5, **{"order": SMALL, **given})
    assert_unchanged(dense, before)


@pytest.mark.usefixtures("tracing_once")
def test_an_order_of_another_model() -> None:
    dense, example, _ = network()
    order = hap.order(dense, example, criterion="magnitude")
    units = len(order.scores["3"])
    lacks = replace(order, scores={"0": order.scores["0"]})
    more = replace(order, scores={**order.scores, "stem": [1.0]})
    fewer = replace(order, scores={**order.scores, "3": order.scores["3"][1:]})
    for other, words in [
        (lacks, r"of another model: it lacks group '3', which is here; make one of this model with hap\.order"),
        (more, r"it has group 'stem', and the groups here are 0, 3"),
        (fewer, rf"it has {units - 1} units in group '3', and here are {units}"),
    ]:
        before = snapshot(dense)
        with pytest.raises(hap.HapError, match=words):
            hap.prune_(dense, example, flops=0.5, order=other)
        assert_unchanged(dense, before)


@dataclass(frozen=True)
class Odd(Criterion):
    """A criterion whose settings JSON does not hold."""

    name = "odd"
    shift: Any = 1j

    def scores(self, problem: ScoringContext) -> Scores:
        return hap.Magnitude().scores(problem)


def test_a_criterion_that_cannot_be_stored_and_scores_that_are_no_numbers() -> None:
    dense, example, _ = network()
    with pytest.raises(
        hap.HapError, match=r"Odd cannot say in JSON how it scores .* give it a name and plain settings"
    ):
        hap.order(dense, example, criterion=Odd())
    with pytest.raises(hap.HapError, match="needs data: pass batches"):
        hap.order(dense, example)
    broken = copy.deepcopy(dense)
    with torch.no_grad():
        broken[0].weight[0, 0, 0, 0] = math.nan
    with pytest.raises(hap.HapError, match=r"0\.weight"):
        hap.order(broken, example, criterion="magnitude")

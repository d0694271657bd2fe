"""Orders as values: what they say of themselves, what JSON may hold, and which groups they are of."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

import hap
from checks import random_scores, traced

SMALL = hap.Order({"0": [1.0, 2.0]}, {"name": "magnitude"})


def test_ranks_are_the_places_by_score() -> None:
    order = hap.Order({"a": [0.3, -1.0], "b": [0.3, 2.0]}, {"name": "magnitude"})
    assert order.ranks == {"a": [1, 0], "b": [2, 3]}


def test_an_order_says_what_it_is() -> None:
    order = hap.Order(
        {"a": [1.0, 2.0]}, hap.Reversed(hap.L1()).to_dict(), per_cost=True, stream=True, ignore=("b*", "c")
    )
    assert str(order) == "2 units in 1 group by reversed l1, joint coupling, per cost, with the stream, without b*, c"


def test_scores_are_those_of_these_groups_alone() -> None:
    groups = traced("residual", "joint")
    scores = random_scores(groups)
    order = hap.Order({n: v.tolist() for n, v in scores.items()}, {"name": "magnitude"}, about={"passes": 1})
    found = order.scores_for(groups)
    assert list(found) == list(groups) and all(found[n].tolist() == v.tolist() for n, v in scores.items())
    assert found.about == {"passes": 1}
    first = next(iter(groups))
    for changed, words in [
        ({n: v for n, v in order.scores.items() if n != first}, f"it lacks group '{first}'"),
        ({**order.scores, "stem": [1.0]}, "it has group 'stem', and the groups here are"),
        ({**order.scores, first: [1.0]}, f"it has 1 units in group '{first}', and here are {len(groups[first])}"),
    ]:
        with pytest.raises(hap.HapError, match=words):
            replace(order, scores=changed).scores_for(groups)


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"scores": {"0": [1.0, math.nan]}}, r"scores\['0'\] holds nan; look at the model's weights"),
    ({"scores": {"0": [1.0, -math.inf]}}, r"finite numbers alone, and scores\['0'\] holds -inf"),
    ({"scores": {"0": [10**400]}}, r"finite numbers alone"),
    ({"scores": {"0": [True]}}, r"scores\['0'\] is \[True\]; expected one number for each unit"),
    ({"scores": {"0": "12"}}, r"scores\['0'\] is '12'"),
    ({"scores": {"0": []}}, r"scores\['0'\] is \[\]"),
    ({"scores": {}}, r"scores is \{\}; expected numbers for each group"),
    ({"scores": [1.0]}, r"scores is \[1.0\]"),
    ({"coupling": "loose"}, r"coupling is 'loose'; expected 'joint' or 'union'"),
    ({"per_cost": 1}, r"per_cost is 1"),
    ({"stream": "no"}, r"stream is 'no'"),
    ({"ignore": "0"}, r"ignore is '0'"),
    ({"ignore": [0]}, r"ignore is \[0\]; expected names or patterns"),
    ({"criterion": {}}, r"criterion is \{\}; expected its name and settings"),
    ({"criterion": "l1"}, r"criterion is 'l1'"),
    ({"about": {"seconds": math.nan}}, r"about is not JSON: Out of range float"),
    ({"about": None}, r"about is None"),
    ({"units": 2}, r"fields \['units'\] are missing or unknown"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGED)
def test_damaged_orders(change: dict[str, Any], words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        hap.Order.from_json(json.dumps({**SMALL.to_dict(), **change}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("1" * 5000, "not valid JSON"),
        ("[1]", "this is not an order that this version of HAP wrote"),
        ('{"scores": {"0": [1.0]}}', "'about', 'coupling'.* are missing or unknown"),
    ],
)
def test_text_that_is_no_order(text: str, words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        hap.Order.from_json(text)

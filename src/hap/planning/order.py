"""Order: what goes first, at every budget. JSON in and out.

It holds scores, not places: with `per_cost` a place depends on what the budget counts, and what still fits is kept
after all. From the same scores the same plan follows.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hap.errors import Argument, ForPython, HapError
from hap.groups.groups import Groups
from hap.scoring import Criterion, Scores

ANEW = ForPython("make one of this model with hap.order", ("make one of this model with hap order",))
NOT_OURS = "this is not an order that this version of HAP wrote"
LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Order:
    """What goes first: `scores[group][unit]`, the lowest first, and the choices that they were made with.

    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> order = hap.order(net, torch.randn(2, 4), criterion="magnitude")
    >>> hap.Order.from_json(order.to_json()) == order
    True
    >>> print(order)
    16 units in 1 group by magnitude, joint coupling
    """

    scores: dict[str, list[float]]
    criterion: dict[str, Any]
    per_cost: bool = False
    coupling: str = "joint"
    stream: bool = False
    ignore: tuple[str, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    """How the criterion ran."""

    def __post_init__(self) -> None:
        _check_choices(self)
        if not isinstance(self.scores, dict) or not self.scores:
            raise HapError(f"{NOT_OURS}: scores is {self.scores!r:.40}; expected numbers for each group")
        for name, values in self.scores.items():
            _check_numbers(name, values)
        object.__setattr__(self, "ignore", tuple(self.ignore))
        object.__setattr__(self, "scores", {n: [float(v) for v in values] for n, values in self.scores.items()})

    @classmethod
    def of(cls, scores: Scores, criterion: Criterion, **choices: Any) -> Order:
        """The order of these scores, which `criterion` gave, and of the other `choices` by name."""
        try:
            made_by, about = criterion.to_dict(), json.loads(json.dumps(scores.about, allow_nan=False))
        except (TypeError, ValueError, AttributeError) as error:
            seen = f"{type(criterion).__name__} cannot say in JSON how it scores ({error})"
            raise HapError(f"{seen}, which an order keeps; give it a name and plain settings") from error
        return cls({n: v.double().tolist() for n, v in scores.items()}, made_by, about=about, **choices)

    @property
    def ranks(self) -> dict[str, list[int]]:
        """The place of each unit when all are sorted by score alone, 0 first. `hap.Limits` may hold a unit back; with
        `per_cost`, what the budget counts moves it too."""
        flat = np.concatenate([np.array(values) for values in self.scores.values()])
        places = np.argsort(np.argsort(flat, kind="stable"), kind="stable").tolist()
        place = iter(places)
        return {name: [next(place) for _ in values] for name, values in self.scores.items()}

    def scores_for(self, groups: Groups) -> Scores:
        """The scores of these groups; HapError if they are not those that the order was made of."""
        for name, group in groups.items():
            if name not in self.scores:
                raise HapError(f"the order is of another model: it lacks group {name!r}, which is here; ", ANEW)
            if (count := len(self.scores[name])) != len(group):
                why = f"it has {count} units in group {name!r}, and here are {len(group)}"
                raise HapError(f"the order is of another model: {why}; ", ANEW)
        if more := [name for name in self.scores if name not in groups]:
            why = f"it has group {more[0]!r}, and the groups here are {', '.join(groups)}"
            raise HapError(f"the order is of another model: {why}; ", ANEW)
        return Scores({n: torch.tensor(self.scores[n], dtype=torch.float64) for n in groups}, about=self.about)

    def check_alone(self, **choices: Any) -> None:
        """Refuse choices beside an order, which has made them already."""
        for name, value in choices.items():
            if value:
                seen = Argument(name, value if isinstance(value, int | str | tuple | list) else type(value).__name__)
                raise HapError(seen, f" is given beside an order, which has {self}; leave out one of them")

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "ignore": list(self.ignore)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Order:
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, Mapping):
            raise HapError(f"{NOT_OURS}: expected an object of JSON, not {type(values).__name__}")
        if set(values) != known:
            raise HapError(f"{NOT_OURS}: fields {sorted(set(values) ^ known)} are missing or unknown")
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Order:
        try:
            values = json.loads(text)
        except (TypeError, ValueError) as error:
            raise HapError(f"the order is not valid JSON: {error}") from error
        return cls.from_dict(values)

    def __str__(self) -> str:
        units, groups = sum(map(len, self.scores.values())), len(self.scores)
        told = [f"{self.coupling} coupling", "per cost" * self.per_cost, "with the stream" * self.stream]
        told.append(f"without {', '.join(self.ignore)}" if self.ignore else "")
        how = ", ".join([_name(self.criterion), *filter(None, told)])
        return f"{units} units in {groups} group{'s' * (groups > 1)} by {how}"


def _name(criterion: Mapping[str, Any]) -> str:
    """The name of a criterion, with those of the criteria that it is made of."""
    inner = [_name(value) for value in criterion.values() if isinstance(value, dict) and "name" in value]
    return " ".join([str(criterion["name"]), *inner])


def _check_numbers(name: str, values: Any) -> None:
    if not isinstance(values, list) or not values or not set(map(type, values)) <= {int, float}:
        raise HapError(f"{NOT_OURS}: scores[{name!r}] is {values!r:.40}; expected one number for each unit")
    if wrong := [v for v in values if not abs(v) <= LARGEST]:
        advice = "look at the model's weights and the data, and make the order again"
        raise HapError(f"an order has finite numbers alone, and scores[{name!r}] holds {wrong[0]!r:.24}; {advice}")


def _check_choices(order: Order) -> None:
    """Whether all but the scores is what `hap.order` would have been given."""
    kinds = {"per_cost": bool, "stream": bool, "ignore": list | tuple, "criterion": dict, "about": dict}
    for field_name, kind in kinds.items():
        if not isinstance(value := getattr(order, field_name), kind):
            raise HapError(f"{NOT_OURS}: {field_name} is {value!r:.40}")
    if order.coupling not in ("joint", "union"):
        raise HapError(f"{NOT_OURS}: coupling is {order.coupling!r}; expected 'joint' or 'union'")
    if not isinstance(order.criterion.get("name"), str):
        raise HapError(f"{NOT_OURS}: criterion is {order.criterion!r:.80}; expected its name and settings")
    if not all(isinstance(pattern, str) for pattern in order.ignore):
        raise HapError(f"{NOT_OURS}: ignore is {order.ignore!r:.80}; expected names or patterns")
    try:
        json.dumps([order.criterion, order.about], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise HapError(f"{NOT_OURS}: criterion or about is not JSON: {error}") from error

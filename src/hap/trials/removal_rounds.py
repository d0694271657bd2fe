"""The rounds of a trial: which units go from the model that is tried, and from the one that it is compared with."""

import re
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hap.groups.groups import Groups
from hap.groups.types import Ints


class Round(NamedTuple):
    """What goes of each group from the reference model, and from the model that is tried: that and something more."""

    reference: dict[str, list[int]]
    tried: dict[str, list[int]]


@dataclass(frozen=True)
class Amounts:
    """How much goes in a round.

    The reference model loses at most the share `of_small` of a small group and at least `of_large` of a large one.
    Groups lose something with probability `often`. `keep_few` leaves only a few units of small groups, `by_turns`
    takes no, one, two, ... units from groups in turns.
    """

    of_small: float = 0.0
    of_large: float = 0.0
    often: float = 1.0
    keep_few: bool = False
    by_turns: bool = False


AMOUNTS = (Amounts(0.5, 0.9, keep_few=True), Amounts(0.2, 0.8, keep_few=True))
MORE_FOR_SMALL_MODELS = (*[Amounts(0.6, 0.5, 0.5)] * 4, Amounts(by_turns=True))
"""With few units more fits by chance. In some rounds groups stay whole; in the last one neighbours, which are often of
one size, lose different numbers of units, so that it shows which number counts which."""
SMALL_MODEL = 100
"""Models with fewer units than this are small."""
LARGE_MODEL = 20_000
"""Models with more units than this are tried once: there nothing fits by chance in all layers, and they run slowly."""
SMALL = 12
"""Groups with fewer units than this are small. More is left of them: one unit of each would be regular again."""
LEFT = (2, 3, 4)
"""How many units of small groups are left in the first two rounds, in turns."""
FEW = (2, 4)
"""How many units are left at first of small groups in heavy models, such as heads that look at each of 4096 places."""


def kind_of(name: str) -> str:
    """The name with # for its numbers: names of repeated blocks are of one kind."""
    return re.sub(r"\d+", "#", name)


def rounds_of(groups: Groups, counted: list[Ints], sliced: Set[str], heavy: bool = False) -> list[Round]:
    """The rounds that show whether a forward counts on the sizes of these groups.

    Random parts go, since what is regular may fit by chance; large ones of large groups, since small models run fast.
    Of every axis something stays, and of what may be `counted`. In the first two rounds two or more heads stay, and not
    as many in neighbouring layers: a table of one head, or of as many, fits any other by chance. Groups that are
    `sliced` lose their first units from the tried model alone: with little left in both, all of it would be on one side
    of the slice, and units behind that place could go without a trace. `heavy` models, which take long to run, get one
    round.
    """
    draw = np.random.default_rng(0)
    units = np.concatenate([np.zeros(0, np.int64), *(g.classes for g in groups.values())])
    sustaining = _sustaining(groups, units, counted)
    amounts = (*AMOUNTS, *(MORE_FOR_SMALL_MODELS if groups.units < SMALL_MODEL else ()))
    rounds = []
    for number, amount in enumerate(amounts[: 1 if groups.units > LARGE_MODEL or heavy else None]):
        turns: Counter[str] = Counter()
        rank = np.zeros(groups.classes)
        rank[units] = draw.permutation(len(units))
        spared = {int(able[np.argmax(rank[able])]) for able in sustaining}
        found = Round({}, {})
        for place, (name, group) in enumerate(groups.items()):
            order = [int(u) for u in np.argsort(rank[group.classes]) if int(group.classes[u]) not in spared]
            order = order if draw.random() < amount.often else []
            small = len(order) < SMALL
            share = draw.uniform(0, amount.of_small) if small else draw.uniform(amount.of_large, 0.95)
            first = int(len(order) * share)
            if name in sliced:
                first, order = 0, sorted(order)
            elif heavy and order and small:
                first = min(max(len(group) - int(draw.integers(*FEW, endpoint=True)), 0), len(order) - 1)
            last = int(draw.integers(first, len(order)) + 1) if order else 0
            if amount.keep_few and order and small and len(group) > 2:
                last = min(len(group) - _left(len(group), turns[kind_of(name)] + number, heavy), len(order))
                first = min(first, last - 1)
                turns[kind_of(name)] += 1
            if amount.by_turns:
                first, last = 0, place % (len(order) + 1)
            found.reference[name], found.tried[name] = order[:first], order[:last]
        rounds.append(found)
    return rounds


def _sustaining(groups: Groups, units: Ints, counted: list[Ints]) -> list[Ints]:
    """For each axis, and for what may be counted, the units that keep something of it alive."""
    is_unit = np.zeros(groups.classes, dtype=bool)
    is_unit[units] = True
    spans = [np.append(x, groups.sources(x)) for x in (*groups.spans(), *counted) if x.all()]
    return [able for x in spans if len(able := x[is_unit[x]])]


def _left(size: int, turn: int, heavy: bool) -> int:
    """How many of so many units are left, in turns."""
    choices = [left for left in LEFT[: 2 if heavy else None] if left < size]
    choices = choices if len(choices) > 1 else [*choices, 1]
    return choices[turn % len(choices)]

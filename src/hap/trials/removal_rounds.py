"""The rounds of a trial: which units go from the model that is tried, and from the one that it is held against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set

import numpy as np

from hap.groups.groups import Groups
from hap.groups.types import Ints

Removal = tuple[dict[str, list[int]], dict[str, list[int]]]
"""What goes of each group from the model that a trial compares with, and from the one that it tries."""
SMALL = 12
"""Of groups with fewer units than this, more is left in trials: one unit of each would be regular again."""
BY_TURNS = (0.0, 0.0, 1.0)
"""The round in which groups lose no, one, two, ... units in turns."""
LEFT = (2, 3, 4)
"""How many units of small groups are left in the first two rounds, in turns."""
SMALL_MODEL = 100
"""Models with fewer units than this are tried more often: with few units more fits by chance, and they run fast."""
LARGE_MODEL = 20_000
"""Models with more units than this are tried once: there nothing fits by chance in all layers, and they run slowly."""
FEW = (2, 4)
"""How many units are left at first of small groups in heavy models, such as heads that look at each of 4096 places."""


def kind_of(name: str) -> str:
    """Names that differ in their numbers alone, such as those of repeated blocks, are of one kind."""
    return re.sub(r"\d+", "#", name)


def rounds_of(groups: Groups, counted: list[Ints], sliced: Set[str], heavy: bool = False) -> list[Removal]:
    """What goes from the model that a trial compares with, and from the one that it tries: that and something more.

    Random parts, since what is regular may fit by chance; large ones of large groups, since small models run fast. Of
    every layer something stays, and of what may be `counted`. In one of the first two rounds two or more stay of heads,
    and not as many in neighbouring layers: a table of one head, or of as many, fits any other by chance. In the further
    rounds of small models some groups stay whole, and in the last one neighbours, which are often as long, lose
    different numbers of units, so that it shows which number counts which. Those that are `sliced` go from the model
    that is tried alone, the first ones first: with little left in both, all of it would be on one side of where they
    are sliced, and those behind that place could go without a trace. `heavy` models, which take long to run, are tried
    once.
    """
    draw = np.random.default_rng(0)
    units = np.concatenate([np.zeros(0, np.int64), *(g.classes for g in groups.values())])
    is_unit = np.zeros(groups.classes, dtype=bool)
    is_unit[units] = True
    spans = [np.append(x, groups.sources(x)) for x in (*groups.spans(), *counted) if x.all()]
    sustaining = [able for x in spans if len(able := x[is_unit[x]])]
    pairs = []
    shares = [(0.5, 0.9, 1.0), (0.2, 0.8, 1.0)]
    shares += [*[(0.6, 0.5, 0.5)] * 4, BY_TURNS] if groups.units < SMALL_MODEL else []
    shares = shares[: 1 if groups.units > LARGE_MODEL or heavy else None]
    for number, how in enumerate(shares):
        few, many, often = how
        turns: Counter[str] = Counter()
        rank = np.zeros(groups.classes)
        rank[units] = draw.permutation(len(units))
        spared = {int(able[np.argmax(rank[able])]) for able in sustaining}
        fewer, more = {}, {}
        for place, (name, group) in enumerate(groups.items()):
            order = [int(u) for u in np.argsort(rank[group.classes]) if int(group.classes[u]) not in spared]
            order = order if draw.random() < often else []
            first = int(len(order) * (draw.uniform(0, few) if len(order) < SMALL else draw.uniform(many, 0.95)))
            if name in sliced:
                first, order = 0, sorted(order)
            elif heavy and 0 < len(order) < SMALL:
                first = min(max(len(group) - int(draw.integers(*FEW, endpoint=True)), 0), len(order) - 1)
            then = int(draw.integers(first, len(order)) + 1) if order else 0
            if number < 2 and 0 < len(order) < SMALL and len(group) > 2:
                then = min(len(group) - _left(len(group), turns[kind_of(name)] + number, heavy), len(order))
                first = min(first, then - 1)
                turns[kind_of(name)] += 1
            if how is BY_TURNS:
                first, then = 0, place % (len(order) + 1)
            fewer[name], more[name] = order[:first], order[:then]
        pairs.append((fewer, more))
    return pairs


def _left(size: int, turn: int, heavy: bool) -> int:
    """How many of so many units are left, in turns."""
    choices = [left for left in LEFT[: 2 if heavy else None] if left < size]
    choices = choices if len(choices) > 1 else [*choices, 1]
    return choices[turn % len(choices)]

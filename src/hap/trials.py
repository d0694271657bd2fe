"""What a graph does not tell is tried: which groups a forward can do without some of, and which attributes follow."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from hap.groups import Groups, Ints, Length
from hap.plans import draft
from hap.surgery import check_by_running

Removal = tuple[dict[str, list[int]], dict[str, list[int]]]


MOST_CHOICES = 32
"""How many choices of attributes are tried for a kind of group."""


SMALL = 12
"""Of groups with fewer units than this, more is left in trials: one unit of each would be regular again."""
SMALL_MODEL = 100
"""Models with fewer units than this are tried more often: with few units more fits by chance, and they run fast."""


class Trial:
    """Which groups a forward can do without some of. Those that pass through reshapes or splits are suspects.

    A graph does not tell whether `view(n, 64)` was written with a constant, computed, or read from an attribute of the
    module such as `num_heads`; running it does. `candidates` are such attributes, and `found` those that had to follow.
    """

    def __init__(self, model: nn.Module, example: Any, groups: Groups, sized: Ints, candidates: list[Length]):
        self.model, self.example, self.groups, self.candidates = model, example, groups, candidates
        self.removals = _trial_removals(groups, [x.classes for x in candidates])
        self.able = [n for n in groups if self.removals[0][1][n]]
        self.suspects = [n for n in self.able if np.isin(self._reach(n), sized).any()]
        self.rest: list[str] = []
        self.found: list[Length] = []

    def _reach(self, name: str) -> Ints:
        classes = self.groups[name].classes
        return np.concatenate([classes, self.groups.streams(classes)])

    def _spanned(self, name: str) -> bool:
        return not self.groups.spanned.isdisjoint(self._reach(name).tolist())

    def misfits(self) -> list[str]:
        """The groups to freeze. Attributes that have to follow the others are kept in `found`.

        All groups at once, if that works; else those that are not suspects, which are cut short in all later trials, so
        that these run fast. Then one group of each kind of name decides for its kind, and if its kin does not bear that
        out, each is tried by itself.
        """
        for lengths in [[], self.candidates][: 2 if self.candidates else 1]:
            if self._fits(self.able, lengths):
                self.found = self._needed(lengths)
                return []
        rest = [n for n in self.able if n not in self.suspects]
        if self._fits(rest, [], rounds=1):
            self.rest = [n for n in rest if not self._spanned(n)]
        else:
            self.suspects = self.able
        kinds: dict[str, list[Length] | None] = {}
        for name in self.suspects:
            if (kind := _kind_of(name)) not in kinds:
                kinds[kind] = self._needs(name)
        able = {}
        for name in self.suspects:
            if (needed := kinds[_kind_of(name)]) is not None:
                attributes = set(map(_attribute_kind, needed))
                able[name] = [x for x in self._counting(name) if _attribute_kind(x) in attributes]
        for _ in range(2):
            lengths = [x for needed in able.values() for x in needed]
            if able and self._fits(list(able), lengths):
                self.found = lengths
                return [n for n in self.suspects if n not in able]
            able = {n: needed for n, needed in able.items() if self._fits([n], needed, rounds=1)}
        return self.suspects

    def _counting(self, name: str) -> list[Length]:
        return [x for x in self.candidates if np.isin(x.classes, self._reach(name)).any()]

    def _needed(self, lengths: list[Length]) -> list[Length]:
        """Without those that need not follow: a number may equal the length of an axis by chance."""
        for kind in dict.fromkeys(map(_attribute_kind, lengths)):
            fewer = [x for x in lengths if _attribute_kind(x) != kind]
            if self._fits(self.able, fewer):
                lengths = fewer
        return lengths

    def _needs(self, name: str) -> list[Length] | None:
        """The attributes that must follow this group. None: no choice of those that count its units works."""
        counting = self._counting(name)
        names = list(dict.fromkeys(map(_attribute_kind, counting)))
        choices = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))
        for chosen in itertools.islice(choices, MOST_CHOICES):
            needed = [x for x in counting if _attribute_kind(x) in chosen]
            if self._fits([name], needed, rounds=1):
                return needed
        return None

    def _fits(self, names: list[str], lengths: Sequence[Length], rounds: int | None = None) -> bool:
        """Whether the model does without parts of these groups. Those under a norm apart: their values must change."""
        groups = replace(self.groups, lengths=(*self.groups.lengths, *lengths))
        for part in ([n for n in names if not self._spanned(n)], [n for n in names if self._spanned(n)]):
            for pair in self.removals[:rounds] if part else ():
                base, plan = (draft(groups, {n: removed[n] for n in part + self.rest}) for removed in pair)
                try:
                    check_by_running(self.model, plan, {}, self.example, base)
                except Exception:  # a forward that gets other sizes than it counted on may raise anything
                    return False
        return True


def _kind_of(name: str) -> str:
    """Names that differ in their numbers alone, such as those of repeated blocks, are of one kind."""
    return re.sub(r"\d+", "#", name)


def _attribute_kind(length: Length) -> tuple[str, str, int, int]:
    return _kind_of(length.module), length.attribute, length.entry, length.axis


def _trial_removals(groups: Groups, counted: list[Ints]) -> list[Removal]:
    """What goes from the model that a trial compares with, and from the one that it tries: that and something more.

    Random parts, since what is regular may fit by chance; large ones of large groups, since small models run fast. Of
    every layer something stays, and of what may be `counted`. In the further rounds of small models some groups stay
    whole, so that it shows which number counts which.
    """
    draw = np.random.default_rng(0)
    units = np.concatenate([np.zeros(0, np.int64), *(g.classes for g in groups.values())])
    pairs = []
    rounds = [(0.5, 0.9, 1.0), (0.2, 0.8, 1.0)]
    rounds += [(0.6, 0.5, 0.5)] * 4 if groups.units < SMALL_MODEL else []
    for few, many, often in rounds:
        rank = np.zeros(groups.classes)
        rank[units] = draw.permutation(len(units))
        spared = set()
        for classes in (*groups.spans(), *counted):
            if (classes != 0).all() and len(able := units[groups.sustaining(units, classes)]):
                spared.add(int(able[np.argmax(rank[able])]))
        fewer, more = {}, {}
        for name, group in groups.items():
            order = [int(u) for u in np.argsort(rank[group.classes]) if int(group.classes[u]) not in spared]
            order = order if draw.random() < often else []
            first = int(len(order) * (draw.uniform(0, few) if len(order) < SMALL else draw.uniform(many, 0.95)))
            fewer[name] = order[:first]
            more[name] = order[: int(draw.integers(first, len(order)) + 1) if order else 0]
        pairs.append((fewer, more))
    return pairs

"""What a graph does not tell is tried: which groups a forward can do without some of, and which attributes follow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from hap.errors import HapError
from hap.groups import Groups, Ints, Length
from hap.plans import draft
from hap.surgery import check_by_running


class Trial:
    """Which groups a forward can do without some of: those that pass through reshapes or splits are tried.

    A graph does not tell whether `view(n, 64)` was written with a constant, computed, or read from an attribute of the
    module such as `num_heads`; running it does. `candidates` are such attributes, and `found` those that had to follow.
    """

    def __init__(self, model: nn.Module, example: Any, groups: Groups, sized: Ints, candidates: list[Length]):
        self.model, self.example, self.groups, self.candidates = model, example, groups, candidates
        self.suspects = [n for n, g in groups.items() if len(g) > 1 and np.isin(self._reach(n), sized).any()]
        self.removals = _trial_removals({n: len(groups[n]) for n in self.suspects})
        self.found: list[Length] = []

    def _reach(self, name: str) -> Ints:
        classes = self.groups[name].classes
        return np.concatenate([classes, self.groups.streams(classes)])

    def misfits(self) -> list[str]:
        """The groups to freeze. Attributes that have to follow the others are kept in `found`.

        All at once, if that works; else one group of each kind of name decides for its kind, and if its kin does not
        bear that out, each is tried by itself.
        """
        if not self.suspects or self._fits(self.suspects):
            return []
        if self.candidates and self._fits(self.suspects, self.candidates):
            self.found = self.candidates
            return []
        kinds: dict[str, list[Length] | None] = {}
        for name in self.suspects:
            if (kind := _kind_of(name)) not in kinds:
                kinds[kind] = self._needs(name)
        able = {}
        for name in self.suspects:
            if (needed := kinds[_kind_of(name)]) is not None:
                attributes = {x.attribute for x in needed}
                able[name] = [x for x in self._counting(name) if x.attribute in attributes]
        for _ in range(2):
            lengths = [x for needed in able.values() for x in needed]
            if able and self._fits(list(able), lengths):
                self.found = lengths
                return [n for n in self.suspects if n not in able]
            able = {n: needed for n, needed in able.items() if self._fits([n], needed)}
        return self.suspects

    def _counting(self, name: str) -> list[Length]:
        return [x for x in self.candidates if np.isin(x.classes, self._reach(name)).any()]

    def _needs(self, name: str) -> list[Length] | None:
        """The attributes that must follow this group: none, all that count its units, or one of them. None: no way."""
        counting = self._counting(name)
        for choice in [[], counting, *([x] for x in counting if len(counting) > 1)]:
            if self._fits([name], choice):
                return choice
        return None

    def _fits(self, names: list[str], lengths: Sequence[Length] = ()) -> bool:
        """Whether the model does without parts of these groups. Those under a norm apart: their values must change."""
        groups = replace(self.groups, lengths=(*self.groups.lengths, *lengths))
        spanned = [n for n in names if not self.groups.spanned.isdisjoint(self._reach(n).tolist())]
        try:
            for part in ([n for n in names if n not in spanned], spanned):
                for removed in self.removals if part else ():
                    check_by_running(self.model, draft(groups, {n: removed[n] for n in part}), {}, self.example)
        except HapError:
            return False
        return True


def _kind_of(name: str) -> str:
    """Names that differ in their numbers alone, such as those of repeated blocks, are of one kind."""
    return re.sub(r"\d+", "#", name)


def _trial_removals(sizes: dict[str, int]) -> list[dict[str, list[int]]]:
    """A random part of each group, since what is regular may fit by chance; what that leaves; and one unit of each."""
    draw = np.random.default_rng(0)
    order = {n: draw.permutation(size).tolist() for n, size in sizes.items()}
    parts = {n: int(draw.integers(1, size)) for n, size in sizes.items()}
    ends = [
        {n: slice(parts[n]) for n in sizes},
        {n: slice(parts[n], None) for n in sizes},
        {n: slice(1) for n in sizes},
    ]
    return [{n: order[n][end[n]] for n in sizes} for end in ends]

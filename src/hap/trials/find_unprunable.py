"""Find what a model does not run without: which groups have to stay, and which attributes must follow the others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hap.graph.capture import exporting
from hap.graph.partition import touched
from hap.groups.transformer_blocks import heads
from hap.groups.types import SizeAttribute
from hap.trials.find_size_attributes import SizeAttributeSearch, attribute_kind
from hap.trials.removal_rounds import kind_of
from hap.trials.repeated_blocks import NONE
from hap.trials.run_round import RoundRunner, Subject, reasons
from hap.verification.indistinguishable_heads import Rows, indistinguishable_heads

Found = tuple[list[str], list[SizeAttribute]]
"""Groups that do not fit, and the attributes that must follow all others."""

MOST_ATTEMPTS = 4
"""How often groups around a module that fails are left out before groups are tried kind by kind."""
WEIGHT_SCALES = (1.0, 1e3)
"""How many times larger the weights of heads get, one after the other, until an example tells heads apart."""


@dataclass(frozen=True)
class TrialResult:
    """What trials found: the groups that cannot lose units, each with the reason, and the attributes that must follow.

    `indistinguishable` are further groups of heads, which any split into heads would fit on this example. `ran` says
    whether the model ran at all without something.
    """

    unprunable: dict[str, str]
    followers: tuple[SizeAttribute, ...] = ()
    indistinguishable: tuple[str, ...] = ()
    ran: bool = False


def find_unprunable(subject: Subject, among: Sequence[str] | None = None) -> TrialResult:
    """Remove parts of all groups from copies of a model, run these, and find which groups do not fit.

    What an untrained model hands on may come to so little that attention looks at all alike: heads that cannot be told
    apart are tried again with larger weights. If only these groups are `among` those in question, all others are known
    to fit, and no attributes and heads are looked for.
    """
    with_units = [name for (name, _), classes in subject.groups.axes.items() if classes.any()]
    model, example = touched(subject.model, subject.example, with_units)
    subject = replace(subject, model=model, example=example)
    vague: list[str] = []
    with ExitStack() as stack:
        for scale in WEIGHT_SCALES:
            scaled = replace(subject, weight_scales=dict.fromkeys(vague, scale))
            search, found = _including_repeats(Search(scaled, stack), among)
            misfits, followers = search.with_repeats(*found)
            vague = [] if among is not None else search.indistinguishable(misfits)
            vague += [n for n in misfits if n in scaled.weight_scales]
            if not vague:
                break
        why = reasons(search.runner, [n for n in misfits if n not in vague])
        return TrialResult(why, tuple(followers), tuple(vague), search.runner.last_fit is not None)


def _including_repeats(search: Search, among: Sequence[str] | None) -> tuple[Search, Found]:
    """What was found, unless one run of all blocks does not bear it out: then what is found with all of them.

    Blocks that look alike may act differently once they are cut, where their attributes differ or other modules read
    them. Otherwise the run of all blocks is left to the check of apply_. A result does not count where a block that was
    passed over was needed after all.
    """
    found, reads = search.find(among), search.runner.reads
    if not search.repeats.unlike and not reads.looked_into(search.repeats.blocks):
        return search, found
    every = Search(replace(search.subject, repeats=NONE), search.stack)
    misfits, followers = search.with_repeats(*found)
    if not reads.missed and every.fits([n for n in every.able if n not in misfits], followers, rounds=1):
        return search, found
    return every, every.find(among)


class Search:
    """Looks for the groups that a model does not do without parts of, and for the attributes that must follow.

    `able` are the groups that rounds take something of, and `suspects` those among them that pass through reshapes or
    splits. What is `settled` loses units in all later rounds, so that these run fast, and its attributes follow.
    """

    def __init__(self, subject: Subject, stack: ExitStack):
        self.subject, self.repeats, self.stack = subject, subject.repeats, stack
        self.runner = RoundRunner(subject)
        stack.callback(self.runner.reads.end)
        self.groups, self.attributes = self.runner.groups, SizeAttributeSearch(self.runner, self.fits)
        self.able = [n for n in self.groups if self.runner.rounds[0].tried[n]]
        self.suspects = [n for n in self.able if np.isin(self.runner.reach[n], subject.sized).any()]
        self.settled: list[str] = []
        self.settled_followers: list[SizeAttribute] = []
        self.failed: str | None = None

    # ---- the search -----------------------------------------------------------------------------------------

    def find(self, among: Sequence[str] | None = None) -> Found:
        """The groups that do not fit and the attributes that must follow."""
        if among is not None:
            return self._find_among(among), []
        misfits, followers = self._find()
        if not self.runner.asked.heard:
            return misfits, followers
        self.settled, self.settled_followers = [], []
        able = [n for n in self.able if n not in misfits]
        return misfits, [*followers, *self.attributes.needed_in_export(able, followers, self.fits_in_export)]

    def _find(self) -> Found:
        """As many groups at once as work; the others kind by kind; and if that does not work for all, by halves."""
        together, followers = self._fit_together()
        doubtful = [n for n in self.able if n not in together]
        if doubtful and not together:
            together = [n for n in self.able if n not in self.suspects]
            together = together if self.fits(together, [], rounds=1) else []
            doubtful = [n for n in self.able if n not in together]
        self._settle(together, followers)
        able = self._fit_by_kind(doubtful)
        for _ in range(2 if able else 0):
            every = [*followers, *itertools.chain(*able.values())]
            if self.fits([*together, *able], every):
                return [n for n in doubtful if n not in able], every
            self.settled, self.settled_followers = [], []
            self._settle(together, followers)
            able = self._fit_by_halves(able)
        return doubtful, followers

    def _find_among(self, names: Sequence[str]) -> list[str]:
        """Those of these groups that do not fit. All others are known to fit."""
        self._settle([n for n in self.able if n not in names], [])
        able = [n for n in names if n in self.able]
        if not self.fits(able, [], rounds=1):
            able = [*self._fit_by_halves({n: [] for n in able})]
            able = able if self.fits(able, []) else []
        return [n for n in names if n in self.able and n not in able]

    def with_repeats(self, misfits: list[str], followers: list[SizeAttribute]) -> Found:
        """These groups and attributes, and those that repeat them."""
        known = {(x.module, *attribute_kind(x)[1:]) for x in followers}
        pairs = [(x, self.repeats.original(x.module)) for x in self.subject.attributes]
        others = [x for x, original in pairs if (original, *attribute_kind(x)[1:]) in known]
        return self._groups_with_repeats(misfits), [*followers, *others]

    def _groups_with_repeats(self, names: list[str]) -> list[str]:
        return [*names, *(n for n in self.subject.groups if self.repeats.original(n) in names)]

    # ---- who is to blame ------------------------------------------------------------------------------------

    def _fit_together(self) -> Found:
        """Groups that can lose units all at once, without those around modules that fail, and what follows them."""
        able = self.able
        for attempt in range(MOST_ATTEMPTS if able else 0):
            counting = self.attributes.counting(*able)
            if (needed := self.attributes.fewest(able, counting)) is not None:
                return able, needed
            failed = self.failed
            if counting and attempt == 0 and self.fits(able, []):
                return able, []
            kinds = {kind_of(n) for n in able if self._is_around(failed, n)}
            fewer = [n for n in able if kind_of(n) not in kinds]
            if not fewer or len(fewer) == len(able):
                break
            able = fewer
        return [], []

    def _fit_by_kind(self, names: list[str]) -> dict[str, list[SizeAttribute]]:
        """Those of these groups that fit, with the attributes that follow each. They are settled.

        One decides for all of its kind; if it does not fit, the others are tried without it.
        """
        able: dict[str, list[SizeAttribute]] = {}
        for kin in self._kinds(names):
            if (needed := self.attributes.needed_by(kin[0])) is not None:
                kinds = set(map(attribute_kind, needed))
                found = {n: [x for x in self.attributes.counting(n) if attribute_kind(x) in kinds] for n in kin}
                able |= found
                followers = [*itertools.chain(*found.values())]
                if len(kin) == 1 or self.fits(kin, followers, rounds=1):
                    self._settle(kin, followers)
            elif (others := kin[1:]) and self.fits(others, [], rounds=1):
                able |= {n: [] for n in others}
                self._settle(others, [])
        return able

    def _fit_by_halves(self, able: dict[str, list[SizeAttribute]]) -> dict[str, list[SizeAttribute]]:
        """Those of these groups that fit: all of them, or else what does of those to blame and of the others."""
        if not able or self.fits([*able], [*itertools.chain(*able.values())], rounds=1):
            return able
        blamed = [n for n in able if self._is_around(self.failed, n)]
        if not 0 < len(blamed) < len(able):
            blamed = [*able][: len(able) // 2]
        parts = ({n: x for n, x in able.items() if (n in blamed) == side} for side in (True, False))
        return {n: x for part in parts for n, x in self._fit_by_halves(part).items()} if len(able) > 1 else {}

    def _is_around(self, module: str | None, name: str) -> bool:
        """Whether a module computes or reads units of this group."""
        group = self.groups[name]
        weights = [p.weight for p in group.producers] + [weight for weight, _ in group.consumers]
        return module is not None and any(w.startswith(f"{module}.") for w in weights)

    def _kinds(self, names: list[str]) -> list[list[str]]:
        """Groups by kind, those that few attributes count first. Heads are another kind than the rows of one head."""
        kinds: dict[tuple[str, bool], list[str]] = {}
        for name in names:
            first = self.groups[name].producers[0]
            whole = len(self.groups.axes[first.weight, first.dim]) == len(self.groups[name])
            kinds.setdefault((kind_of(name), whole), []).append(name)
        return sorted(kinds.values(), key=lambda kin: len(self.attributes.counting(kin[0])))

    # ---- running --------------------------------------------------------------------------------------------

    def fits(self, names: list[str], followers: Sequence[SizeAttribute], rounds: int | None = None) -> bool:
        """Whether the model does without parts of these groups, and of what is settled, in the first rounds or all."""
        every = {id(x): x for x in (*self.settled_followers, *followers)}
        cut = [*dict.fromkeys([*names, *self.settled])]
        for number in range(len(self.runner.rounds[:rounds]) if names else 0):
            end = self.runner.end(number, cut, every)
            if not end.fits:
                self.failed = end.failed
                return False
        return True

    def fits_in_export(self, names: list[str], followers: list[SizeAttribute]) -> bool:
        """Whether one round fits while torch says that it exports: the result is to be what it is otherwise."""
        with exporting():
            return self.runner.run(0, names, {id(x): x for x in followers}).fits

    def _settle(self, names: list[str], followers: list[SizeAttribute]) -> None:
        self.settled += names
        self.settled_followers += followers

    # ---- heads ----------------------------------------------------------------------------------------------

    def indistinguishable(self, misfits: Sequence[str]) -> list[str]:
        """The groups of heads, besides these, that the example tells too little of: any split into heads would fit."""
        names = [n for n in heads(self.groups) if n in self.able and n not in misfits]
        names = [n for n in names if not self.runner.among(self.groups.traits.zero_padded, n)]
        comparison = self.runner.last_fit
        if comparison is None or not names:
            return []
        kept = {(cut.name, cut.dim): np.array(cut.keep) for cut in comparison.plan.cuts}
        rows = {n: self._rows(n, kept) for n in names}
        found = indistinguishable_heads(
            comparison.pruned(), comparison.example, rows, steady=not self.subject.weight_scales
        )
        return self._groups_with_repeats(found)

    def _rows(self, name: str, kept: Mapping[tuple[str, int], Any]) -> list[Rows]:
        """What computes or reads units of a group, in a model that has this left of its weights."""
        group = self.groups[name]
        found = []
        for weight, dim in [*((p.weight, p.dim) for p in group.producers), *group.consumers]:
            classes = self.groups.axes[weight, dim]
            own = np.isin(classes[kept.get((weight, dim), slice(None))], group.classes)
            found.append((weight, dim, torch.from_numpy(np.flatnonzero(own))))
        return found

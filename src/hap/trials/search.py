"""What a graph does not tell is tried: which groups a forward can do without some of, and which attributes follow."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.calling import draws_random_numbers
from hap.execution.compare_outputs import difference, in_float64, output_tensors
from hap.execution.fast_copy import copy_with
from hap.graph.capture import Asked, exporting, modules_in
from hap.graph.partition import touched
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import heads
from hap.groups.types import Ints, SizeAttribute
from hap.planning.assemble import draft
from hap.planning.cost import CostModel
from hap.planning.plan import Plan
from hap.trials.attribute_reads import Reads
from hap.trials.removal_rounds import kind_of, rounds_of
from hap.trials.repeated_blocks import NONE, Repeats, without_repeats
from hap.verification.indistinguishable_heads import Rows, indistinguishable_heads
from hap.verification.informative_weights import informative_weights
from hap.verification.verify import COUNTED, UNLIKE, Listener, Misfit, check_by_running, in_a_line

Key = tuple[int, frozenset[str], frozenset[int]]
"""A round, the groups that lose units in it, and the attributes, by id, that follow those of them that are spanned."""


AttributeKind = tuple[str, str, int, int]
"""The name of a module without its numbers, and which attribute, entry and axis."""


NOTHING: Ints = np.zeros(0, np.int64)


MOST_CHOICES = 32
"""How many choices of attributes are tried for a kind of group."""


MOST_BLAMED = 4
"""How often modules that fail are left out before groups are tried kind by kind."""


LOUDNESS = (1.0, 1e3)
"""How many times larger the weights of heads get, one after the other, until an example tells heads apart."""


GROSS = 0.1
"""Outputs that differ by more than this, relative to the largest, are not run again in float64 to tell why."""


MOST_SAID = 120
"""How many characters of an exception are told."""


HEAVY_MODEL = 60_000_000
"""Models whose layers write more values than this are tried once too, if they have more than so many units:"""
HEAVY_UNITS = 1_000


@dataclass(frozen=True)
class End:
    """How a round of a trial ended: whether the model did without, and else what failed, why, and what was seen.

    Attributes, by their ids, that `followed`, and those that were `read` till then. With others that were not read it
    would have ended just so.
    """

    followed: frozenset[int]
    read: frozenset[int]
    fits: bool
    failed: str | None
    why: tuple[str, str] | None


class Trial:
    """Which groups a forward can do without some of. Those that pass through reshapes or splits are suspects.

    A graph does not tell whether `view(n, 64)` was written with a constant, computed, or read from an attribute of the
    module such as `num_heads`; running it does. `candidates` are such attributes, and `found` those that had to follow.
    The weights of groups that are `loud` are tried that many times larger. What a trial `before` found is tried first.
    """

    def __init__(
        self, model: nn.Module, example: Any, groups: Groups, sized: Ints, candidates: list[SizeAttribute],
        repeats: Repeats = NONE, sliced: Ints = NOTHING, loud: Mapping[str, float] = MappingProxyType({}),
        before: Trial | None = None,
    ):  # fmt: skip
        model, example = touched(model, example, [name for (name, _), classes in groups.axes.items() if classes.any()])
        self.example, self.groups = (
            example,
            replace(without_repeats(groups, repeats), unprunable={}),
        )  # nobody reads its plans
        self.whole = partial(Trial, model, example, groups, sized, candidates, sliced=sliced, loud=loud)
        self.repeats, self.attributes, self.before = repeats, candidates, before
        self.cost = CostModel(self.groups)
        self.further: list[Trial] = []
        self.reaches: dict[str, Ints] = {}
        self.reads: Reads | None = None
        self.watched: set[str] = set()
        asked = [x for i, x in enumerate(candidates) if i not in repeats.lengths]
        self.candidates = [x for x in asked if not _follows_anyway(model.get_submodule(x.module), x.attribute)]
        self.model, self.loud = self._prepared(model, loud), bool(loud)
        sliced_groups = {n for n in self.groups if np.isin(self._reach(n), sliced).any()}
        self.heavy = self._heavy()
        self.removals = rounds_of(self.groups, [x.classes for x in self.candidates], sliced_groups, self.heavy)
        self.able = [n for n in self.groups if self.removals[0][1][n]]
        self.suspects = [n for n in self.able if np.isin(self._reach(n), sized).any()]
        self.rest: list[str] = []
        self.rest_lengths: list[SizeAttribute] = []
        self.found: list[SizeAttribute] = []
        self.wanted: dict[Key, list[Any]] = {}
        self.spread: set[Key] = set()
        self.asked = Asked()
        self.ends: dict[tuple[int, frozenset[str]], list[End]] = {}
        self.failed: str | None = None
        self.pruned: tuple[nn.Module, Plan, Any] | None = None
        self.instead: Trial | None = None
        self.outcome: tuple[list[str], list[SizeAttribute]] | None = None
        self.agrees = False
        self.ran = False

    def _heavy(self) -> bool:
        everything = self.groups.all_kept()
        written = self.cost(everything, np.zeros_like(everything)).activations
        return written > HEAVY_MODEL and self.groups.units > HEAVY_UNITS

    def _prepared(self, model: nn.Module, loud: Mapping[str, float]) -> nn.Module:
        """The model that is tried: without the blocks that repeat others, and with watched attributes.

        One that cannot be copied is left as it is: every trial of it fails on that again.
        """
        try:
            model = _telling(model, self.groups, loud)
            made = copy_with(model, {}) if self.repeats.blocks or self.candidates else model
            if made is not model:
                self._watch(made, Reads(made))
            return made
        except Exception:  # copying runs code of whatever the model holds
            self.reads, self.watched = None, set()
            return model

    def _watch(self, model: nn.Module, reads: Reads) -> None:
        """Note which candidates are read, and whether anything looks into the blocks that are left out.

        Of modules that get a new class when they are pruned, it does not show.
        """
        self.reads = reads
        modules = {x.module: model.get_submodule(x.module) for x in self.candidates}
        able = {n: m for n, m in modules.items() if not isinstance(m, nn.MultiheadAttention)}
        self.watched = {n for n, m in able.items() if reads.watch_(m, n)}
        for name in self.repeats.blocks:
            if not reads.watch_(model.get_submodule(name), name, passing=True):
                raise HapError(f"{name} cannot be left out")

    def close(self) -> None:
        """No more questions."""
        for trial in (self, *self.further):
            if trial.reads is not None:
                trial.reads.end()

    def _reach(self, name: str) -> Ints:
        if name not in self.reaches:
            classes = self.groups[name].classes
            self.reaches[name] = np.concatenate([classes, self.groups.streams(classes)])
        return self.reaches[name]

    def _spanned(self, name: str) -> bool:
        return not self.groups.traits.spanned.isdisjoint(self._reach(name).tolist())

    def _padded(self, name: str) -> bool:
        return not self.groups.traits.zero_padded.isdisjoint(self._reach(name).tolist())

    def misfits(self) -> list[str]:
        """The groups to freeze. Attributes that have to follow the others are kept in `found`."""
        misfits = self._misfits()
        self.outcome = misfits, list(self.found)
        self.found += self._following_in_export(misfits)
        misfits = self.repeats.like(misfits)
        self.found = self.repeats.lengths_like(self.found, self.attributes)
        if (whole := self._contrary(misfits)) is not None:
            misfits, self.found, self.ran = whole.misfits(), whole.found, whole.ran
            self.instead = whole
        return misfits

    def reasons(self, misfits: Sequence[str]) -> dict[str, str]:
        """Why these groups do not fit: what came of it where one of them, or one of its kind, lost units by itself."""
        if self.instead is not None:
            return self.instead.reasons(misfits)
        if self.agrees and self.before is not None:
            return self.before.reasons(misfits)
        told: dict[str, tuple[str, str]] = {}
        for (_, cut), ends in self.ends.items():
            alone = cut.intersection(misfits)
            if len(alone) == 1:
                last = sorted(ends, key=_how_far)
                told |= {name: end.why for end in last for name in alone if end.why is not None}
        kin = {kind_of(n): n for n in reversed(misfits) if n in told}
        tried = {n: n if n in told else kin.get(kind_of(n)) for n in misfits}
        chance = self._chance() if any(why == UNLIKE for why, _ in told.values()) else ""
        return {n: COUNTED if one is None else _reason(*told[one], one if one != n else "", chance)
                for n, one in tried.items()}  # fmt: skip

    def _chance(self) -> str:
        """What there is to say of models of which two runs differ by themselves, and of all others."""
        try:
            if draws_random_numbers(self.model, self.example):
                return "its forward draws at random"
            if (
                difference(output_tensors(self.model, self.example), output_tensors(self.model, self.example))
                is not None
            ):
                return "two runs of the model itself differ too"
        except Exception:  # it ran before, but whoever does not return the same twice may also fail
            return "the model itself does not always run"
        return "it counts on its size, or a rule is wrong"

    def _contrary(self, misfits: list[str]) -> Trial | None:
        """A trial of all blocks, if one run of them does not bear out what was found without those that repeat others.

        Blocks that look alike may still differ in what they do with other sizes, unless all their attributes are equal;
        and others may look into them. Where neither is so, that run is left to the check of apply_, which runs all
        blocks anyway and refuses what does not fit. What was found while a block was missed says nothing.
        """
        whole = self.whole() if self.repeats.unlike or (self.repeats.blocks and self._looked_into()) else None
        self.further += [whole] if whole is not None else []
        if self.reads is not None and self.reads.missed:
            return whole
        fits = whole is None or whole._fits([n for n in whole.able if n not in misfits], self.found, rounds=1)
        return None if fits else whole

    def _looked_into(self) -> bool:
        """Whether anything was read of blocks that are left out, as far as is known."""
        return self.reads is None or any(module in self.repeats.blocks for module, _ in self.reads.names)

    def _misfits(self) -> list[str]:
        """Those among the groups that are tried.

        As many groups at once as work. Of the others, one of each kind of name decides for its kind, and if its kin do
        not bear that out, each is tried by itself. What works is cut short in all later trials, so that these run fast.
        """
        if (misfits := self._as_before()) is not None:
            return misfits
        together, self.found = self._together()
        doubtful = [n for n in self.able if n not in together]
        if doubtful and not together:
            together = [n for n in self.able if n not in self.suspects]
            together = together if self._fits(together, [], rounds=1) else []
            doubtful = [n for n in self.able if n not in together]
        self._cut_short(together, self.found)
        able: dict[str, list[SizeAttribute]] = {}
        for kin in self._kinds(doubtful):
            if (needed := self._needs(kin[0])) is not None:
                attributes = set(map(_attribute_kind, needed))
                able |= {n: [x for x in self._counting(n) if _attribute_kind(x) in attributes] for n in kin}
                lengths = [x for n in kin for x in able[n]]
                if len(kin) == 1 or self._fits(kin, lengths, rounds=1):
                    self._cut_short(kin, lengths)
            elif (others := kin[1:]) and self._fits(others, [], rounds=1):  # what is named alike need not be alike
                able |= {n: [] for n in others}
                self._cut_short(others, [])
        for _ in range(2 if able else 0):
            lengths = [*self.found, *(x for needed in able.values() for x in needed)]
            if self._fits([*together, *able], lengths):
                self.found = lengths
                return [n for n in doubtful if n not in able]
            self.rest, self.rest_lengths = [], []
            self._cut_short(together, self.found)
            able = self._fitting(able)
        return doubtful

    def _as_before(self) -> list[str] | None:
        """The misfits of the trial before, if what it found holds here too; `found` is then as it was there."""
        if self.before is None or self.before.outcome is None or self.before.instead is not None:
            return None
        misfits, found = self.before.outcome
        able = [n for n in self.able if n not in misfits]
        if not able or not self._fits(able, found):
            return None
        self.found, self.agrees = list(found), True
        return misfits

    def untold(self, misfits: Sequence[str]) -> list[str]:
        """The groups of heads, besides these, that the example tells too little of: any split into heads would fit."""
        if self.instead is not None:
            return self.instead.untold(misfits)
        names = [n for n in heads(self.groups) if n in self.able and n not in misfits and not self._padded(n)]
        if self.pruned is None or not names:
            return []
        pruned, plan, example = self.pruned
        kept = {(cut.name, cut.dim): np.array(cut.keep) for cut in plan.cuts}
        rows = {n: self._rows(n, kept) for n in names}
        return self.repeats.like(indistinguishable_heads(pruned, example, rows, steady=not self.loud))

    def _rows(self, name: str, kept: Mapping[tuple[str, int], Ints]) -> list[Rows]:
        """What computes or reads units of a group, in a model that has this left of its weights."""
        group = self.groups[name]
        axes = [(p.weight, p.dim) for p in group.producers] + [*group.consumers]
        found = []
        for weight, dim in axes:
            classes = self.groups.axes[weight, dim]
            own = np.isin(classes[kept.get((weight, dim), slice(None))], group.classes)
            found.append((weight, dim, torch.from_numpy(np.flatnonzero(own))))
        return found

    def _following_in_export(self, misfits: list[str]) -> list[SizeAttribute]:
        """Further attributes that have to follow where the model is exported.

        A forward may go another way then, such as with a mask written out. That is the way the graph shows, and one
        that other inputs may take too. Nothing follows if no choice of attributes works both ways, or the model never
        asked whether it is exported.
        """
        if not self.asked.heard:
            return []
        self.rest, self.rest_lengths = [], []
        able = [n for n in self.able if n not in misfits]
        reach = np.concatenate([NOTHING, *(self._reach(n) for n in able)])
        known = {id(x) for x in self.found}
        left = [x for x in self.candidates if id(x) not in known and np.isin(x.classes, reach).any()]
        for kinds in _choices(left) if left else ():
            more = [x for x in left if _attribute_kind(x) in kinds]
            lengths = [*self.found, *more]
            if self._fits_in_export(able, lengths) and (not more or self._fits(able, lengths)):
                return more
        return []

    def _fits_in_export(self, names: list[str], lengths: list[SizeAttribute]) -> bool:
        """Whether one round fits while torch says that it exports: the result is to be what it is otherwise."""
        with exporting():
            return self._end(0, names, {id(x): x for x in lengths}).fits

    def unfit(self, names: Sequence[str]) -> list[str]:
        """Which of these groups the model does not do without parts of. All others are known to fit and cut short."""
        self._cut_short([n for n in self.able if n not in names], [])
        able = [n for n in names if n in self.able]
        if not self._fits(able, [], rounds=1):
            able = [*self._fitting({n: [] for n in able})]
            able = able if self._fits(able, []) else []
        unfit = self.repeats.like(n for n in names if n in self.able and n not in able)
        self.instead = self._contrary(unfit)
        return self.instead.unfit(names) if self.instead is not None else unfit

    def _fitting(self, able: dict[str, list[SizeAttribute]]) -> dict[str, list[SizeAttribute]]:
        """Those of these groups that fit: all of them, or else what does of those to blame and of the others."""
        if not able or self._fits([*able], [x for needed in able.values() for x in needed], rounds=1):
            return able
        blamed = [n for n in able if self._blamed(n)]
        if not 0 < len(blamed) < len(able):
            blamed = [*able][: len(able) // 2]
        parts = ({n: x for n, x in able.items() if (n in blamed) == side} for side in (True, False))
        return {n: x for part in parts for n, x in self._fitting(part).items()} if len(able) > 1 else {}

    def _together(self) -> tuple[list[str], list[SizeAttribute]]:
        """Groups that can lose units all at once, and the attributes that follow them.

        Where a module fails, the groups that it computes or reads are left out, and all of their kind. None, if that
        does not lead anywhere.
        """
        able = self.able
        for attempt in range(MOST_BLAMED if able else 0):
            reach = np.concatenate([self._reach(n) for n in able])
            counting = [x for x in self.candidates if np.isin(x.classes, reach).any()]
            if (needed := self._needed(able, counting)) is not None:
                return able, needed
            failed = self.failed
            if counting and attempt == 0 and self._fits(able, []):
                return able, []
            self.failed = failed
            kinds = {kind_of(n) for n in able if self._blamed(n)}
            fewer = [n for n in able if kind_of(n) not in kinds]
            if not fewer or len(fewer) == len(able):
                break
            able = fewer
        return [], []

    def _blamed(self, name: str) -> bool:
        """Whether the module that failed last computes or reads units of this group."""
        group = self.groups[name]
        weights = [p.weight for p in group.producers] + [weight for weight, _ in group.consumers]
        return self.failed is not None and any(w.startswith(f"{self.failed}.") for w in weights)

    def _kinds(self, names: list[str]) -> list[list[str]]:
        """Groups by kind, those that few attributes count first. Heads are another kind than the rows of one head."""
        kinds: dict[tuple[str, bool], list[str]] = {}
        for name in names:
            first = self.groups[name].producers[0]
            whole = len(self.groups.axes[first.weight, first.dim]) == len(self.groups[name])
            kinds.setdefault((kind_of(name), whole), []).append(name)
        return sorted(kinds.values(), key=lambda kin: len(self._counting(kin[0])))

    def _be_precise(self, outputs: list[Any]) -> None:
        """Go on in float64 if it took that to tell rounding from a real difference."""
        doubles = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in outputs)
        if doubles and all(p.dtype == torch.float32 for p in self.model.parameters()):
            self.model, self.example = in_float64(self.model, self.example)

    def _cut_short(self, names: list[str], lengths: list[SizeAttribute]) -> None:
        """In all later trials."""
        self.rest += names
        self.rest_lengths += lengths

    def _counting(self, name: str) -> list[SizeAttribute]:
        return [x for x in self.candidates if np.isin(x.classes, self._reach(name)).any()]

    def _needed(self, names: list[str], lengths: list[SizeAttribute]) -> list[SizeAttribute] | None:
        """Without those that need not follow: a number may equal the length of an axis by chance. None: nothing fits.

        One round shows that, unless all of them together do not bear it out.
        """
        for rounds in (1, None):
            if not self._fits(names, lengths, rounds):
                return None
            needed, spare = lengths, list(dict.fromkeys(map(_attribute_kind, lengths)))
            for kinds in (spare, *({kind} for kind in spare if len(spare) > 1)):  # all at once, or one by one
                fewer = [x for x in needed if _attribute_kind(x) not in kinds]
                if len(fewer) < len(needed) and self._fits(names, fewer, rounds):
                    needed = fewer
            if self._fits(names, needed):
                return needed
        return None

    def _needs(self, name: str) -> list[SizeAttribute] | None:
        """The attributes that must follow this group. None: no choice of those that count its units works."""
        counting = self._counting(name)
        for chosen in _choices(counting):
            needed = [x for x in counting if _attribute_kind(x) in chosen]
            if self._fits([name], needed, rounds=1):
                return needed
        return None

    def _fits(self, names: list[str], lengths: Sequence[SizeAttribute], rounds: int | None = None) -> bool:
        """Whether the model does without parts of these groups. No round is run if it is known how it would end."""
        following = {id(x): x for x in (*self.rest_lengths, *lengths)}
        cut = [*dict.fromkeys([*names, *self.rest])]
        for number in range(len(self.removals[:rounds]) if names else 0):
            known = self.ends.setdefault((number, frozenset(cut)), [])
            end = next((e for e in known if e.followed & e.read == following.keys() & e.read), None)
            if end is None:
                known.append(end := self._end(number, cut, following))
            if not end.fits:
                self.failed = end.failed
                return False
        return True

    def _end(self, number: int, cut: list[str], following: dict[int, SizeAttribute]) -> End:
        """How a round ends in which these groups lose units and these attributes, by id, follow.

        What a norm spans changes values, so as much of it goes from both models that are compared. That these run with
        other parts of it, and return tensors of the same shapes, is tried by itself.
        """
        groups = self.groups.with_rewiring(size_attributes=following.values())
        drafted = partial(draft, groups, cost=self.cost)
        spanned = {n for n in cut if self._spanned(n)}
        reach = np.concatenate([NOTHING, *(self._reach(n) for n in spanned)])
        fewer, more = self.removals[number]
        # whatever attributes follow, the result is to be the same: unless they follow what is spanned
        key = (number, frozenset(cut), frozenset(i for i, x in following.items() if np.isin(x.classes, reach).any()))
        base, plan, other = ({n: (spread if n in spanned else side)[n] for n in cut}
                             for side, spread in ((fewer, more), (more, more), (more, fewer)))  # fmt: skip
        fits, failed, why = True, None, None
        copies: list[nn.Module] = []
        if self.reads is not None:
            self.reads.forget(self.watched)
        try:
            tried = replace(drafted(plan), exact=True)
            self.wanted[key] = self._run(tried, drafted(base), self.wanted.get(key), copies.append)
            if spanned and key not in self.spread:
                self._run(replace(drafted(other), exact=False), None, self.wanted[key])
                self.spread.add(key)
        except Exception as error:  # a forward that gets other sizes than it counted on may raise anything
            fits, failed, why = False, _failing_module(error), _why(error)
        else:
            self.ran = True
            self.pruned = copies[0], tried, self.example
            self._be_precise(self.wanted[key])
        read = frozenset(id(x) for x in self.candidates if self._was_read(x))
        return End(frozenset(following), read, fits, failed, why)

    def _was_read(self, length: SizeAttribute) -> bool:
        """Whether the last round read this attribute, as far as is known."""
        if self.reads is None or length.module not in self.watched:
            return True
        return (length.module, length.attribute) in self.reads.names

    def _run(
        self, plan: Plan, base: Plan | None, wanted: list[Any] | None, listen: Listener | None = None
    ) -> list[Any]:
        run = partial(
            check_by_running, self.model, plan, {}, self.example, base, wanted=wanted, gross=GROSS, listen=listen
        )
        if torch.compiler.is_exporting() or self.asked.known:
            return run()
        try:
            with exporting(self.asked):
                found = run()
        except Exception:  # it may be what stands for the answer that does not work where a bool would
            found = run()
            self.asked.heard = True
        self.asked.known = True
        return found


def run_trials(
    trial_with: Callable[[Mapping[str, float], Trial | None], Trial],
) -> tuple[Trial, list[str], list[str]]:
    """A trial, the groups that do not fit, and those of heads that it could not tell apart.

    What an untrained model hands on may come to so little that attention looks at all alike: then such heads are tried
    again with larger weights.
    """
    untold: list[str] = []
    loud: dict[str, float] = {}
    trial: Trial | None = None
    for loudness in LOUDNESS:
        loud = dict.fromkeys(untold, loudness)
        with closing(trial_with(loud, trial)) as trial:
            misfits = trial.misfits()
            untold = [*trial.untold(misfits), *(n for n in misfits if n in loud)]
        if not untold:
            break
    assert trial is not None
    return trial, [n for n in misfits if n not in untold], untold


def _follows_anyway(module: nn.Module, attribute: str) -> bool:
    """Whether apply_ makes this attribute agree with the module's weight in any case."""
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return attribute in ("input_size", "hidden_size")
    norm = isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None
    return norm and attribute == "normalized_shape"


def _telling(model: nn.Module, groups: Groups, loud: Mapping[str, float]) -> nn.Module:
    """The model with random weights where activations are multiplied, as in attention; all else is shared.

    Those of an untrained model may be so small that every head looks at all alike, and heads of a wrong width would do.
    Weights that are next to nothing hide what comes before them, such as a classifier that begins with zeros or the
    scale of a branch; these are random too. `loud` says of which groups the weights are so many times larger.
    """
    multiplied = np.concatenate([np.zeros(0, np.int64), *(p.classes for p in groups.costs.activation_macs)])
    among = [g for g in groups.values() if np.isin(g.classes, multiplied).any()]
    changed = informative_weights(model, {p.weight: 2.0 * loud.get(g.name, 1.0) for g in among for p in g.producers})
    return copy_with(model, changed) if changed else model


def _failing_module(error: BaseException) -> str | None:
    """The name of the innermost module that has submodules among those whose forward was running."""
    running = modules_in((error.__cause__ or error).__traceback__)
    names = {id(m): name for name, m in running[0].named_modules()} if running else {}
    return next((names[id(m)] for m in reversed(running) if names.get(id(m)) and [*m.children()]), None)


def _why(error: Exception) -> tuple[str, str]:
    """Why a round did not fit, and what was seen, in a short line."""
    why, seen = (error.why, error.seen) if isinstance(error, Misfit) else (COUNTED, in_a_line(error))
    return why, textwrap.shorten(seen, MOST_SAID)


def _how_far(end: End) -> tuple[bool, int]:
    """What is raised says more than values; the more attributes follow, the further a forward gets."""
    return end.why is not None and end.why[0] == COUNTED, len(end.followed)


def _reason(why: str, seen: str, other: str, chance: str) -> str:
    like = f", like {other}" if other else ""
    return f"{why}{like}: {seen}; {chance}" if why == UNLIKE else f"{why}{like}: {seen}"


def _choices(lengths: Sequence[SizeAttribute]) -> Iterator[tuple[Any, ...]]:
    """Kinds of these attributes, few at a time first."""
    kinds = list(dict.fromkeys(map(_attribute_kind, lengths)))
    choices = itertools.chain.from_iterable(itertools.combinations(kinds, n) for n in range(len(kinds) + 1))
    return itertools.islice(choices, MOST_CHOICES)


def _attribute_kind(length: SizeAttribute) -> AttributeKind:
    return kind_of(length.module), length.attribute, length.entry, length.axis

"""Run a round of a trial: prune a copy of the model, compare what it returns, and note why it does not fit.

`reasons` puts what was seen in all rounds into words that `print(groups)` shows.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hap.execution.calling import draws_random_numbers
from hap.execution.fast_copy import copy_with
from hap.execution.model_outputs import difference, in_float64, is_float32, output_tensors
from hap.graph.capture import Asked, exporting, modules_in
from hap.groups.groups import Groups
from hap.groups.types import Ints, SizeAttribute
from hap.planning.assemble import draft
from hap.planning.cost import CostModel
from hap.planning.plan import Plan
from hap.trials.attribute_reads import AttributeReads
from hap.trials.removal_rounds import kind_of, rounds_of
from hap.trials.repeated_blocks import NONE, Repeats
from hap.verification.comparison import COUNTED, UNLIKE, Comparison, Misfit, in_a_line
from hap.verification.informative_values import informative_weights
from hap.verification.verify import check_by_running

NOTHING: Ints = np.zeros(0, np.int64)

LONGEST_REASON = 120
"""How many characters of an exception a reason holds."""
HEAVY_MODEL, HEAVY_UNITS = 60_000_000, 1_000
"""Models whose layers write more values than this get one round too, if they have more than so many units."""


@dataclass(frozen=True)
class Subject:
    """What trials are about: a model on an example, its groups, and what may count units where the graph does not tell.

    The classes `sized` pass through an operator with sizes among its arguments, such as a view or a split; `sliced`
    ones are sliced. `attributes` are integers of modules that equal the length of an axis there. Of blocks in `repeats`
    one is run. The weights of the groups in `weight_scales` are tried that many times larger.
    """

    model: nn.Module
    example: Any
    groups: Groups
    sized: Ints
    sliced: Ints = field(default_factory=lambda: NOTHING)
    attributes: Sequence[SizeAttribute] = ()
    repeats: Repeats = NONE
    weight_scales: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundEnd:
    """How a round ended: whether the model ran as it should, and else which module failed, why, and what was seen.

    `followers` are the ids of the attributes that followed, `read` of those that were read till then: with others that
    were not read it would have ended just so.
    """

    followers: frozenset[int]
    read: frozenset[int]
    failed: str | None = None
    why: tuple[str, str] | None = None

    @property
    def fits(self) -> bool:
        return self.why is None


class RoundRunner:
    """Runs rounds of one model, without the blocks that repeat others, and remembers how they ended."""

    def __init__(self, subject: Subject):
        model, groups, repeats = subject.model, subject.groups, subject.repeats
        self.groups = groups.restricted(repeats.blocks)
        self.cost = CostModel(self.groups)
        self.reach = {n: np.concatenate([g.classes, groups.streams(g.classes)]) for n, g in self.groups.items()}
        attributes = [x for x in subject.attributes if repeats.original(x.module) is None]
        self.attributes = [x for x in attributes if not _follows_anyway(model.get_submodule(x.module), x.attribute)]
        self.reads = AttributeReads()
        self.model, self.example = self._prepared(subject), subject.example
        sliced = {n for n in self.groups if np.isin(self.reach[n], subject.sliced).any()}
        self.rounds = rounds_of(self.groups, [x.classes for x in self.attributes], sliced, self._is_heavy())
        self.ends: dict[tuple[int, frozenset[str]], list[RoundEnd]] = {}
        self.references: dict[Any, list[Any]] = {}
        self.shapes_checked: set[Any] = set()
        self.asked = Asked()
        self.last_fit: Comparison | None = None

    def _prepared(self, subject: Subject) -> nn.Module:
        """The model that is tried: without the blocks that repeat others, and with watched attributes.

        One that cannot be copied is left as it is: every round of it fails on that again.
        """
        model, blocks = subject.model, subject.repeats.blocks
        try:
            model = _with_informative_weights(model, self.groups, subject.weight_scales)
            if not blocks and not self.attributes:
                return model
            copy = copy_with(model, {})
            self.reads.watch_(copy, {x.module for x in self.attributes}, blocks)
            return copy
        except Exception:  # copying runs code of whatever the model holds
            self.reads = AttributeReads()
            return model

    def _is_heavy(self) -> bool:
        everything = self.groups.all_kept()
        written = self.cost(everything, np.zeros_like(everything)).activations
        return written > HEAVY_MODEL and self.groups.units > HEAVY_UNITS

    def reached(self, names: Iterable[str]) -> Ints:
        """The classes of these groups, and of the streams that they feed."""
        return np.concatenate([NOTHING, *(self.reach[n] for n in names)])

    def among(self, classes: frozenset[int], name: str) -> bool:
        """Whether any class of a group, or of a stream that it feeds, is one of these."""
        return not classes.isdisjoint(self.reach[name].tolist())

    def end(self, number: int, cut: Sequence[str], followers: Mapping[int, SizeAttribute]) -> RoundEnd:
        """How this round ends when these groups lose units; it is not run if that is known. Arguments as in `run`."""
        known = self.ends.setdefault((number, frozenset(cut)), [])
        end = next((e for e in known if e.followers & e.read == followers.keys() & e.read), None)
        if end is None:
            known.append(end := self.run(number, cut, followers))
        return end

    def run(self, number: int, cut: Sequence[str], followers: Mapping[int, SizeAttribute]) -> RoundEnd:
        """Run a round in which the groups `cut` lose units and these attributes, by id, follow.

        What a norm spans changes values, so as much of it goes from both models that are compared. That these run with
        other parts of it, and return tensors of the same shapes, is tried by itself.
        """
        groups = self.groups.with_rewiring(size_attributes=tuple(followers.values()))
        spanned = {n for n in cut if self.among(self.groups.traits.spanned, n)}
        reference, tried = self.rounds[number]

        def plan(of_spanned: dict[str, list[int]], of_others: dict[str, list[int]], exact: bool = True) -> Plan:
            removed = {n: (of_spanned if n in spanned else of_others)[n] for n in cut}
            return replace(draft(groups, removed, cost=self.cost), exact=exact)

        # whatever attributes follow, the result is to be the same: unless they follow what is spanned
        reach = self.reached(spanned)
        key = (number, frozenset(cut), frozenset(i for i, x in followers.items() if np.isin(x.classes, reach).any()))
        failed, why = None, None
        self.reads.forget()
        try:
            comparison = Comparison(self.model, plan(tried, tried), self.example, base=plan(tried, reference))
            self.references[key] = outputs = self._check(comparison, self.references.get(key))
            if spanned and key not in self.shapes_checked:
                self._check(Comparison(self.model, plan(reference, tried, exact=False), self.example), outputs)
                self.shapes_checked.add(key)
        except Exception as error:  # a forward that gets other sizes than it counted on may raise anything
            failed, why = _failing_module(error), _why(error)
        else:
            self.last_fit = comparison
            if is_float32(self.model) and any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in outputs):
                self.model, self.example = in_float64(self.model, self.example)  # it took that to tell
        read = frozenset(id(x) for x in self.attributes if self.reads.was_read(x))
        return RoundEnd(frozenset(followers), read, failed, why)

    def _check(self, comparison: Comparison, reference: list[Any] | None) -> list[Any]:
        """Run the comparison. The first run also tells if the model asks whether it is exported."""
        if torch.compiler.is_exporting() or self.asked.known:
            return check_by_running(comparison, reference, hasty=True)
        try:
            with exporting(self.asked):
                found = check_by_running(comparison, reference, hasty=True)
        except Exception:  # it may be what stands for the answer that does not work where a bool would
            found = check_by_running(comparison, reference, hasty=True)
            self.asked.heard = True
        self.asked.known = True
        return found


def _follows_anyway(module: nn.Module, attribute: str) -> bool:
    """Whether apply_ makes this attribute agree with the module's weight in any case."""
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return attribute in ("input_size", "hidden_size")
    norm = isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None
    return norm and attribute == "normalized_shape"


def _with_informative_weights(model: nn.Module, groups: Groups, weight_scales: Mapping[str, float]) -> nn.Module:
    """The model with random weights where activations are multiplied, as in attention; all else is shared.

    Those of an untrained model may be so small that every head looks at all alike, and heads of a wrong width would do.
    Weights that are almost zero hide what comes before them, such as a classifier that begins with zeros or the scale
    of a branch; these are random too.
    """
    multiplied = np.concatenate([NOTHING, *(p.classes for p in groups.costs.activation_macs)])
    among = [g for g in groups.values() if np.isin(g.classes, multiplied).any()]
    scales = {p.weight: 2.0 * weight_scales.get(g.name, 1.0) for g in among for p in g.producers}
    changed = informative_weights(model, scales)
    return copy_with(model, changed) if changed else model


def _failing_module(error: BaseException) -> str | None:
    """The name of the innermost module that has submodules among those whose forward was running."""
    running = modules_in((error.__cause__ or error).__traceback__)
    names = {id(m): name for name, m in running[0].named_modules()} if running else {}
    return next((names[id(m)] for m in reversed(running) if names.get(id(m)) and [*m.children()]), None)


def _why(error: Exception) -> tuple[str, str]:
    """Why a round did not fit, and what was seen, in a short line."""
    why, seen = (error.why, error.seen) if isinstance(error, Misfit) else (COUNTED, in_a_line(error))
    return why, textwrap.shorten(seen, LONGEST_REASON)


def reasons(runner: RoundRunner, misfits: Sequence[str]) -> dict[str, str]:
    """Why these groups do not fit: what was seen where one of them, or one of its kind, lost units by itself."""
    seen: dict[str, tuple[str, str]] = {}
    for (_, cut), ends in runner.ends.items():
        alone = cut.intersection(misfits)
        if len(alone) == 1:
            seen |= {name: end.why for end in sorted(ends, key=_how_telling) for name in alone if end.why is not None}
    of_kind = {kind_of(n): n for n in reversed(misfits) if n in seen}
    unlike = _about_differences(runner) if any(why == UNLIKE for why, _ in seen.values()) else ""
    found = {}
    for name in misfits:
        one = name if name in seen else of_kind.get(kind_of(name))
        if one is None:
            found[name] = COUNTED
            continue
        why, what = seen[one]
        like = "" if one == name else f", like {one}"
        found[name] = f"{why}{like}: {what}" + (f"; {unlike}" if why == UNLIKE else "")
    return found


def _how_telling(end: RoundEnd) -> tuple[bool, int]:
    """What is raised tells more than values; the more attributes follow, the further a forward gets."""
    return end.why is not None and end.why[0] == COUNTED, len(end.followers)


def _about_differences(runner: RoundRunner) -> str:
    """Where other values may come from: two runs of the model may differ by themselves."""
    try:
        if draws_random_numbers(runner.model, runner.example):
            return "its forward draws at random"
        first, second = (output_tensors(runner.model, runner.example) for _ in range(2))
        if difference(first, second) is not None:
            return "two runs of the model itself differ too"
    except Exception:  # it ran before, but whoever does not return the same twice may also fail
        return "the model itself does not always run"
    return "it counts on its size, or a rule is wrong"

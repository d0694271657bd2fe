"""plan: from scores and a budget to a plan. Nothing here needs a model."""

import itertools
import math
import warnings
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hap.errors import Argument, ForPython, HapError
from hap.groups.groups import Groups
from hap.groups.types import Bools, Floats, Ints
from hap.groups.unprunable_summary import nothing_in_words, unprunable_in_words
from hap.implants import Implant, as_implant
from hap.planning.assemble import assemble
from hap.planning.budget import DEFAULT_LIMITS, Budget, Limits
from hap.planning.cost import CostModel
from hap.planning.plan import Plan

MIXTURE_STEPS = 8


def plan(
    groups: Groups,
    scores: Mapping[str, Tensor],
    budget: Budget,
    implant: Implant | float | None = None,
    limits: Limits = DEFAULT_LIMITS,
    *,
    per_cost: bool = False,
) -> Plan:
    """Choose what to keep, implant and remove so that the budget is met. Units go from the lowest score up.

    >>> groups = hap.trace(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(2, 4))
    >>> hap.plan(groups, {"0": torch.arange(16.0)}, hap.Budget(flops=0.25)).kept
    {'0': [12, 13, 14, 15]}

    Arguments: `scores` has one value for each unit of each group. `implant` replaces some of the units that would go; a
    number is the share of them that a `hap.Pointwise` replaces. `per_cost` ranks by score per unit of cost saved: where
    the budget has several limits, by that mixture of costs with which the units kept have the highest scores.
    Returns: a plan that is never above the budget, where keeping any one unit more would be.
    """
    if budget.latency is not None:
        why = " is met by measuring a model, which plan knows nothing of; use hap.plan_for_latency or "
        raise HapError(Argument("latency", budget.latency), why, "hap.prune_(..., latency=...)")
    if budget.flops is not None and groups.costs.uncounted:
        names = ", ".join(groups.costs.uncounted)
        warnings.warn(
            f"flops={budget.flops} is met without counting {names}, which may be a matrix product: the share that is "
            "really left may be another",
            stacklevel=2,
        )
    mixtures = _mixtures(len(budget.given)) if per_cost else [None]
    searches = [_Search(groups, scores, budget, as_implant(implant), limits, mixture) for mixture in mixtures]
    found = [search.solve() for search in searches]
    best = int(np.argmax([search.kept_score(*one) for search, one in zip(searches, found, strict=True)]))
    return assemble(searches[best].groups, *found[best], searches[best].implant)


def _mixtures(kinds: int) -> list[Floats | None]:
    """Weights of the costs in a budget, in steps of an eighth, that add up to 1."""
    steps = [w for w in itertools.product(range(MIXTURE_STEPS + 1), repeat=kinds) if sum(w) == MIXTURE_STEPS]
    return [np.array(w) / MIXTURE_STEPS for w in steps]


def least_flops(
    groups: Groups, scores: Mapping[str, Tensor], implant: Implant | None, limits: Limits, per_cost: bool = False
) -> float:
    """The fraction of the multiply-adds that is left when all goes that the limits allow."""
    search = _Search(groups, scores, Budget(flops=1.0), implant, limits, np.ones(1) if per_cost else None)
    return float((search.value(*search.marking(len(search.order))) / search.dense)[0])


@dataclass
class _Search:
    """Units are numbered flat over all groups; `order` lists the removable ones, least sensitive first: by score alone,
    or with a `mixture` of the costs in the budget by score per cost saved."""

    groups: Groups
    scores_of: Mapping[str, Tensor]
    budget: Budget
    implant: Implant | None
    limits: Limits
    mixture: Floats | None

    def __post_init__(self) -> None:
        implant = self.implant
        groups = self.groups = self.groups if implant is None else implant.prepared(self.groups)
        self.cost = CostModel(groups, implant)
        if not len(groups):
            raise HapError(nothing_in_words(groups), ForPython("; print(groups) has all reasons"))
        self.classes = np.concatenate([group.classes for group in groups.values()])
        self.group = np.repeat(np.arange(len(groups)), [len(group) for group in groups.values()])
        self.kind = _kinds(groups, self.classes)
        self.full = groups.all_kept()
        self.nothing = np.zeros_like(self.full)
        self.dense = self.value(self.full, self.nothing)
        left = np.array(list(self.budget.given.values()))
        self.target = np.floor(left * self.dense * (1 + 1e-15))  # 0.29 of 100 is 29, not 28.999...
        self.scores = self.rank = _checked(groups, self.scores_of)
        if implant is not None:
            self.rank = implant.ranking(self.scores)
        if self.mixture is not None:
            saved = self._saved(self.mixture)
            self.rank = np.where(self.rank < 0, self.rank * saved, self.rank / saved)
        self.eligible = self.nothing[self.classes] if implant is None else implant.eligible(groups)[self.classes]
        self.streams: dict[int, list[int]] = {}
        for source, target in groups.feeds.tolist():
            self.streams.setdefault(source, []).append(target)
        self.order = self._removal_order()

    def _saved(self, mixture: Floats) -> Floats:
        """The share of the dense model's cost, in this mixture, that removing one unit saves."""
        saved = np.ones(len(self.classes))
        for kind in np.unique(self.kind):
            members = np.flatnonzero(self.kind == kind)
            kept = self.full.copy()
            kept[self.classes[members[0]]] = False
            saved[members] = mixture @ (np.maximum(self.dense - self.value(kept, self.nothing), 1) / self.dense)
        return saved

    def _removal_order(self) -> Ints:
        order = np.argsort(self.rank, kind="stable")
        place = np.argsort(order)
        removable = np.zeros(len(order), dtype=bool)
        left_alone = self.groups.matching(self.limits.leave, Argument("leave", text="Limits.leave"))
        for g, (name, group) in enumerate(self.groups.items()):
            streams = np.isin(group.classes, self.groups.feeds[:, 1]).any()
            if name in left_alone or (streams and self.limits.round_to > 1):  # others decide how wide a stream is
                continue
            members = np.flatnonzero(self.group == g)
            worst_first = members[np.argsort(place[members])]
            removable[worst_first[: self.limits.removable(len(members))]] = True
        for classes in self.groups.spans():  # no layer may lose its last input or output
            if (classes != 0).all() and len(able := np.flatnonzero(self.groups.sustaining(self.classes, classes))):
                removable[able[np.argmax(place[able])]] = False
        order = order[removable[order]]
        if self.implant is not None and self.implant.blind:  # what an implant cannot replace goes last
            order = order[np.argsort(~self.eligible[order], kind="stable")]
        return order

    def marking(self, count: int) -> tuple[Bools, Bools]:
        """The classes kept (implants included) and implanted when the first `count` units of the order go."""
        gone = self._rounded(self.order[:count])
        stand_ins = gone[:0]
        if self.implant is not None:
            able = gone[self.eligible[gone]]
            stand_ins = able[len(able) - round(self.implant.ratio * len(able)) :]
        kept, implanted = self.full.copy(), self.nothing.copy()
        kept[self.classes[gone]] = False
        kept[self.classes[stand_ins]] = implanted[self.classes[stand_ins]] = True
        return kept, implanted

    def _rounded(self, gone: Ints) -> Ints:
        """Give back the best of each group's removed units until what stays is a multiple of `round_to`."""
        step = self.limits.round_to
        if step == 1:
            return gone
        goes = np.ones(len(gone), dtype=bool)
        for g in np.unique(self.group[gone]):
            places = np.flatnonzero(self.group[gone] == g)
            stay = int((self.group == g).sum()) - len(places)
            goes[places[max(len(places) - (-stay % step), 0) :]] = False
        return gone[goes]

    def solve(self) -> tuple[Bools, Bools]:
        """The classes kept (implants included) and implanted."""
        return self.fill(*self.marking(self.bisect()))

    def kept_score(self, kept: Bools, implanted: Bools) -> float:
        """The sum of the scores of all units that stay as they are."""
        return float(self.scores[(kept & ~implanted)[self.classes]].sum())

    def value(self, kept: Bools, implanted: Bools) -> Ints:
        return self.budget.of(self.cost(kept, implanted))

    def fits(self, kept: Bools, implanted: Bools) -> bool:
        return bool((self.value(kept, implanted) <= self.target).all())

    def bisect(self) -> int:
        """The smallest number of units to take from the order that meets the budget."""
        least = self.value(*self.marking(len(self.order)))
        if (missed := np.flatnonzero(least > self.target)).size:
            place = missed[0]
            kind, fraction = list(self.budget.given.items())[place]
            left = math.ceil(least[place] / self.dense[place] * 1e4) / 1e4
            because = f"; {said}" if (said := unprunable_in_words(self.groups)) else ""
            raise HapError(
                Argument(kind, fraction),
                f" cannot be reached: with these limits at least {left:.4f} of the dense model is left{because}. ",
                "Ask for that or more, raise ",
                Argument("per_layer", text="Limits.per_layer"),
                ForPython(
                    ", or look at print(groups) for what is frozen", (" or ", Argument("leave"), " fewer layers alone")
                ),
                ".",
            )
        fewer = range(len(self.order) - 1, -1, -1)  # with all of them it is met, as was seen; from there down
        return len(self.order) - bisect_left(fewer, True, key=lambda count: not self.fits(*self.marking(count)))

    def fill(self, kept: Bools, implanted: Bools) -> tuple[Bools, Bools]:
        """Keep what still fits, most sensitive first, until no single unit more would. What did not fit is tried again
        only after all others: with implants that share a part, keeping one unit can make another one cheaper."""
        before = -1
        while before != (before := int((kept & ~implanted).sum())):
            kept, implanted = self._fill_once(kept, implanted)
        return kept, implanted

    def _fill_once(self, kept: Bools, implanted: Bools) -> tuple[Bools, Bools]:
        hopeless: set[tuple[int, bool, tuple[bool, ...]]] = set()  # units of one kind cost the same
        live = self.groups.alive(kept)
        for unit in self.order[::-1]:
            c = self.classes[unit]
            if kept[c] and not implanted[c]:
                continue
            kind = (int(self.kind[unit]), bool(implanted[c]), tuple(live[self.streams.get(int(c), [])]))
            if kind in hopeless or (block := self._block(unit, kept & ~implanted)) is None:
                continue
            more, fewer = kept.copy(), implanted.copy()
            more[block], fewer[block] = True, False
            if self.fits(more, fewer):
                kept, implanted, live = more, fewer, self.groups.alive(more)
            else:
                hopeless.add(kind)
        return kept, implanted

    def _block(self, unit: int, whole: Bools) -> Ints | None:
        """The classes to give back with this unit so that `round_to` still holds, or None if that cannot be."""
        step = self.limits.round_to
        if step == 1:
            return self.classes[[unit]]
        out = self.order[(self.group[self.order] == self.group[unit]) & ~whole[self.classes[self.order]]]
        block = out[::-1][:step]
        lacking = int((~whole[self.classes[self.group == self.group[unit]]]).sum())
        complete = len(block) == len(out) == lacking
        return self.classes[block] if len(block) == step or complete else None


def _kinds(groups: Groups, classes: Ints) -> Ints:
    """A number for each unit: equal for units that stand on the same axes equally often, and so cost the same."""
    kind = np.zeros(groups.classes, dtype=np.int64)  # refined axis by axis
    number = 1
    for labels in groups.axes.values():
        members, times = np.unique(labels, return_counts=True)
        found, finer = np.unique(kind[members] * (len(labels) + 1) + times, return_inverse=True)
        kind[members] = number + finer
        number += len(found)
    return kind[classes]


def _checked(groups: Groups, scores: Mapping[str, Tensor]) -> Floats:
    """The scores of all units, group by group."""
    if missing := [n for n in groups if n not in scores]:
        raise HapError(f"no scores for group {missing[0]!r}; score the same groups that are planned")
    values = []
    for name, group in groups.items():
        v = torch.as_tensor(scores[name]).detach().to("cpu", torch.float64).numpy()
        if v.shape != (len(group),):
            raise HapError(f"scores[{name!r}] has shape {v.shape}; expected ({len(group)},), one value per unit")
        if not np.isfinite(v).all():
            raise HapError(f"scores[{name!r}] holds {v[~np.isfinite(v)][0]}; scores must be finite")
        values.append(v)
    return np.concatenate(values)

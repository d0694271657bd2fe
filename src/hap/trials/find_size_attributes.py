"""Find which integers of modules, such as `num_heads`, have to follow what is removed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hap.groups.types import SizeAttribute
from hap.trials.removal_rounds import kind_of
from hap.trials.run_round import RoundRunner

AttributeKind = tuple[str, str, int, int]
"""The name of a module without its numbers, and which attribute, entry and axis."""

MOST_CHOICES = 32
"""How many choices of attributes are tried for a kind of group."""


class SizeAttributeSearch:
    """Looks for as few attributes as do that must be set anew when groups lose units.

    `fits(groups, attributes, rounds)` runs copies of the model in which these groups have lost units and these
    attributes follow. A number may equal the length of an axis by chance, so those that are not needed do not follow.
    """

    def __init__(self, runner: RoundRunner, fits: Callable[..., bool]):
        self.runner, self.fits = runner, fits

    def counting(self, *names: str) -> list[SizeAttribute]:
        """The attributes that may count units of these groups."""
        reach = self.runner.reached(names)
        return [x for x in self.runner.attributes if np.isin(x.classes, reach).any()]

    def fewest(self, names: list[str], followers: list[SizeAttribute]) -> list[SizeAttribute] | None:
        """These attributes without those that need not follow. None: nothing fits."""
        for rounds in (1, None):
            if not self.fits(names, followers, rounds):
                return None
            needed, spare = followers, list(dict.fromkeys(map(attribute_kind, followers)))
            for kinds in (spare, *([kind] for kind in spare if len(spare) > 1)):  # all at once, or one by one
                fewer = [x for x in needed if attribute_kind(x) not in kinds]
                if len(fewer) < len(needed) and self.fits(names, fewer, rounds):
                    needed = fewer
            if self.fits(names, needed):
                return needed
        return None

    def needed_by(self, name: str) -> list[SizeAttribute] | None:
        """The attributes that must follow this group. None: no choice of those that count its units works."""
        choices = _choices(self.counting(name))
        return next((needed for needed in choices if self.fits([name], needed, rounds=1)), None)

    def needed_in_export(
        self,
        able: list[str],
        followers: list[SizeAttribute],
        fits_in_export: Callable[[list[str], list[SizeAttribute]], bool],
    ) -> list[SizeAttribute]:
        """Further attributes that have to follow where the model is exported, if it ever asks whether it is.

        A forward may go another way then: the one that the graph shows, and that other inputs may take too. Nothing
        follows if no choice of attributes works both ways.
        """
        known = set(map(id, followers))
        left = [x for x in self.counting(*able) if id(x) not in known]
        for more in _choices(left) if left else ():
            every = [*followers, *more]
            if fits_in_export(able, every) and (not more or self.fits(able, every)):
                return more
        return []


def _choices(attributes: Sequence[SizeAttribute]) -> Iterator[list[SizeAttribute]]:
    """All of these attributes that are of some kinds, few kinds at a time first."""
    kinds = list(dict.fromkeys(map(attribute_kind, attributes)))
    choices = itertools.chain.from_iterable(itertools.combinations(kinds, n) for n in range(len(kinds) + 1))
    for some in itertools.islice(choices, MOST_CHOICES):
        yield [x for x in attributes if attribute_kind(x) in some]


def attribute_kind(x: SizeAttribute) -> AttributeKind:
    """What equal attributes of blocks that repeat each other have in common."""
    return kind_of(x.module), x.attribute, x.entry, x.axis

"""What stays whole that a user would expect to shrink, in one sentence. `tracing/build_groups.py` finds it."""

import math
import re
from collections import Counter

from hap.groups.groups import Groups
from hap.groups.types import Frozen

LEAST = 0.01
"""The share of the parameters from which on it is worth a sentence."""
LONGEST = 160
"""Reasons are cut short, since some hold what a forward raised."""


def layer_of(parameter: str) -> str:
    """The module that a parameter is the weight of, or the parameter itself where the model holds it."""
    return parameter.partition(".parametrizations.")[0].rpartition(".")[0] or parameter


def share_unprunable(groups: Groups) -> float:
    """The share of the parameters that no group covers though one could expect it."""
    total = sum(math.prod(groups.shapes[name]) for name in groups.trainable)
    return sum(math.prod(groups.shapes[name]) for name in groups.unprunable) / max(total, 1)


def unprunable_in_words(groups: Groups) -> str:
    """How much that is, the largest of these layers and the reason; nothing where it is not worth a word."""
    share = share_unprunable(groups)
    return f"{share:.0%} of the parameters could not be touched: {_layers(groups, 1)}" if share >= LEAST else ""


def nothing_in_words(groups: Groups) -> str:
    """That nothing can be removed, and the main reasons."""
    if groups.unprunable:
        reasons = _layers(groups, 3)
    elif groups.frozen:
        reasons = _listed([f"{f.what} ({_short(f.why)})" for f in groups.frozen], len(groups.frozen), 3)
    else:
        reasons = "no layer computes what another one reads"
    return f"nothing in this model can be removed: {reasons}"


def _layers(groups: Groups, most: int) -> str:
    """The largest of the layers that are not touched, each with a reason that those before it do not have."""
    sizes, reasons = Counter[str](), dict[str, Frozen]()
    for name, frozen in groups.unprunable.items():
        sizes[layer := layer_of(name)] += math.prod(groups.shapes[name])
        reasons.setdefault(layer, frozen)
    different: dict[str, str] = {}
    for layer, _ in sizes.most_common():
        what, why = reasons[layer].what, _short(re.sub(", like [^:]*", "", reasons[layer].why))
        about = "" if f"{what}.".startswith(f"{layer}.") else f"{what}: "
        different.setdefault(why, f"{layer} ({about}{why})")
    return _listed(list(different.values()), len(sizes), most)


def _listed(said: list[str], count: int, most: int) -> str:
    rest = count - len(said[:most])
    return ", ".join(said[:most]) + (f" and {rest} more layer{'s' * (rest > 1)}" if rest else "")


def _short(why: str) -> str:
    return why if len(why) <= LONGEST else f"{why[: LONGEST - 6].rstrip()} [...]"

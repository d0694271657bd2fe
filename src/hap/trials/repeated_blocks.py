"""Blocks that repeat another one: trials run one of each kind and let the others pass on what they are given.

A network of 24 equal blocks answers a question about the forward of a block 24 times. Blocks are equal if they have the
same submodules of the same classes, the same operators with the same sizes and constants in the captured graph, and
units that are tied in the same way, to the same units outside. Where their attributes are equal too and nothing looks
into them from outside, nothing is left that could tell them apart; otherwise a trial runs all of them once to see.
Whoever relies on that still runs all of them when the pruned model is checked: a wrong guess is refused there.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hap.graph.index import GraphIndex
from hap.groups.groups import Groups
from hap.groups.types import Bools, Ints, SizeAttribute
from hap.trials.attribute_reads import SETTINGS
from hap.utils.module_tree import same_modules

ClassesOf = Callable[[fx.Node], Ints | None]
"""The class of each position of a node's result, with size 1 along axes where it does not vary; None if unknown."""


@dataclass(frozen=True)
class Repeats:
    """`blocks` says which block each one repeats, `groups` the same of the groups inside, `lengths` of attributes.

    `unlike` are those whose attributes are not all equal to those of the block that they repeat.
    """

    blocks: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    unlike: set[str] = field(default_factory=set)

    def like(self, names: Iterable[str]) -> list[str]:
        """These groups and those that repeat them."""
        return _with_likes(names, self.groups)

    def lengths_like(self, found: list[SizeAttribute], among: Sequence[SizeAttribute]) -> list[SizeAttribute]:
        """These attributes and those that repeat them."""
        place = {id(x): i for i, x in enumerate(among)}
        return [among[i] for i in _with_likes((place[id(x)] for x in found), self.lengths)]


NONE = Repeats()


def _with_likes(items: Iterable[Any], repeated: Mapping[Any, Any]) -> list[Any]:
    found = dict.fromkeys(items)
    for item, other in repeated.items():  # what repeats a repeat comes later
        if other in found:
            found[item] = None
    return list(found)


def find_repeats(
    index: GraphIndex, classes: ClassesOf, groups: Groups, candidates: list[SizeAttribute], shapes: Mapping[str, int]
) -> Repeats:
    """Blocks that repeat an earlier one, the outermost of those that do. Streams of branches are tried in full.

    `classes` says to which class each position of a node's result belongs. `shapes` counts the calls of modules that
    return a tensor just like their first argument: see `hap.graph.capture.Captured`.
    """
    if len(groups.feeds):
        return Repeats()
    found = Repeats()
    regions = _regions(index, [n for n, calls in shapes.items() if calls == 1])
    pairing = _Pairing(groups, candidates)
    latest: dict[Any, str] = {}
    for name in (n for n in index.modules if n in regions):
        if any(name.startswith(f"{done}.") for done in found.blocks):
            continue
        signature = _signature(index, classes, name, regions[name])
        if signature is None:
            continue
        known = latest.get(signature)
        if known is None or (pair := pairing(name, known)) is None:
            latest[signature] = name
            continue
        found.blocks[name] = known
        found.groups.update(pair[0])
        found.lengths.update(pair[1])
        if not same_modules(index.modules[name], index.modules[known]):
            found.unlike.add(name)
    return found


def _regions(index: GraphIndex, names: list[str]) -> dict[str, list[fx.Node]]:
    """What each of these modules runs, unless it is known by several names."""
    known = Counter(index.names.values())
    regions: dict[str, list[fx.Node]] = {n: [] for n in names if known[n] == 1}
    for node in index.program.graph.nodes:
        if node.op == "call_function":
            for name, _ in (node.meta.get("nn_module_stack") or {}).values():
                if name in regions:
                    regions[name].append(node)
    return regions


def _signature(index: GraphIndex, classes: ClassesOf, name: str, nodes: list[fx.Node]) -> Any:
    """Equal for modules that run the same code on tensors of the same sizes. None: this one cannot be left out.

    It can if what leaves it can be cut just as what enters it.
    """
    inside = {node: i for i, node in enumerate(nodes)}
    leaving = [n for n in nodes if any(user not in inside for user in n.users)]
    if len(leaving) != 1 or not isinstance(leaving[0].meta.get("val"), Tensor):
        return None
    outside: dict[fx.Node, Any] = {}

    def refer(node: fx.Node) -> Any:
        if node in inside:
            return ("node", inside[node])
        if node not in outside:
            parameter = index.parameters.get(node)
            own = parameter is not None and parameter.startswith(f"{name}.")
            outside[node] = ("own", parameter[len(name) :]) if own else ("given", parameter, len(outside))  # type: ignore[index]
        return (*outside[node], _form(node))

    steps = repr([(n.target, fx.map_arg((n.args, n.kwargs), refer), _form(n)) for n in nodes])
    entering = [n for n in outside if n not in index.parameters and _form(n) == _form(leaving[0])]
    if not entering or not all(_cut_alike(classes(n), classes(leaving[0])) for n in entering):
        return None
    modules = [(suffix, type(m), _settings(m)) for suffix, m in index.modules[name].named_modules()]
    if any(settings is None for *_, settings in modules):
        return None
    return (steps, inside[leaving[0]], tuple(modules))


def _form(node: fx.Node) -> Any:
    """The shapes and types of what a node returns."""
    return pytree.tree_map_only(Tensor, lambda x: (tuple(x.shape), x.dtype), node.meta.get("val"))


def _settings(module: nn.Module) -> Any:
    """What else steers a module's forward. None: it has hooks or a forward of its own.

    Numbers show in the graph wherever they count.
    """
    own = vars(module)
    if "forward" in own or module._forward_hooks or module._forward_pre_hooks:
        return None
    return tuple((k, type(v), v if isinstance(v, SETTINGS) else None) for k, v in own.items())


def _cut_alike(a: Ints | None, b: Ints | None) -> bool:
    if a is None or b is None:
        return False
    left, right = np.broadcast_arrays(a, b)
    return np.array_equal(left, right)


class _Pairing:
    """Pairs the groups and attributes of two blocks by the classes on the axes of their parameters."""

    def __init__(self, groups: Groups, candidates: list[SizeAttribute]):
        self.groups, self.candidates = groups, candidates
        self.times = self._count(groups.axes)
        self.names, self.sizes = list(groups), np.array([len(g.classes) for g in groups.values()], dtype=np.int64)
        self.owner: Ints = np.full(groups.classes, -1, dtype=np.int64)
        for number, group in enumerate(groups.values()):
            self.owner[group.classes] = number
        self.spanned = np.zeros(groups.classes, dtype=bool)
        self.spanned[list(groups.traits.spanned)] = True

    def __call__(self, name: str, known: str) -> tuple[dict[str, str], dict[int, int]] | None:
        """Groups and candidates of `name`, each with its like in `known`. None, if they are not tied alike."""
        mine, theirs = self._axes(name), self._axes(known)
        if mine.keys() != theirs.keys() or any(len(mine[k]) != len(theirs[k]) for k in mine):
            return None
        none = np.zeros(1, np.int64)
        sides = [np.concatenate([none, *(side[key] for key in mine)]) for side in (mine, theirs)]
        codes = np.unique(sides[0] * self.groups.classes + sides[1])  # faster than rows of two
        left, right = np.divmod(codes, self.groups.classes)
        if not all(len(np.unique(column)) == len(column) for column in (left, right)):
            return None
        traits = [self._traits(axes, column) for axes, column in ((mine, left), (theirs, right))]
        inside = traits[0][0]
        if not np.array_equal(traits[0], traits[1]) or not np.array_equal(left[~inside], right[~inside]):
            return None
        to: Ints = np.full(self.groups.classes, -1, dtype=np.int64)
        to[left] = right
        groups, lengths = self._groups(left[inside], right[inside]), self._lengths(name, known, to)
        return None if groups is None or lengths is None else (groups, lengths)

    def _groups(self, mine: Ints, theirs: Ints) -> dict[str, str] | None:
        """The groups of these classes, which stand in one block alone, each with its like."""
        owners = [self.owner[classes] for classes in (mine, theirs)]
        if any((owner < 0).any() for owner in owners):
            return None
        left, right = np.divmod(np.unique(owners[0] * len(self.names) + owners[1]), max(len(self.names), 1))
        whole = np.array_equal(np.bincount(owners[0], minlength=len(self.names))[left], self.sizes[left])
        found = {self.names[i]: self.names[j] for i, j in zip(left.tolist(), right.tolist(), strict=True)}
        return found if whole and len(found) == len(left) else None

    def _axes(self, block: str) -> dict[tuple[str, int], Ints]:
        start = f"{block}."
        return {(n[len(start) :], dim): a for (n, dim), a in self.groups.axes.items() if n.startswith(start)}

    def _count(self, axes: Mapping[Any, Ints]) -> Ints:
        """How often each class stands on these axes."""
        return np.bincount(np.concatenate([np.zeros(1, np.int64), *axes.values()]), minlength=self.groups.classes)

    def _traits(self, axes: Mapping[Any, Ints], classes: Ints) -> Bools:
        """Which of these classes stand in this block alone, and which are spanned by a norm."""
        own = (self._count(axes)[classes] == self.times[classes]) & (classes != 0)
        return np.stack([own, self.spanned[classes]])

    def _lengths(self, name: str, known: str, to: Ints) -> dict[int, int] | None:
        def keys(block: str) -> dict[Any, int]:
            inside = [(i, x) for i, x in enumerate(self.candidates) if f"{x.module}.".startswith(f"{block}.")]
            return {(x.module[len(block) :], x.attribute, x.entry, x.axis): i for i, x in inside}

        mine, theirs = keys(name), keys(known)
        if mine.keys() != theirs.keys():
            return None
        for key, i in mine.items():
            if not np.array_equal(to[self.candidates[i].classes], self.candidates[theirs[key]].classes):
                return None
        return {i: theirs[key] for key, i in mine.items()}

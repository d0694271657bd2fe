"""Blocks that repeat another one: trials run one of each kind and let the others pass on what they are given.

A network of 24 equal blocks answers a question about the forward of a block 24 times. Blocks are equal if they have the
same submodules of the same classes, the same operators with the same sizes and constants in the captured graph, and
units that are tied in the same way, to the same units outside. Where their attributes are equal too and nothing looks
into them from outside, nothing is left that could tell them apart; otherwise a trial runs all of them once to see.
Whoever relies on that still runs all of them when the pruned model is checked: a wrong guess is refused there.
"""

from collections import Counter
from collections.abc import Callable, Mapping
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
    """`blocks` says which block each one repeats; groups and modules inside have the same names in both.

    `unlike` are those whose attributes are not all equal to those of the block that they repeat.
    """

    blocks: dict[str, str] = field(default_factory=dict)
    unlike: set[str] = field(default_factory=set)

    def original(self, name: str) -> str | None:
        """The group or module that this one repeats; None, if it is in no block that repeats another."""
        block = next((b for b in self.blocks if _is_in(b, name)), None)
        return None if block is None else self.blocks[block] + name[len(block) :]


NONE = Repeats()


def _is_in(block: str, name: str) -> bool:
    return f"{name}.".startswith(f"{block}.")


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
    ties = _Ties(groups, candidates)
    latest: dict[Any, str] = {}
    for name in (n for n in index.modules if n in regions):
        if found.original(name) is not None:
            continue
        signature = _signature(index, classes, name, regions[name])
        if signature is None:
            continue
        known = latest.get(signature)
        if known is None or not ties.alike(name, known):
            latest[signature] = name
            continue
        found.blocks[name] = known
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


class _Ties:
    """What blocks are tied to, by the classes on the axes of their parameters."""

    def __init__(self, groups: Groups, candidates: list[SizeAttribute]):
        self.groups, self.candidates = groups, candidates
        self.times = self._count(groups.axes)
        self.spanned = np.zeros(groups.classes, dtype=bool)
        self.spanned[list(groups.traits.spanned)] = True

    def alike(self, name: str, known: str) -> bool:
        """Whether each class, group and attribute of a block has its like in a known one: the same class, if it stands
        outside too."""
        mine, theirs = self._axes(name), self._axes(known)
        if mine.keys() != theirs.keys() or any(len(mine[k]) != len(theirs[k]) for k in mine):
            return False
        none = np.zeros(1, np.int64)
        sides = [np.concatenate([none, *(side[key] for key in mine)]) for side in (mine, theirs)]
        codes = np.unique(sides[0] * self.groups.classes + sides[1])  # faster than rows of two
        left, right = np.divmod(codes, self.groups.classes)
        if not all(len(np.unique(column)) == len(column) for column in (left, right)):
            return False
        traits = [self._traits(axes, column) for axes, column in ((mine, left), (theirs, right))]
        inside = traits[0][0]
        if not np.array_equal(traits[0], traits[1]) or not np.array_equal(left[~inside], right[~inside]):
            return False
        units, others = self._groups(name), self._groups(known)
        if sum(map(len, units.values())) != inside.sum():  # some are in no group
            return False
        to: Ints = np.full(self.groups.classes, -1, dtype=np.int64)
        to[left] = right
        here, there = units | self._attributes(name), others | self._attributes(known)
        return here.keys() == there.keys() and all(np.array_equal(to[here[key]], there[key]) for key in here)

    def _axes(self, block: str) -> dict[tuple[str, int], Ints]:
        return {(n[len(block) :], dim): a for (n, dim), a in self.groups.axes.items() if _is_in(block, n)}

    def _groups(self, block: str) -> dict[Any, Ints]:
        return {n[len(block) :]: group.classes for n, group in self.groups.items() if _is_in(block, n)}

    def _attributes(self, block: str) -> dict[Any, Ints]:
        inside = [x for x in self.candidates if _is_in(block, x.module)]
        return {(x.module[len(block) :], x.attribute, x.entry, x.axis): x.classes for x in inside}

    def _count(self, axes: Mapping[Any, Ints]) -> Ints:
        """How often each class stands on these axes."""
        return np.bincount(np.concatenate([np.zeros(1, np.int64), *axes.values()]), minlength=self.groups.classes)

    def _traits(self, axes: Mapping[Any, Ints], classes: Ints) -> Bools:
        """Which of these classes stand in this block alone, and which are spanned by a norm."""
        own = (self._count(axes)[classes] == self.times[classes]) & (classes != 0)
        return np.stack([own, self.spanned[classes]])

"""What is refitted, in which order and against what: read off the graphs of the pruned and the dense model.

Every layer gets a *target*: a value of the dense model that the pruned one should have at the same place. A layer whose
result is added to values that are known already is asked for the dense sum less these, so that errors of earlier layers
are repaired instead of passed on.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from hap.graph.nodes import arguments, is_sum, shape_of, short_name
from hap.graph.operator_families import CONVOLUTIONS, TRANSPOSED, Trait, having
from hap.planning.plan import Plan
from hap.refit.graph_run import Graph

SAME = having(Trait.UNCHANGED) | {"dropout", "feature_dropout", "alpha_dropout"}
LINEAR = {"linear", "addmm"} | CONVOLUTIONS | TRANSPOSED
NORMS = frozenset({"batch_norm", "layer_norm", "rms_norm", "group_norm", "instance_norm"})
CHANNELS_LAST = frozenset({"linear", "addmm", "layer_norm", "rms_norm"})


@dataclass(frozen=True)
class Way:
    """What happens to the result of a layer before it is read: an affine norm, a wider stream, sums with others.

    Row i of the layer's result is channel `places[i]` at the `end`. `steps` tells norms and sums, in order.
    """

    end: fx.Node
    axis: int
    places: Tensor
    norm: fx.Node | None = None
    others: tuple[fx.Node, ...] = ()
    steps: str = ""


@dataclass(frozen=True)
class Layer:
    """A node of the pruned graph whose parameters are refitted, and the node of the dense graph that it is to match.

    Row i of the layer is channel `rows[i]` of the dense one. `rectified`: only a ReLU reads what it adds to.
    """

    node: fx.Node
    weight: str
    way: Way
    target: fx.Node
    target_axis: int
    rows: Tensor

    @property
    def name(self) -> str:
        return self.weight.rpartition(".")[0] or self.weight

    @property
    def is_norm(self) -> bool:
        return short_name(self.node) in NORMS

    @property
    def input(self) -> fx.Node:
        return data_of(self.node)

    @property
    def rectified(self) -> bool:
        users = list(self.way.end.users)
        return len(users) == 1 and users[0].op == "call_function" and short_name(users[0]) == "relu"


@dataclass
class Work:
    """What is refitted, in order, and what is left, with the reason."""

    layers: list[Layer] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def data_of(node: fx.Node) -> fx.Node:
    """What a layer reads, besides its parameters."""
    found = arguments(node)["mat1" if short_name(node) == "addmm" else "input"]
    assert isinstance(found, fx.Node)
    return found


def weight_name(node: fx.Node, graph: Graph) -> str | None:
    """The parameter that a layer is the weight of; None for anything that is no layer with a weight of its own."""
    if node.op != "call_function" or short_name(node) not in LINEAR | NORMS:
        return None
    return graph.parameters.get(arguments(node)["mat2" if short_name(node) == "addmm" else "weight"])


def bias_name(node: fx.Node) -> str:
    """The argument of a layer that is added to its result."""
    return "input" if short_name(node) == "addmm" else "bias"


def plan_work(pruned: Graph, dense: Graph, plan: Plan) -> Work:
    """Layers to refit, in the order in which data flows. Short branches come before the longer ones that they join."""
    work, matcher = Work(), _Matcher(pruned, dense, plan)
    for node in in_order(pruned):
        weight = weight_name(node, pruned)
        if weight is not None and node not in matcher.absorbed:
            found = matcher.match(node, weight)
            if isinstance(found, Layer):
                work.layers.append(found)
                matcher.absorbed.add(found.way.norm)
            else:
                work.left[weight.rpartition(".")[0]] = found
        matcher.done.add(node)
    return work


class _Matcher:
    """Finds the counterparts of layers. `done` are the nodes that stand before, `absorbed` norms of other layers."""

    def __init__(self, pruned: Graph, dense: Graph, plan: Plan):
        self.pruned, self.dense = pruned, dense
        self.kept = {(cut.name, cut.dim): torch.tensor(cut.keep) for cut in plan.cuts}
        self.grafts = plan.grafts
        self.done: set[fx.Node] = set()
        self.absorbed: set[fx.Node | None] = set()

    def match(self, node: fx.Node, weight: str) -> Layer | str:
        """The layer, or why it cannot be refitted."""
        if len(self.pruned.readers(weight)) > 1:
            return "its weight is used more than once"
        graft = next((g for g in self.grafts if weight.startswith(f"{g.module}.implant.")), None)
        original = weight if graft is None else graft.weight
        twins = self.dense.readers(original)
        if len(twins) != 1 or weight_name(twins[0], self.dense) != original:
            return "the dense model has no counterpart"
        shape = shape_of(node)
        if len(shape) < 2:
            return "its result has channels alone"
        channels = shape[channel_axis(node)]
        if short_name(node) in NORMS and self.pruned.tensors[weight].shape != (channels,):
            return "its weights do not lie along the channels"
        axis = 1 if short_name(node) in TRANSPOSED | {"addmm"} else 0
        rows = self.kept.get((original, axis), torch.arange(channels)) if graft is None else torch.tensor(graft.rows)
        if len(rows) != channels:
            return "its rows have no counterparts"
        mine, theirs = stages(node, self.pruned, self.done), stages(twins[0], self.dense, None)
        if graft is not None and not any(way.places[0] != 0 for way in mine):
            return "it is an inner layer of an implant"
        steps = max((w.steps for w in theirs if w.steps in {m.steps for m in mine}), key=len)
        way = [w for w in mine if w.steps == steps][-1]
        target = [w for w in theirs if w.steps == steps][-1]
        if not _same_positions(way, target):
            return "units went along the axes that it runs over"
        return Layer(node, weight, way, target.end, target.axis, rows)


def channel_axis(node: fx.Node) -> int:
    """The axis of a layer's result along which its channels lie."""
    name, axes = short_name(node), len(shape_of(node))
    if name in CONVOLUTIONS | TRANSPOSED:
        return axes - 1 - int(name[-2])
    return axes - 1 if name in CHANNELS_LAST else 1


def _same_positions(one: Way, other: Way) -> bool:
    """Whether two values have the same positions: axes besides that of the channels, or these made one."""
    first, second = ([n for i, n in enumerate(shape_of(way.end)) if i != way.axis] for way in (one, other))
    last = all(way.axis == len(shape_of(way.end)) - 1 for way in (one, other))
    return first == second or (last and math.prod(first) == math.prod(second))


def stages(node: fx.Node, graph: Graph, done: set[fx.Node] | None) -> list[Way]:
    """How far a layer's result can be followed past what treats all channels alike, step by step.

    `done` are the nodes whose values are final, which may be added on the way; None for all.
    """
    axis = channel_axis(node)
    found = [Way(node, axis, torch.arange(shape_of(node)[axis]))]
    while (following := _next(found[-1], graph, done)) is not None:
        found.append(following)
    return found


def _next(way: Way, graph: Graph, done: set[fx.Node] | None) -> Way | None:
    users = [u for u in way.end.users if u.op != "call_function" or short_name(u) != "_assert_tensor_metadata"]
    if len(users) != 1 or users[0].op != "call_function":
        return None
    user, name, shape = users[0], short_name(users[0]), shape_of(way.end)
    if name in SAME and shape_of(user) == shape:
        return replace(way, end=user)
    if name in {"cat", "index_copy", "index_select"} and arguments(user)["dim"] % len(shape) == way.axis:
        places = _moved(way, user, graph)
        return None if places is None else replace(way, end=user, places=places)
    if name == "batch_norm" and not way.steps and way.axis == 1 and _own_norm(user, graph):
        return replace(way, end=user, norm=user, steps="n")
    if name == "add" and is_sum(user) and arguments(user).get("alpha") == 1:
        first, second = user.args[:2]
        other = second if first is way.end else first
        assert isinstance(other, fx.Node)
        if first is not second and shape_of(other) == shape and (done is None or _is_final(other, graph, done)):
            return replace(way, end=user, others=(*way.others, other), steps=f"{way.steps}+")
    return None


def _moved(way: Way, user: fx.Node, graph: Graph) -> Tensor | None:
    """Where the rows stand after their channels are put beside others, among zeros or into another order."""
    given = arguments(user)
    if short_name(user) == "cat":
        before = given["tensors"][: given["tensors"].index(way.end)]
        return way.places + sum(shape_of(part)[way.axis] for part in before)
    index = graph.fixed(given["index"])
    if index is None:
        return None
    if short_name(user) == "index_copy":
        return index[way.places] if given["source"] is way.end else None
    return torch.argsort(index)[way.places] if len(index) == shape_of(way.end)[way.axis] else None


def _own_norm(node: fx.Node, graph: Graph) -> bool:
    weight = weight_name(node, graph)
    given = arguments(node)
    return (
        weight is not None and not given["training"] and len(graph.readers(weight)) == 1 and given["bias"] is not None
    )


def _is_final(node: fx.Node, graph: Graph, done: set[fx.Node]) -> bool:
    """Whether all layers that a value depends on stand before."""
    waiting, seen = [node], set(done)
    while waiting:
        if (current := waiting.pop()) not in seen:
            seen.add(current)
            if weight_name(current, graph) is not None:
                return False
            waiting += current.all_input_nodes
    return True


def in_order(graph: Graph) -> Iterator[fx.Node]:
    """The nodes that the output depends on, each after what it reads; of two that are added, the shorter way first."""
    depth = _depths(graph)
    seen: set[fx.Node] = set()
    waiting: list[tuple[fx.Node, bool]] = [(graph.output, False)]
    while waiting:
        node, ready = waiting.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            reads = node.all_input_nodes
            if node.op == "call_function" and is_sum(node):
                reads = sorted(reads, key=lambda n: depth[n])
            waiting += [(n, False) for n in reversed(reads)]


def _depths(graph: Graph) -> dict[fx.Node, int]:
    """How many layers stand one behind another in front of a node, at most."""
    depth: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        most = max((depth[a] for a in node.all_input_nodes), default=0)
        depth[node] = most + (node.op == "call_function" and short_name(node) in LINEAR)
    return depth

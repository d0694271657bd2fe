"""From labels to `Groups`: classes, units by the weights that compute them, and all that planning and surgery ask."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from hap.errors import HapError
from hap.graph.nodes import is_pointwise, schema_name, short_name
from hap.groups.components import occurring
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import heads
from hap.groups.types import Frozen, Group, Ints, Producer, Rewiring, SizeAttribute, TracedCosts, Traits
from hap.groups.unprunable_summary import layer_of
from hap.tracing.context import RuleContext
from hap.tracing.label_classes import classes_of_produced
from hap.tracing.labels import LabelStore, concatenated, long_axes, varying_axes
from hap.tracing.rules.registry import NO_RULE, RULES
from hap.tracing.rules.structural import structural
from hap.tracing.training_branches import ALONE
from hap.tracing.zero_padding import pad_with_zeros

OUTPUT = "an output of the model"
STREAM = "the residual stream; ask for it with stream=True"
ASKED = "left alone as asked"
EXPECTED = frozenset((OUTPUT, STREAM, ASKED, ALONE))
"""Why something stays that nobody expects to go."""
NEVER_CUT = "meets something that is never cut"
NOT_KNOWN = "uses a weight in a way that is not understood"


class GroupsBuilder:
    """Builds the groups of a walk, as often as more of its labels are frozen. `root` has the class of every label."""

    def __init__(self, context: RuleContext, coupling: str, example: Any, stream: bool):
        self.context, self.store = context, context.store
        self.coupling, self.example, self.stream = coupling, example, stream
        self.root: Ints = np.zeros(1, dtype=np.int64)

    def build(self) -> Groups:
        """The groups as the labels are now. Where zeros cannot stand in for what is held, that is frozen."""
        context, store, root = self.context, self.store, classes_of_produced(self.store)
        self.root = root
        axes = {key: root[labels] for key, labels in store.axes.items()}
        edges = [concatenated([s.narrow for s in store.streams]), concatenated([s.wide for s in store.streams])]
        feeds = np.unique(root[np.stack(edges, axis=1)], axis=0)
        costs, norms, flow = context.costs, context.norms, context.flow
        uses = Counter(term.weight for term in costs.weights)
        shared = next((w for w, n in uses.items() if n > 1), None)
        whole = [x for x, dims in flow.seen_whole if (varying := varying_axes(root[x])) and varying.isdisjoint(dims)]
        untouched = _untouched(context, axes, self.stream)
        groups = Groups(
            coupling=self.coupling,
            groups=_group_units(store, axes, feeds),
            axes=axes,
            classes=store.count,
            feeds=feeds,
            shapes=context.index.shapes,
            trainable=context.index.trainable,
            costs=TracedCosts(
                weight_macs=tuple(costs.weights),
                activation_macs=tuple(costs.activations),
                fixed_macs=costs.fixed,
                written_values=tuple(flow.written),
                uncounted=tuple(sorted(costs.uncounted)),
            ).relabelled(root),
            rewiring=Rewiring(
                size_attributes=tuple(context.wiring.attributes),
                input_selections=tuple(context.wiring.selections),
                output_scatters=tuple(store.streams),
            ).relabelled(root),
            traits=Traits(
                spanned=frozenset(_removable(root, norms.spanned)),
                in_activation_products=frozenset(_removable(root, flow.operands)),
                whole_matrices=frozenset(_removable(root, whole)),
            ),
            used_once=frozenset(w for w in costs.direct if uses[w] == 1),
            conv_geometry={w: s for w, s in costs.geometries.items() if uses[w] == 1},
            batchnorm_weights=tuple(dict.fromkeys(norms.scales)),
            frozen=tuple(dict.fromkeys([*(cause for _, cause in store.causes), *untouched.values()])),
            unprunable=untouched,
            curved=costs.curved or (shared and f"{shared} is used twice"),
            example=self.example,
        )
        held = np.unique(root[concatenated([labels for labels, _ in store.held])])
        groups, unable = pad_with_zeros(groups, held, context.index, context.wiring.used_inside)
        self.root = np.where(np.isin(root, list(groups.traits.zero_padded)), 0, root)
        for labels, about in store.held:
            store.freeze(labels[np.isin(root[labels], unable)], about.what, about.why)
        return self.build() if len(unable) else groups

    def settle(self, ignore: Sequence[str]) -> Groups:
        """The groups without those to `ignore` and, unless it was asked for, without the residual stream."""
        groups, norms = self.build(), self.context.norms
        doubtful = np.intersect1d(self.root[concatenated(norms.averaged)], self.sized_classes())
        if len(doubtful):  # values change with an average
            self.store.hold(doubtful, "an average over channels", "they are reshaped too, and no run could tell how")
            groups = self.build()
        stream = norms.stream(self.root)
        if len(stream) and not self.stream:
            names = [n for n, g in groups.items() if np.isin(g.classes, stream).any()]
            self.store.freeze(stream, ", ".join(names), STREAM)
            groups = self.build()
        ignored = groups.matching(ignore, "ignore")
        return self.build_without(groups, dict.fromkeys(ignored, ASKED)) if ignored else groups

    def build_without(self, groups: Groups, reasons: Mapping[str, str]) -> Groups:
        """The groups once these are frozen, each for a reason."""
        for name, why in reasons.items():
            self.store.freeze(groups[name].classes, name, why)
        return self.build()

    def build_with_padding(self, groups: Groups, reasons: Mapping[str, str]) -> tuple[Groups, list[str]]:
        """The groups without these, or with zeros that stand in for those of heads: which these are, to be tried."""
        held = [n for n in reasons if n in heads(groups) and not groups.pads(n)]
        for name in held:
            self.store.hold(groups[name].classes, name, reasons[name])
        found = self.build_without(groups, {name: why for name, why in reasons.items() if name not in held})
        return found, [n for n in held if n in found]

    # ---- what a trial asks ----------------------------------------------------------------------------------

    def classes_of(self, node: fx.Node) -> Ints | None:
        """The class of each position of a node's result, with size 1 along axes where it does not vary."""
        labels = self.context.values.get(node)
        return self.root[labels.numpy()] if isinstance(labels, Tensor) else None

    def counting_attributes(self) -> list[SizeAttribute]:
        """Integers of modules that equal the length of an axis of what is reshaped or split there, like `num_heads`."""
        found: dict[tuple[str, str, int], dict[bytes, Ints]] = {}
        modules = self.context.index.modules
        for it in (x for x in self.store.rectangular if x.labels.numel() and x.module in modules):
            grid = self.root[it.labels.numpy()]
            if len(varying := [*varying_axes(grid)]) == 1:
                classes = np.moveaxis(grid, varying[0], 0).reshape(grid.shape[varying[0]], -1)[:, 0].copy()
                for attribute, entry in _integers(modules[it.module], len(classes), it.part):
                    found.setdefault((it.module, attribute, entry), {})[classes.tobytes()] = classes
        return [
            SizeAttribute(module, attribute, classes, entry=entry, axis=axis)
            for (module, attribute, entry), axes in found.items()
            for axis, classes in enumerate(axes.values())
        ]

    def sized_classes(self) -> Ints:
        """Classes that pass through an operator with sizes among its arguments, such as a view or a split."""
        return np.array(_removable(self.root, self.context.wiring.sized), np.int64)

    def sliced_classes(self) -> Ints:
        """Classes of tensors that are sliced along an axis that is cut. An end beyond what is left raises nothing."""
        cut = [labels for labels, dim in self.context.wiring.sliced if dim in varying_axes(self.root[labels])]
        return np.array(_removable(self.root, cut), np.int64)


def _integers(module: nn.Module, size: int, part: int | None) -> Iterator[tuple[str, int]]:
    """The attributes of a module, and the entries in tuples among them, that equal a size: that of `part` i of a tensor
    that is split is in entry i. `nn.MultiheadAttention` has a way of its own with fewer heads."""
    own = {"num_heads": module.num_heads} if isinstance(module, nn.MultiheadAttention) else vars(module)
    for attribute, value in own.items():
        several = isinstance(value, tuple | list)
        for entry, number in enumerate(value if several else [value]):
            if type(number) is int and number == size and (part in (None, entry) or not several):
                yield attribute, entry


def _removable(root: Ints, labels: Iterable[Ints]) -> list[int]:
    """The classes of these labels, without that of what is never removed."""
    return [c for c in np.flatnonzero(occurring(len(root), (root[some] for some in labels))).tolist() if c]


def _group_units(store: LabelStore, axes: dict[tuple[str, int], Ints], feeds: Ints) -> dict[str, Group]:
    """Units by the first weight that computes them, with all weights that compute or read them."""
    owner = np.full(store.count, -1, dtype=np.int64)
    unit = np.full(store.count, -1, dtype=np.int64)
    homes: list[tuple[tuple[str, int], Ints]] = []
    for key in (k for k, role in store.roles.items() if role == "out"):
        classes = np.array([c for c in dict.fromkeys(axes[key].tolist()) if c and owner[c] < 0], dtype=np.int64)
        if len(classes):
            owner[classes], unit[classes] = len(homes), np.arange(len(classes))
            homes.append((key, classes))
    producers: list[list[Producer]] = [[] for _ in homes]
    consumers: list[list[tuple[str, int]]] = [[] for _ in homes]
    for key, labels in axes.items():
        if store.roles[key] == "out":
            for g in np.unique(owner[labels[owner[labels] >= 0]]):
                producers[g].append(Producer(*key, np.where(owner[labels] == g, unit[labels], -1)))
        elif store.roles[key] == "in":
            read = np.append(labels, feeds[np.isin(feeds[:, 1], labels[labels > 0]), 0])
            for g in np.unique(owner[read[owner[read] >= 0]]):
                consumers[g].append(key)
    modules = Counter(key[0].rpartition(".")[0] for key, _ in homes)
    groups: dict[str, Group] = {}
    for g, (key, classes) in enumerate(homes):
        module = key[0].rpartition(".")[0]
        name = module if module and modules[module] == 1 else key[0]  # a module with several weights names them
        if name in groups:
            raise HapError(f"{key[0]} is taken to compute units along two of its axes, which is an error of HAP")
        groups[name] = Group(name, classes, tuple(producers[g]), tuple(consumers[g]))
    return groups


# ---- what stays whole that a user would expect to shrink -------------------------------------------------------------


def _untouched(context: RuleContext, axes: dict[tuple[str, int], Ints], stream: bool) -> dict[str, Frozen]:
    """The parameters that no class of `axes` cuts though one could expect it, each with a reason.

    Not expected are what a model gives out, the residual `stream` unless it was asked for, what is left alone as asked,
    and what training alone runs. All that is frozen is one class, so labels are joined once more without that class.
    """
    index, store = context.index, context.store
    root = store.bonded()
    reason = np.full(len(root), len(store.causes))
    for number, (labels, _) in enumerate(store.causes):
        reason[root[labels]] = np.minimum(reason[root[labels]], number)
    expected = occurring(len(root), (root[labels] for labels, cause in store.causes if cause.why in EXPECTED))
    expected[0] = True
    if not stream:
        expected[context.norms.stream(root)] = True
    cut = {name for (name, _), classes in axes.items() if classes.any()}
    readers: dict[str, list[fx.Node]] = {}
    for node, name in index.parameters.items():
        readers.setdefault(name, []).extend(node.users)
    found = {}
    for name in sorted(n for n in index.trainable - cut if readers.get(n)):
        dims = long_axes(index.shapes[name])
        seen = [(name, d) for d in dims if (name, d) in store.axes and store.axes[name, d].any()]
        stays = {key: x[~expected[x]] for key in seen if not expected[x := root[store.axes[key]]].all()}
        first = reason[concatenated([*stays.values()])].min(initial=len(store.causes))
        if first < len(store.causes):
            found[name] = store.causes[first][1]
        elif any(store.roles[key] == "out" for key in stays):
            found[name] = Frozen(layer_of(name), NEVER_CUT)
        elif dims and not seen and all(store.roles.get((name, d), "free") == "free" for d in dims):
            found[name] = _unknown_use(readers[name])
    return found


def _unknown_use(readers: list[fx.Node]) -> Frozen:
    """The first operator that computes with a weight, which may be moved before, and has no rule; or else the first."""
    computing = []
    for node in readers:
        while RULES.get(schema_name(node)) is structural and node.users:
            node = next(iter(node.users))
        computing.append(node)
    unknown = [n for n in computing if schema_name(n) not in RULES and not is_pointwise(n)]
    return Frozen(short_name((unknown or computing)[0]), NO_RULE if unknown else NOT_KNOWN)

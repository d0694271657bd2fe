"""trace: model -> groups, by pushing labels through the operator graph that torch.export captures."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import OutputKind
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from hap.errors import Argument, HapError
from hap.execution.calling import describe
from hap.graph.capture import Captured, capture, check_runs
from hap.graph.index import GraphIndex
from hap.graph.nodes import ends_branch, is_sum, keeps_zero, short_name
from hap.graph.shared_tables import CalledArguments, TableUse
from hap.groups.components import components, distinct, merged, occurring
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import heads
from hap.groups.types import (
    ActivationMacs,
    ConvGeometry,
    Frozen,
    Group,
    InputSelection,
    Ints,
    OutputScatter,
    Producer,
    Rewiring,
    SizeAttribute,
    TracedCosts,
    Traits,
    WeightMacs,
)
from hap.tracing import weight_views
from hap.tracing.rules import products, registry
from hap.tracing.training_branches import ALONE, TrainingOnly, training_only, warn_of_idle
from hap.tracing.unprunable import ASKED, OUTPUT, STREAM, find_untouched
from hap.tracing.weight_views import View
from hap.tracing.zero_padding import pad_with_zeros
from hap.trials.repeated_blocks import find_repeats
from hap.trials.run_round import Subject
from hap.trials.search import find_unprunable
from hap.utils.gc_pause import gc_paused
from hap.verification.informative_inputs import informative_example

COUPLINGS = ("joint", "union")
SHARED = (
    "axes", "roles", "edges", "bonds", "causes", "feeds", "scatters", "frozen", "held", "partial", "counted", "shaped",
)  # fmt: skip
"""What a second graph of the same model adds to."""
UNTOLD = "the example does not show how it is split into heads; trace with several different tokens"


@gc_paused()
def trace(model: nn.Module, example: Any, coupling: str = "joint", ignore: Sequence[str] = (),
          stream: bool = False) -> Groups:  # fmt: skip
    """Find what can be removed from `model`, and what must go together.

    `coupling` says what happens where branches add up. "joint": a channel goes from all branches or none. "union":
    each branch loses its own channels and the sum keeps the union (the paper's way).
    `ignore` holds names or shell patterns of groups to leave alone. The residual stream of a transformer, which a norm
    spans, is left alone unless `stream` asks for it. The model is not changed.
    """
    if coupling not in COUPLINGS:
        seen = Argument("coupling", coupling, text="coupling")
        raise HapError(seen, f" is {coupling!r}; expected one of {', '.join(map(repr, COUPLINGS))}")
    return trace_captured(capture(model, example), model, example, coupling, ignore, stream)


@gc_paused()
def trace_captured(captured: Captured, model: nn.Module, example: Any, coupling: str, ignore: Sequence[str],
                   stream: bool) -> Groups:  # fmt: skip
    """The same for a model that is captured already."""
    shapes = captured.shapes
    tracer = Tracer(model, captured.program, captured.called, coupling)
    tracer.run()
    branches, unread = training_only(model, example, tracer.index.unread())
    if branches is not None:
        tracer.include(branches)
    groups = tracer.settle(describe(example), ignore, stream)
    counting = tracer.counting_attributes()
    repeats = find_repeats(tracer.index, tracer.classes_of, groups, counting, shapes)
    telling = informative_example(model, example)
    sized, sliced = tracer.sized_classes(), tracer.sliced_classes()
    result = find_unprunable(Subject(model, telling, groups, sized, sliced, counting, repeats))
    if result.unprunable and not result.ran:  # is it the size, or does nothing run at all?
        check_runs(model, example)
    if result.indistinguishable:
        _warn_of(result.indistinguishable)
    tracer.lengths += result.followers
    reasons = result.unprunable | dict.fromkeys(result.indistinguishable, UNTOLD)
    if reasons or (result.followers and groups.traits.zero_padded):
        groups = tracer.without(groups, reasons, model, telling, shapes)
    elif result.followers:
        groups = groups.with_rewiring(size_attributes=result.followers)
    if branches is not None and (unfit := branches.misfits(groups)):
        for name, why in unfit.items():
            tracer.freeze(groups[name].classes, name, why)
        groups = tracer.finish(groups.example)
    warn_of_idle(model, groups, unread)
    return groups


def _warn_of(names: Sequence[str]) -> None:
    those = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    warnings.warn(
        f"the example does not show how {those} {'is' if len(names) == 1 else 'are'} split into heads: any "
        "split would do on one token, or on tokens that are all alike. So zeros stand in for the heads that go, or "
        "none go. Trace with several different tokens to remove them whole",
        stacklevel=6,
    )


def _alike(grid: Ints, dims: list[int]) -> bool:
    """Whether the entries are the same all along these axes."""
    return all(np.array_equal(grid, np.broadcast_to(grid.take([0], d), grid.shape)) for d in dims)


def _several(grid: Ints, dims: list[int]) -> bool:
    """Whether the entries are the same all along these axes, and not along all."""
    return _alike(grid, dims) and not _alike(grid, list(range(grid.ndim)))


def _removable(root: Ints, labels: list[Ints]) -> frozenset[int]:
    """The classes of these labels, without that of what is never removed."""
    return frozenset(np.flatnonzero(occurring(len(root), (root[some] for some in labels))).tolist()) - {0}


def _ends(edges: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """The first and the second ends of all edges."""
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *(a for a, _ in edges)]), np.concatenate([none, *(b for _, b in edges)])


def _countable(module: nn.Module | None) -> list[tuple[str, Any]]:
    """A module's own attributes. `nn.MultiheadAttention` has a way of its own with fewer heads."""
    if isinstance(module, nn.MultiheadAttention):
        return [("num_heads", module.num_heads)]
    return list(vars(module).items()) if module is not None else []


class Tracer:
    """Holds the labels while the rules run. Rules call `labels`, `axis`, `tie`, `join`, `freeze` and `set_*`."""

    def __init__(self, model: nn.Module, program: torch.export.ExportedProgram, called: CalledArguments, coupling: str):
        self.index = GraphIndex(model, program, called)
        self.entered: dict[tuple[fx.Node, TableUse | None], Tensor] = {}
        self.narrowings: list[InputSelection] = []
        self.reader: fx.Node | None = None
        self.coupling = coupling
        self.values: dict[fx.Node, Any] = {}
        self.views: dict[fx.Node, Any] = {}
        self.axes: dict[tuple[str, int], Ints] = {}
        self.roles: dict[tuple[str, int], str] = {}
        self.edges: list[tuple[Ints, Ints]] = []
        self.feeds: list[tuple[Ints, Ints]] = []
        self.scatters: list[OutputScatter] = []
        self.terms: list[WeightMacs] = []
        self.layers: dict[fx.Node, Any] = {}
        self.inside: dict[str, str] = {}
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self.sites: dict[str, ConvGeometry] = {}
        self.frozen: list[Frozen] = []
        self.causes: list[tuple[Ints, Frozen]] = []
        self.bonds: list[tuple[Ints, Ints]] = []
        self.stream = False
        self.lengths: list[SizeAttribute] = []
        self.fixed_macs = 0
        self.uncounted: set[str] = set()
        self.products: list[ActivationMacs] = []
        self.met: list[Ints] = []
        self.mixes: dict[fx.Node, bool] = {}
        self.whole: list[tuple[Ints, list[int]]] = []
        self.scales: list[str] = []
        self.spanned: list[Ints] = []
        self.summed: list[Ints] = []
        self.normed: list[Ints] = []
        self.averaged: list[Ints] = []
        self.held: list[tuple[Ints, Frozen]] = []
        self.partial: list[tuple[Ints, Ints, list[int]]] = []
        self.counted: list[tuple[Ints, Ints, int]] = []
        self.sized: list[Ints] = []
        self.sliced: list[tuple[Ints, int]] = []
        self.shaped: list[tuple[str, Tensor, int | None]] = []
        self.curved: str | None = None
        self.root: Ints = np.zeros(1, dtype=np.int64)
        self._next = 1
        self._uses: Counter[str] = Counter()
        self._direct: set[str] = set()

    # ---- what rules use -------------------------------------------------------------------------------------

    def fresh(self, count: int) -> Ints:
        self._next += count
        return np.arange(self._next - count, self._next)

    def labels(self, node: fx.Node) -> Tensor:
        """The labels of a tensor: one integer per position, with size 1 along axes where they do not vary."""
        if node in self.index.parameters:
            return self._parameter_labels(self.index.parameters[node])
        entry = self.index.table_uses.get((node, self.reader)) if self.reader is not None else None
        return self._entered(node, entry) if node in self.index.tables else self.values[node]

    def _entered(self, table: fx.Node, entry: TableUse | None) -> Tensor:
        """The labels of a table inside a module that picks its own part of it along the one axis where it varies.

        The module that makes the table has no such way; it works with all of it.
        """
        if (table, entry) not in self.entered:
            labels = self.values[table]
            long = [d for d, size in enumerate(labels.shape) if size > 1]
            if len(long) == 1 and registry.varies(labels):
                self.freeze(labels, table.name, "shared by several modules, each of which picks its own part")
                own = self.fresh(labels.numel())
                if entry is None:
                    self.hold(own, table.name, "shared by several modules, of which this one makes it")
                else:
                    self.narrowings.append(InputSelection(entry.module, entry.argument, long[0], own))
                labels = torch.from_numpy(own).view(labels.shape)
            self.entered[table, entry] = labels
        return self.entered[table, entry]

    def _parameter_labels(self, name: str) -> Tensor:
        """A vector (up to size-1 axes) carries labels of its own; a matrix used freely may not be cut at all."""
        shape = self.index.shapes[name]
        long = [d for d, size in enumerate(shape) if size > 1]
        if len(long) != 1:
            for d in long:
                self.tie(name, d, np.zeros(shape[d], dtype=np.int64), "free")
            return torch.zeros([1] * len(shape), dtype=torch.int64)
        return registry.labels_on_axis(self.axis(name, long[0]), len(shape), long[0])

    def axis(self, parameter: str, dim: int, role: str = "free") -> Ints:
        """The labels of a parameter axis, made on first use."""
        key = (parameter, dim)
        if key not in self.axes:
            self.axes[key] = self.fresh(self.index.shapes[parameter][dim])
            self.roles[key] = "free"
        if role != "out" or parameter in self.index.trainable:  # a fixed filter in a buffer produces, but owns no unit
            self.roles[key] = role if role != "free" else self.roles.get(key, role)
        return self.axes[key]

    def tie(self, parameter: str, dim: int, labels: Ints, role: str) -> None:
        """Index i of this parameter axis shares the fate of labels[i]."""
        key = (parameter, dim)
        if key in self.axes:
            self.join(self.axes[key], labels)
        self.axes.setdefault(key, labels)
        self.roles.setdefault(key, role if role != "out" or parameter in self.index.trainable else "free")

    def join(self, a: Ints, b: Ints) -> None:
        a, b = (x.ravel() for x in np.broadcast_arrays(a, b))
        different = np.flatnonzero(a != b)
        if len(different):
            self.edges.append((a[different], b[different]))
        between = different[(a[different] != 0) & (b[different] != 0)]
        if len(between):
            self.bonds.append((a[between], b[between]))

    def freeze(self, labels: Tensor | Ints, what: str, why: str) -> None:
        flat = distinct(labels)
        if (flat != 0).any():
            self.frozen.append(Frozen(what, why))
            self.causes.append((flat[flat != 0], self.frozen[-1]))
            self.join(flat, np.zeros_like(flat))

    def hold(self, labels: Tensor | Ints, what: str, why: str) -> None:
        """These stay as many as they are: zeros stand in for those that go if they are heads, others are frozen."""
        self.held.append((distinct(labels), Frozen(what, why)))

    def parameter(self, node: Any) -> str | None:
        return self.index.parameter(node)

    def module(self, node: fx.Node) -> str:
        return self.index.module(node)

    def contraction(self, node: fx.Node, view: View, positions: int) -> None:
        """A layer multiplies each element of a weight so many times."""
        weight = view.name
        self._uses[weight] += 1
        layer = self.index.modules.get(self.module(node))
        plain = view.whole and not view.spans and f"{self.module(node)}.weight" == weight
        if plain and isinstance(layer, _ConvNd | nn.Linear):
            self._direct.add(weight)
        if short_name(node) == "linear" and view.whole and self._is_inside(weight, node):
            self.inside[weight] = self.module(node)
        part = None if view.whole else tuple(zip(view.dims, view.index, strict=True))
        self.terms.append(WeightMacs(weight, positions, part))
        self.layers[node] = None  # its labels, once they are there

    def _is_inside(self, weight: str, node: fx.Node) -> bool:
        """Whether a module's own forward uses the weight of a layer in it, which it does not call."""
        owner, outer = weight.rpartition(".")[0], self.module(node)
        return owner != outer and f"{owner}.".startswith(f"{outer}." if outer else "")

    # ---- the walk -------------------------------------------------------------------------------------------

    def run(self) -> None:
        anchors = self._anchors() if self.coupling == "union" else {}
        for node in self.index.program.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and node not in self.index.parameters and isinstance(value, Tensor):
                self.values[node] = torch.zeros([1] * value.ndim, dtype=torch.int64)
        self.views = weight_views.find_views(self, self.index.program.graph)
        for node in self.index.program.graph.nodes:
            if node.op == "placeholder" or node in self.views:  # a layer asks for views when it gets there
                continue
            if node.op == "call_function":
                self.reader = node
                self.values[node] = registry.apply(self, node)
                if node in self.layers:
                    self.layers[node] = self.values[node]
                if node in anchors:
                    self.values[node] = self._promote(anchors[node], self.values[node])
            elif node.op == "output":
                self._outputs()
        self.met += products.read_from_products(self)

    def include(self, branches: TrainingOnly) -> None:
        """Cut what runs in training alone with what it reads. What it computes for itself stays.

        Labels go through the graph of training as they went through this one, and meet in the same parameters. What
        that graph costs, and what it shows of heads and norms, does not count: the model is evaluated by the other.
        """
        if (captured := branches.captured()) is None:
            return
        other = Tracer(branches.model, captured.program, captured.called, self.coupling)
        for name in SHARED:
            setattr(other, name, getattr(self, name))
        other._next = self._next
        other.run()
        self._next = other._next
        known = {x.module for x in self.lengths}
        self.lengths += [x for x in other.lengths if x.module not in known]
        own = [key for key in self.axes if key[0] in branches.parameters]
        self.roles.update({key: "free" for key in own if self.roles[key] == "out"})
        root = self._resolve()
        made = np.concatenate([np.zeros(1, np.int64), *(root[x] for x in self._made())])
        for key in own:
            self.freeze(self.axes[key][~np.isin(root[self.axes[key]], made)], branches.branch(key[0]), ALONE)

    def _made(self) -> list[Ints]:
        """The labels that layers compute."""
        return [labels for key, labels in self.axes.items() if self.roles[key] == "out"] + [w for _, w in self.feeds]

    def _outputs(self) -> None:
        by_name = {n.name: n for n in self.index.program.graph.nodes}
        for spec in self.index.program.graph_signature.output_specs:
            node = by_name.get(getattr(spec.arg, "name", ""))
            if spec.kind is OutputKind.USER_OUTPUT and node is not None and isinstance(self.values.get(node), Tensor):
                self.freeze(self.values[node], self.module(node) or node.name, OUTPUT)

    def _anchors(self) -> dict[fx.Node, str]:
        """Where `union` coupling can widen a branch: the module before a sum, past operators that keep zero zero."""
        found = {}
        for node in self.index.program.graph.nodes:
            if node.op == "call_function" and is_sum(node):
                for operand in node.args[:2]:
                    while isinstance(operand, fx.Node) and keeps_zero(operand):
                        operand = operand.args[0]
                    module = self.index.called_once(operand) if isinstance(operand, fx.Node) else None
                    if module and ends_branch(operand) and isinstance(self.index.modules[module], _ConvNd | _NormBase):
                        found[operand] = module
        return found

    def _promote(self, module: str, labels: Tensor) -> Tensor:
        narrow = labels.flatten().numpy()
        if labels.shape[1:2] != labels.flatten().shape:  # channels must sit on axis 1, one label each
            return labels
        known = next((s for s in self.scatters if s.module == module), None)  # from another graph of the same model
        if known is not None:
            self.join(narrow, known.narrow)
            return torch.from_numpy(known.wide).view(labels.shape)
        wide = self.fresh(len(narrow))
        self.feeds.append((narrow, wide))
        self.scatters.append(OutputScatter(module, narrow, wide))
        return torch.from_numpy(wide).view(labels.shape)

    # ---- from labels to groups ------------------------------------------------------------------------------

    def finish(self, example: Any) -> Groups:
        root = self.root = self._resolve_all()
        axes = {key: root[labels] for key, labels in self.axes.items()}
        edges = [np.stack([root[narrow], root[wide]], axis=1) for narrow, wide in self.feeds]
        feeds = np.unique(np.concatenate([np.zeros((0, 2), np.int64), *edges]), axis=0)
        shared = next((w for w, n in self._uses.items() if n > 1), None)
        untouched = find_untouched(self, axes, self._next)
        groups = Groups(
            coupling=self.coupling,
            groups=self._groups(axes, feeds),
            axes=axes,
            classes=self._next,
            feeds=feeds,
            shapes=self.index.shapes,
            trainable=self.index.trainable,
            costs=TracedCosts(
                weight_macs=tuple(self.terms),
                activation_macs=tuple(ActivationMacs(root[p.classes], p.positions) for p in self.products),
                fixed_macs=self.fixed_macs,
                written_values=tuple(self._written(root)),
                uncounted=tuple(sorted(self.uncounted)),
            ),
            rewiring=Rewiring(
                size_attributes=tuple(replace(x, classes=root[x.classes]) for x in self.lengths),
                input_selections=tuple(replace(x, classes=root[x.classes]) for x in self.narrowings),
                output_scatters=tuple(OutputScatter(s.module, root[s.narrow], root[s.wide]) for s in self.scatters),
            ),
            traits=Traits(
                spanned=_removable(root, self.spanned),
                in_activation_products=_removable(root, self.met),
                whole_matrices=_removable(root, [x.ravel() for x, dims in self.whole if _several(root[x], dims)]),
            ),
            used_once=frozenset(w for w in self._direct if self._uses[w] == 1),
            conv_geometry={w: s for w, s in self.sites.items() if self._uses[w] == 1},
            batchnorm_weights=tuple(dict.fromkeys(self.scales)),
            frozen=tuple(dict.fromkeys([*self.frozen, *untouched.values()])),
            unprunable=untouched,
            curved=self.curved or (shared and f"{shared} is used twice"),
            example=example,
        )
        held = np.unique(root[np.concatenate([np.zeros(1, np.int64), *(labels for labels, _ in self.held)])])
        groups, unable = pad_with_zeros(groups, held, self.index.called, self.index.modules, self.inside)
        self.root = np.where(np.isin(root, list(groups.traits.zero_padded)), 0, root)
        if not len(unable):
            return groups
        for labels, about in self.held:
            if np.isin(root[labels], unable).any():
                self.freeze(labels[np.isin(root[labels], unable)], about.what, about.why)
        return self.finish(example)

    def _written(self, root: Ints) -> Iterator[ActivationMacs]:
        """What the layers write: as many values for each label of an output as it stands for."""
        for node, labels in self.layers.items():
            value = node.meta["val"]
            if isinstance(labels, list):  # a recurrent layer also returns its last states
                labels, value = labels[0], value[0]
            if isinstance(labels, Tensor) and labels.numel():
                yield ActivationMacs(root[labels.flatten().numpy()], value.numel() // labels.numel())

    def without(
        self, groups: Groups, misfits: Mapping[str, str], model: nn.Module, example: Any, shapes: Mapping[str, int]
    ) -> Groups:
        """The groups without those that a forward does not do without, for a reason.

        Of heads, zeros stand in for those that go.
        """
        whole = [n for n in misfits if n in heads(groups) and not groups.pads(n)]
        for name, why in misfits.items():
            (self.hold if name in whole else self.freeze)(groups[name].classes, name, why)
        found = self.finish(groups.example)
        if among := [n for n in whole if n in found]:
            repeats = find_repeats(self.index, self.classes_of, found, [], shapes)
            sized, sliced = self.sized_classes(), self.sliced_classes()
            wrong = find_unprunable(Subject(model, example, found, sized, sliced, repeats=repeats), among).unprunable
            for name, why in wrong.items():
                self.freeze(found[name].classes, name, why)
            found = self.finish(groups.example) if wrong else found
        return found

    def settle(self, example: Any, ignore: Sequence[str], stream: bool) -> Groups:
        """The groups without those to `ignore` and, unless `stream` asks for it, without the residual stream."""
        self.stream = stream
        groups = self.finish(example)
        if self._leave_averaged():
            groups = self.finish(example)
        if not stream and self._leave_stream(groups):
            groups = self.finish(example)
        if ignored := groups.matching(ignore, "ignore"):
            for name in ignored:
                self.freeze(groups[name].classes, name, ASKED)
            groups = self.finish(example)
        return groups

    def _leave_averaged(self) -> bool:
        """Freeze what is averaged over and also reshaped by size. Values change with an average, so that no run could
        tell whether the sizes are right."""
        averaged = self.root[np.concatenate([np.zeros(1, np.int64), *self.averaged])]
        doubtful = np.intersect1d(averaged, self.sized_classes())
        self.hold(doubtful, "an average over channels", "they are reshaped too, and no run could tell how")
        return len(doubtful) > 0

    def _leave_stream(self, groups: Groups) -> bool:
        """Freeze what branches add up to and a norm averages over; True if there is such a thing."""
        summed, normed = (self.root[np.concatenate([np.zeros(1, np.int64), *x])] for x in (self.summed, self.normed))
        stream = np.setdiff1d(np.intersect1d(summed, normed), [0])
        names = [n for n, g in groups.items() if np.isin(g.classes, stream).any()] if len(stream) else []
        self.freeze(stream, ", ".join(names), STREAM)
        return len(stream) > 0

    def counting_attributes(self) -> list[SizeAttribute]:
        """Integers of modules that equal the length of an axis of something reshaped there, such as `num_heads`.

        Or of one part of something split there, by sizes in a tuple.
        """
        found: dict[tuple[str, str, int], dict[bytes, SizeAttribute]] = {}
        for module, labels, part in (x for x in self.shaped if x[1].numel()):
            roots = torch.from_numpy(np.asarray(self.root[labels.numpy()]))
            for dim, size in enumerate(labels.shape):
                rows = roots.movedim(dim, 0).reshape(size, -1)
                if size > 1 and bool((rows == rows[:, :1]).all()) and len(rows[:, 0].unique()) > 1:
                    for attribute, value in _countable(self.index.modules.get(module)):
                        several = isinstance(value, tuple | list)
                        for entry, number in enumerate(value if several else [value]):
                            right = part in (None, entry) or not several
                            if type(number) is int and number == size and right:
                                classes, axes = rows[:, 0].numpy(), found.setdefault((module, attribute, entry), {})
                                length = SizeAttribute(module, attribute, classes, entry=entry, axis=len(axes))
                                axes.setdefault(classes.tobytes(), length)
        return [length for axes in found.values() for length in axes.values()]

    def classes_of(self, node: fx.Node) -> Ints | None:
        """The class of each position of a node's result, with size 1 along axes where it does not vary."""
        labels = self.values.get(node)
        return self.root[labels.numpy()] if isinstance(labels, Tensor) else None

    def sized_classes(self) -> Ints:
        """Classes that pass through an operator with sizes among its arguments, such as a view or a split."""
        return np.setdiff1d(np.flatnonzero(occurring(self._next, (self.root[labels] for labels in self.sized))), [0])

    def sliced_classes(self) -> Ints:
        """Classes of tensors that are sliced along an axis that is cut. An end beyond what is left raises nothing."""
        grids = [(self.root[labels], dim) for labels, dim in self.sliced]
        cut = [grid.ravel() for grid, dim in grids if not _alike(grid, [dim])]
        return np.setdiff1d(np.concatenate([np.zeros(1, np.int64), *cut]), [0])

    def _resolve_all(self) -> Ints:
        """As `_resolve`; what no layer produces, such as a learned token, is frozen."""
        root = self._resolve()
        made = occurring(self._next, (root[labels] for labels in self._made()))
        present = occurring(self._next, (root[labels] for labels in self.axes.values()))
        orphaned = present & ~made
        orphaned[0] = False
        if not orphaned.any():
            return root
        kept = [key[0] for key, labels in self.axes.items() if orphaned[root[labels]].any()]
        self.freeze(np.flatnonzero(orphaned), ", ".join(dict.fromkeys(kept)), "no layer computes it")
        return self._resolve()

    def _resolve(self) -> Ints:
        """The class of every label.

        A unit that is itself part of a stream cannot also be scattered into one: the two become one class. A stream
        fed by something frozen is frozen.
        """
        none = np.zeros(0, dtype=np.int64)
        narrow = np.concatenate([none, *(n for n, _ in self.feeds)])
        wide = np.concatenate([none, *(w for _, w in self.feeds)])
        root = components(self._next, *_ends(self.edges))
        while True:
            self.edges = [(np.arange(self._next), root)]  # says the same in fewer words
            low, high = root[narrow], root[wide]
            merge = (np.isin(low, high) | (low == 0)) & (low != high)
            self.join(low[merge], high[merge])
            settling = (self._settle_partial, self._settle_grids, self._settle_counted)
            if not merge.any() and not any(settle(root) for settle in settling):
                return root
            root = merged(root, *_ends(self.edges[1:]))

    def _settle_grids(self, root: Ints) -> bool:
        """Tensors stay rectangular: what goes, goes along one axis. True if that joined anything.

        Where labels vary along several axes, such as (query, key, value) x width, those along the shortest are joined.
        """
        joined = False
        for _, labels, _ in self.shaped:
            grid = root[labels.numpy()]
            varying = [d for d, size in enumerate(grid.shape) if size > 1]
            if len(varying) > 1 and not any(_alike(grid, [o for o in varying if o != d]) for d in varying):
                self.join(grid, grid.take([0], min(varying, key=grid.shape.__getitem__)))
                joined = True
        return joined

    def _settle_partial(self, root: Ints) -> bool:
        """Decide on operands that lack some of the axes along which another one varies; True if that joined anything.

        A rotary table has a value for each position in a head but knows no heads. Where whole heads go it has no say,
        and is not cut itself; where single positions could go, it would have to follow.
        """
        for grid, table, shared in self.partial:
            classes = root[grid]
            whole = _alike(classes, shared)
            wanted = (np.zeros(1, np.int64), table) if whole else (grid, table)
            left, right = np.broadcast_arrays(*wanted)
            if not np.array_equal(root[left], root[right]):
                self.join(left, right)
                return True
        return False

    def _settle_counted(self, root: Ints) -> bool:
        """Keep what constant positions along an axis are counted past; True if that froze anything.

        Where all that goes is taken from other axes, such as whole groups of heads with their keys, it need not stay.
        """
        for grid, past, dim in self.counted:
            if root[past].any() and not _alike(root[grid], [dim]):
                self.freeze(past, "index", "a constant position is counted past it")
                return True
        return False

    def _groups(self, axes: dict[tuple[str, int], Ints], feeds: Ints) -> dict[str, Group]:
        """Units by the first weight that computes them, with all weights that compute or read them."""
        owner = np.full(self._next, -1, dtype=np.int64)
        unit = np.full(self._next, -1, dtype=np.int64)
        homes: list[tuple[tuple[str, int], Ints]] = []
        for key in (k for k, role in self.roles.items() if role == "out"):
            classes = np.array([c for c in dict.fromkeys(axes[key].tolist()) if c and owner[c] < 0], dtype=np.int64)
            if len(classes):
                owner[classes], unit[classes] = len(homes), np.arange(len(classes))
                homes.append((key, classes))
        producers: list[list[Producer]] = [[] for _ in homes]
        consumers: list[list[tuple[str, int]]] = [[] for _ in homes]
        for key, labels in axes.items():
            if self.roles[key] == "out":
                for g in np.unique(owner[labels[owner[labels] >= 0]]):
                    producers[g].append(Producer(*key, np.where(owner[labels] == g, unit[labels], -1)))
            elif self.roles[key] == "in":
                read = np.concatenate([labels, feeds[np.isin(feeds[:, 1], labels[labels > 0]), 0]])
                for g in np.unique(owner[read[owner[read] >= 0]]):
                    consumers[g].append(key)
        modules = Counter(key[0].rpartition(".")[0] for key, _ in homes)
        groups = {}
        for g, (key, classes) in enumerate(homes):
            module = key[0].rpartition(".")[0]
            name = module if module and modules[module] == 1 else key[0]  # a module with several weights names them
            if name in groups:
                raise HapError(f"{key[0]} is taken to compute units along two of its axes, which is an error of HAP")
            groups[name] = Group(name, classes, tuple(producers[g]), tuple(consumers[g]))
        return groups

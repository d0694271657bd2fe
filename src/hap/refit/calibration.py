"""Both models on the same calibration inputs, in step: what a layer reads now, and what it is to return."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.execution.calibration_inputs import FOLDS, held_out, sample_count, signature, split
from hap.execution.windows import draw_positions
from hap.planning.plan import Plan
from hap.refit.flow import Layer, Work, plan_work
from hap.refit.graph_run import Graph, GraphRun
from hap.refit.parameters import LayerParameters
from hap.refit.rows import at

LARGEST_MATRIX = 2**27
"""What is gathered of the rows of one layer has so many elements at most."""


@dataclass(frozen=True)
class Rows:
    """What one layer reads at some positions, and what it is to return.

    Shapes: x (groups, positions, inputs); target and added (groups, positions, outputs). `added` is what is added to
    the layer's result before it is read.
    """

    x: Tensor
    target: Tensor
    added: Tensor

    def of(self, positions: Tensor) -> Rows:
        return Rows(*(part[:, positions] for part in (self.x, self.target, self.added)))


class Calibration:
    """The pruned and the dense model on the same inputs. `work` says what is refitted; take its layers in order."""

    def __init__(self, pruned: nn.Module, dense: nn.Module, plan: Plan, inputs: Sequence[Any], most_rows: int):
        self.most_rows = most_rows
        kinds: dict[str, list[tuple[Any, int]]] = {}
        before = 0
        for x in itertools.chain.from_iterable(map(split, inputs)):
            kinds.setdefault(signature(x), []).append((x, before))
            before += sample_count(x) or 1
        self.work, self.passes = Work(), list[_Pass]()
        for some in kinds.values():
            batches, firsts = map(list, zip(*some, strict=True))
            graphs = Graph(pruned, batches[0]), Graph(dense, batches[0])
            work = plan_work(*graphs, plan)
            self.work = self.work if self.passes else work
            self.passes.append(_Pass(graphs, batches, firsts, self.work, work))
        self.samples = sum(one.samples * len(one.batches) for one in self.passes)

    def rows(self, layer: Layer, parameters: LayerParameters) -> tuple[Rows, Rows]:
        """At positions drawn at random: those to fit a layer to, and those that are held out."""
        inputs = parameters.read().weight.shape[2]
        most = min(self.most_rows, LARGEST_MATRIX // inputs)
        found: list[tuple[Rows, Tensor]] = []
        for one in self.passes:
            share = max(1, most * one.samples * len(one.batches) // self.samples // len(one.batches))
            for number in range(len(one.batches)):
                rows, sample = one.rows(layer, parameters, number, share)
                held = held_out(sample if self.samples >= FOLDS else torch.arange(len(sample)))
                found.append((rows, held))
        return _joined(rows.of(~held) for rows, held in found), _joined(rows.of(held) for rows, held in found)

    def done(self, layer: Layer) -> None:
        """A layer has its final weights: what only it has read is forgotten."""
        for one in self.passes:
            one.release(layer)

    def outputs(self, of_dense: bool) -> list[Tensor]:
        """What one of the models returns for samples that are held out, at drawn positions where that is much."""
        found: list[Tensor] = []
        for one in self.passes:
            for number in range(len(one.batches)):
                for value, sample in one.outputs(of_dense, number, LARGEST_MATRIX // (8 * len(one.batches))):
                    found.append(value[held_out(sample)] if self.samples >= FOLDS else value)
        return found

    def outputs_before(self) -> list[Tensor]:
        """`outputs` of the pruned model as it is now, by a pass of its own."""
        runs = [one.pruned for one in self.passes]
        for one in self.passes:
            one.pruned = GraphRun(one.graphs[0], one.batches, [one.graphs[0].output])
        found = self.outputs(of_dense=False)
        for one, run in zip(self.passes, runs, strict=True):
            one.pruned = run
        return found


def _joined(rows: Iterator[Rows]) -> Rows:
    parts = zip(*((r.x, r.target, r.added) for r in rows), strict=True)
    return Rows(*(torch.cat(part, 1) for part in parts))


class _Pass:
    """Both models on inputs of one shape. `firsts` are the numbers of each batch's first sample, over all inputs."""

    def __init__(self, graphs: tuple[Graph, Graph], batches: list[Any], firsts: list[int], work: Work, own: Work):
        self.graphs, self.batches, self.firsts = graphs, batches, firsts
        self.samples = sample_count(batches[0]) or 1
        if [layer.node.name for layer in work.layers] != [layer.node.name for layer in own.layers]:
            raise HapError("the model goes different ways for inputs of different shapes; pad them to one shape")
        self.own = dict(zip((layer.node for layer in work.layers), own.layers, strict=True))
        read = [node for layer in own.layers for node in (layer.input, *layer.way.others)]
        self.pruned = GraphRun(graphs[0], batches, [*read, graphs[0].output])
        self.dense = GraphRun(graphs[1], batches, [*(layer.target for layer in own.layers), graphs[1].output])

    def rows(self, layer: Layer, parameters: LayerParameters, number: int, most: int) -> tuple[Rows, Tensor]:
        """What a layer reads and is to return for a batch, at drawn positions, with the number of each one's sample."""
        layer = self.own[layer.node]
        wanted, axis = self.dense.value(layer.target, number), layer.way.axis
        count = wanted.numel() // wanted.shape[layer.target_axis]
        positions = draw_positions(count, most, torch.Generator().manual_seed(number))
        target = at(wanted, layer.target_axis, positions)[:, layer.rows]
        added = torch.zeros_like(target)
        for other in layer.way.others:
            added = added + at(self.pruned.value(other, number), axis, positions)[:, layer.way.places]
        x = parameters.rows(layer, lambda node: self.pruned.value(node, number), positions)
        rows = Rows(x, _grouped(target - added, len(x)), _grouped(added, len(x)))
        sample = self.firsts[number] + positions * self.samples // count  # batches come first
        return rows, sample

    def release(self, layer: Layer) -> None:
        own = self.own[layer.node]
        for number in range(len(self.batches)):
            self.dense.release(own.target, number)
            for node in (own.input, *own.way.others):
                self.pruned.release(node, number)

    def outputs(self, of_dense: bool, number: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs of one model for a batch, (positions, channels), with the number of each position's sample."""
        run, graph = (self.dense, self.graphs[1]) if of_dense else (self.pruned, self.graphs[0])
        for value in pytree.tree_leaves(run.value(graph.output, number)):
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                flat = value.reshape(-1, value.shape[-1] if value.ndim > 1 else 1)
                drawn = draw_positions(len(flat), 1 + most // flat.shape[1], torch.Generator().manual_seed(number))
                yield flat[drawn].double(), self.firsts[number] + drawn * self.samples // len(flat)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(positions, channels) as (groups, positions, channels of a group), in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (groups, -1)).transpose(0, 1)

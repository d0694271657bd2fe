"""Zeros that stand in for heads which a forward will not do without.

Some attention modules cannot run with fewer heads: they share a table with other layers, or read how many heads there
are from a place that all layers have in common. The layers around them still can lose a head: behind those that compute
it zeros take its place, and those that read it skip them. What happens in between is as it was, and costs as much.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from hap.graph.index import GraphIndex
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import heads
from hap.groups.types import Group, InputSelection, Ints, OutputScatter
from hap.tracing.labels import concatenated

Axis = tuple[str, int]


def pad_with_zeros(groups: Groups, held: Ints, index: GraphIndex, inside: Mapping[str, str]) -> tuple[Groups, Ints]:
    """The groups with zeros in place of the classes in `held` that go, and those of them that this cannot be done for.

    It can for heads whose every layer is called by itself, so that hooks can stand around it, or whose weight the
    forward of a module hands to `functional.linear`: `inside` says of which.
    """
    touched = [groups[n] for n in heads(groups) if np.isin(groups[n].classes, held).any()]
    around = {g.name: found for g in touched if (found := _layers(groups, g, index, inside)) is not None}
    padded = np.unique(concatenated([groups[n].classes for n in around]))
    unable = np.setdiff1d(held, np.append(padded, 0))
    return (_padded(groups, padded, around, inside) if len(around) and not len(unable) else groups), unable


def _layers(groups: Groups, group: Group, index: GraphIndex, inside: Mapping[str, str]) -> set[Axis] | None:
    """The axes of weights, and of their biases, around what a group's heads meet in; None if some are out of reach."""
    if np.isin(group.classes, groups.feeds).any():  # a stream has a scatter of its own
        return None
    made, read = [(p.weight, p.dim) for p in group.producers], list(group.consumers)
    uses = Counter(term.weight for term in groups.costs.weight_macs)
    for weight, dim in made + read:
        name, _, leaf = weight.rpartition(".")
        module, calls = index.modules.get(name), index.called.get(name, [])
        if weight in inside and not calls:
            rows = (weight, dim) in made
            if leaf != "weight" or dim != 1 - rows or uses[weight] != len(index.called.get(inside[weight], [])):
                return None
            continue
        entering = groups.shapes[weight][1 - dim if (weight, dim) in made else dim] if dim < 2 else None
        alone = leaf == "weight" and module is not None and not [*module.children()] and uses[weight] == len(calls) > 0
        whole = all(0 in call and call[0][_axis(groups, weight)] == entering for call in calls)
        if not (alone and whole and getattr(module, "groups", 1) == 1) or getattr(module, "transposed", False):
            return None
    return {*made, *read} | {(f"{weight.rpartition('.')[0]}.bias", 0) for weight, _ in made}


def _axis(groups: Groups, weight: str) -> int:
    """Along which axis a layer's inputs and outputs have its channels."""
    return -1 if len(groups.shapes[weight]) == 2 else 1


def _padded(groups: Groups, padded: Ints, around: Mapping[str, set[Axis]], inside: Mapping[str, str]) -> Groups:
    """These classes live on the given axes alone; all else is as long as ever."""
    cut = set().union(*around.values())
    to = np.arange(groups.classes)
    to[padded] = 0

    def layers(keys: Iterable[Axis]) -> Iterator[tuple[str, Ints, int, str | None]]:
        for weight, dim in dict.fromkeys(keys):
            module, along = weight.rpartition(".")[0], _axis(groups, weight)
            yield module, groups.axes[weight, dim], along, inside.get(weight)

    made = layers((p.weight, p.dim) for n in around for p in groups[n].producers)
    read = layers(key for n in around for key in groups[n].consumers)
    scatters = [OutputScatter(module, own, to[own], dim, outer) for module, own, dim, outer in made]
    selections = [InputSelection(module, 0, dim, own, to[own], outer) for module, own, dim, outer in read]
    spanned, chosen, kept = groups.traits.spanned, frozenset(padded.tolist()), groups.relabelled(to)
    return replace(
        groups,
        axes={key: groups.axes[key] if key in cut else classes for key, classes in kept.axes.items()},
        costs=replace(groups.costs, activation_macs=kept.costs.activation_macs),
        rewiring=replace(kept.rewiring, output_scatters=groups.rewiring.output_scatters),
        traits=replace(groups.traits, spanned=spanned - chosen, padded_in_norms=spanned & chosen, zero_padded=chosen),
    ).with_rewiring(input_selections=selections, output_scatters=scatters)

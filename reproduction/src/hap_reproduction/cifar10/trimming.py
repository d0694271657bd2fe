"""Networks under masks in a smaller shape that is the same for all of them.

In its dense shape (`hap.masking`) a pruned network trains with others as one, but computes the zeros too. Inside
blocks, where a layer's units are read by the next one alone, most of what is zero can go: every network keeps its own
living units and as many dead ones as it takes to reach a width that all of them share, a multiple of eight. What feeds
a sum of branches stays whole, since each network has other units there.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hap.groups.groups import Groups
from hap.planning.assemble import draft
from hap.planning.plan import Plan
from hap.pruning.apply import apply_
from hap.surgery.cut import shortened
from hap.utils.module_tree import named_tensors
from hap_reproduction.cifar10.masking import spread
from hap_reproduction.cifar10.training import Masks

Widths = dict[str, int]
"""How many units are left of each group that is trimmed."""
MULTIPLE = 8


@dataclass(frozen=True)
class Trimmed:
    """A network in the smaller shape, its masks there, and the plan that led to it."""

    model: nn.Module
    masks: dict[str, Tensor]
    plan: Plan

    def restored(self, dense: nn.Module) -> nn.Module:
        """A copy of `dense`, of which only the shapes count, with the values of the network."""
        made = copy.deepcopy(dense)
        with torch.no_grad():
            tensors = named_tensors(made)
            for name, values in spread(self.model, self.plan, made).items():
                tensors[name].copy_(values)
        return made


def common_widths(groups: Groups, masks: Sequence[Masks]) -> Widths:
    """Widths with room for the living units of every network, given what masks leave of each. `groups` are those of the
    dense network in union coupling."""
    widths = {}
    for name in _plain(groups):
        size, most = len(groups[name]), max(len(_alive(groups, name, own)) for own in masks)
        width = min(size, -(-most // MULTIPLE) * MULTIPLE)
        if width < size:
            widths[name] = width
    return widths


def trim(model: nn.Module, masks: Masks, groups: Groups, widths: Widths, example: object) -> Trimmed:
    """The network, which has its dense shape, with units that are dead taken out down to these widths, and checked by
    running it. It is left as it is."""
    removed = {}
    for name, width in widths.items():
        alive = _alive(groups, name, masks)
        dead = [unit for unit in range(len(groups[name])) if unit not in alive]
        removed[name] = dead[: len(groups[name]) - width]
    plan = draft(groups, removed)
    cut = dict(masks)
    for one in plan.cuts:
        if one.name in cut:
            cut[one.name] = shortened(cut[one.name], one)
    small = apply_(copy.deepcopy(model), plan, example)
    return Trimmed(small, {name: mask for name, mask in cut.items() if not mask.all()}, plan)


def _plain(groups: Groups) -> list[str]:
    """Groups of one weight, index by index, whose units go without anything that spreads or picks what is left."""
    names = []
    for name, group in groups.items():
        single = len(group.producers) == 1 and group.producers[0].unit.tolist() == list(range(len(group)))
        if single and len(group) > 1:
            plan = draft(groups, {name: [0]})
            names += [] if plan.widenings or plan.narrowings or not plan.exact else [name]
    return names


def _alive(groups: Groups, name: str, masks: Masks) -> set[int]:
    """Units of which a mask leaves anything."""
    producer = groups[name].producers[0]
    if producer.weight not in masks:
        return set(range(len(groups[name])))
    rows = masks[producer.weight].movedim(producer.dim, 0).flatten(1)
    return set(rows.any(1).nonzero().flatten().tolist())

"""The units of transformer blocks: which groups are attention heads, which are hidden neurons of an MLP.

heads = hap.only(groups, hap.heads(groups))  # nothing else can be scored, planned or removed
scores = hap.score(model, heads, batches, loss, hap.JointTrace())
plan = hap.plan(heads, scores, hap.Budget(channels=0.5))  # half of the heads of all layers together
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hap.errors import ForPython, HapError
from hap.groups.groups import Groups
from hap.groups.types import Group


def heads(groups: Groups) -> list[str]:
    """Name the groups whose units are attention heads.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> hap.heads(hap.trace(layer, torch.randn(1, 3, 8)))
    ['self_attn']

    A head owns whole blocks of rows that meet in a product of activations, which sees each of several heads by itself.
    Where it sees one alone, single indices of its width may go, and are no heads. Under grouped queries a unit is a
    key/value head with the query heads that share it.
    """
    whole = groups.traits.in_activation_products & groups.traits.whole_matrices
    return [n for n, g in groups.items() if whole.issuperset(g.classes.tolist()) and _in_blocks(groups, g)]


def mlps(groups: Groups) -> list[str]:
    """Name the groups whose units are hidden neurons of an MLP: computed from a stream, and read back into that one.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> hap.mlps(hap.trace(layer, torch.randn(1, 3, 8)))
    ['linear1']

    The stream itself is none, and neither is what stands between the last block and the outputs, such as a pooler, nor
    what attention is made of, such as the values of a layer with one head.
    """
    apart = groups.traits.in_activation_products.isdisjoint
    return [n for n, g in groups.items() if apart(g.classes.tolist()) and _returns(groups, g)]


def only(groups: Groups, names: Iterable[str]) -> Groups:
    """Restrict a trace to the units of these groups, named in `names`; all other axes are kept whole.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> groups = hap.trace(layer, torch.randn(1, 3, 8))
    >>> hap.only(groups, hap.heads(groups)).units
    2

    Returns: groups in which budgets count what can be removed: `Budget(channels=0.5)` on heads is half of the heads.
    """
    names = list(names)
    if unknown := [n for n in names if n not in groups]:
        raise HapError(f"there is no group {unknown[0]!r}; expected some of {', '.join(groups)}")
    if not names:
        raise HapError("no groups are named, so nothing could be removed; hap.heads found none in this model?")
    chosen = {n: g for n, g in groups.items() if n in names}
    units = np.concatenate([g.classes for g in chosen.values()])
    source, stream = groups.feeds[:, 0], groups.feeds[:, 1]
    fed_by_others = np.unique(stream[~np.isin(source, units)])
    living = np.union1d(units, np.setdiff1d(stream, fed_by_others))
    to = np.where(np.isin(np.arange(groups.classes), living), np.arange(groups.classes), 0)
    return replace(groups.relabelled(to), groups=chosen)


KINDS = {
    "heads": (heads, "attention heads were found that could be removed (a layer with one head has none to spare)"),
    "mlp": (mlps, "neurons of an MLP were found that could be removed"),
}


def units_of(groups: Groups, *kinds: str) -> Groups:
    """The trace with units of these kinds alone, "heads" and "mlp"; HapError if a kind is missing in the model."""
    names: list[str] = []
    for kind in kinds:
        find, what = KINDS[kind]
        if not (found := find(groups)):
            raise HapError(f"no {what}", ForPython("; print(groups) lists what can be, and why not"))
        names += found
    return only(groups, names)


def _in_blocks(groups: Groups, group: Group) -> bool:
    """Whether each unit owns several indices of a weight that computes it, and of one that reads it: a head's width."""

    def several(axis: tuple[str, int]) -> bool:
        return bool(np.bincount(groups.axes[axis], minlength=group.classes.max() + 1)[group.classes].min() > 1)

    made, read = [(p.weight, p.dim) for p in group.producers], group.consumers
    return any(map(several, made)) and any(map(several, read))


def _returns(groups: Groups, group: Group) -> bool:
    """Whether the matrices that compute and read the units have the same classes on their other sides."""
    axes = [*((p.weight, p.dim) for p in group.producers), *group.consumers]
    ends = [groups.axes[weight, 1 - dim] for weight, dim in axes if dim < 2 and (weight, 1 - dim) in groups.axes]
    return bool(group.consumers) and len(ends) == len(axes) and all(np.array_equal(ends[0], end) for end in ends)

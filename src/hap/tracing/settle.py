"""From labels to classes: labels that share one fate, once all is decided that depends on the others."""

from __future__ import annotations

import numpy as np

from hap.groups.components import occurring
from hap.groups.types import Ints
from hap.tracing.label_tensors import long_axes, same_along
from hap.tracing.labels import LabelStore


def concatenated(arrays: list[Ints]) -> Ints:
    """All of these in a row, also if there are none."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])


def classes_of_produced(store: LabelStore) -> Ints:
    """The class of every label; what no layer produces, such as a learned token, is frozen."""
    root = classes_of_labels(store)
    made = occurring(store.count, (root[labels] for labels in store.computed()))
    present = occurring(store.count, (root[labels] for labels in store.axes.values()))
    orphaned = present & ~made
    orphaned[0] = False
    if not orphaned.any():
        return root
    kept = [key[0] for key, labels in store.axes.items() if orphaned[root[labels]].any()]
    store.freeze(np.flatnonzero(orphaned), ", ".join(dict.fromkeys(kept)), "no layer computes it")
    return classes_of_labels(store)


def classes_of_labels(store: LabelStore) -> Ints:
    """The class of every label: the smallest label that shares its fate.

    A unit that is itself part of a stream cannot also be scattered into one: the two become one class. A stream
    fed by something frozen is frozen.
    """
    narrow, wide = concatenated([s.narrow for s in store.streams]), concatenated([s.wide for s in store.streams])
    while True:
        root = store.bonded()
        root = np.where(occurring(store.count, (root[labels] for labels in store.zeros))[root], 0, root)
        low, high = root[narrow], root[wide]
        merge = (np.isin(low, high) | (low == 0)) & (low != high)
        store.join(low[merge], high[merge])
        if not merge.any() and not any(decide(store, root) for decide in (_partial, _rectangular, _constant)):
            return root


def _partial(store: LabelStore, root: Ints) -> bool:
    """Decide on operands that lack some of the axes along which another one varies; True if that joined anything.

    A rotary table has a value for each position in a head but knows no heads. Where whole heads go it has no say,
    and is not cut itself; where single positions could go, it would have to follow.
    """
    for it in store.partial:
        whole_go = same_along(root[it.labels], it.dims)
        left, right = np.broadcast_arrays(np.zeros(1, np.int64) if whole_go else it.labels, it.operand)
        if not np.array_equal(root[left], root[right]):
            store.join(left, right)
            return True
    return False


def _rectangular(store: LabelStore, root: Ints) -> bool:
    """Tensors stay rectangular: what goes, goes along one axis. True if that joined anything.

    Where labels vary along several axes, such as (query, key, value) x width, those along the shortest are joined.
    """
    joined = False
    for it in store.reshaped:
        grid = root[it.labels.numpy()]
        varying = long_axes(grid.shape)
        if len(varying) > 1 and not any(same_along(grid, [o for o in varying if o != d]) for d in varying):
            store.join(grid, grid.take([0], min(varying, key=grid.shape.__getitem__)))
            joined = True
    return joined


def _constant(store: LabelStore, root: Ints) -> bool:
    """Keep what constant positions along an axis are counted past; True if that froze anything.

    Where all that goes is taken from other axes, such as whole groups of heads with their keys, it need not stay.
    """
    for it in store.constant:
        if root[it.passed].any() and not same_along(root[it.labels], [it.dim]):
            store.freeze(it.passed, "index", "a constant position is counted past it")
            return True
    return False

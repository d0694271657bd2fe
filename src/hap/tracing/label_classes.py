"""From labels to classes: which labels share one fate, once all rules have run.

Here it is decided, among others, that units of a reshaped tensor go in whole rows, as in a channel shuffle.
"""

import numpy as np

from hap.groups.components import occurring
from hap.groups.types import Ints
from hap.tracing.labels import LabelStore, concatenated, long_axes, varying_axes


def classes_of_produced(store: LabelStore) -> Ints:
    """The class of every label; what no layer produces, such as a learned token, is frozen."""
    root = classes_of_labels(store)
    orphaned = occurring(store.count, (root[labels] for labels in store.axes.values()))
    for labels in store.computed():
        orphaned[root[labels]] = False
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
    """Decide on operands that know some axes alone; True if that joined anything.

    A rotary table has a value for each position in a head but knows no heads. Where whole heads go it has no say,
    and is not cut itself; where single positions could go, it would have to follow.
    """
    for it in store.partial:
        whole_go = varying_axes(root[it.labels]).isdisjoint(it.dims)
        left, right = np.broadcast_arrays(np.zeros(1, np.int64) if whole_go else it.labels, it.others)
        if not np.array_equal(root[left], root[right]):
            store.join(left, right)
            return True
    return False


def _rectangular(store: LabelStore, root: Ints) -> bool:
    """Let units of a reshaped tensor go along one axis only, so that it stays rectangular. True if that joined any.

    Where labels vary along several axes, such as (groups, channels of a group), those along the shortest are joined.
    """
    grids = [grid for it in store.rectangular if len(varying_axes(grid := root[it.labels.numpy()])) > 1]
    for grid in grids:
        store.join(grid, grid.take([0], min(long_axes(grid.shape), key=grid.shape.__getitem__)))
    return bool(grids)


def _constant(store: LabelStore, root: Ints) -> bool:
    """Freeze the units in front of a position that the code names by a number, such as x[:, 3]; True if it froze any.

    They need not stay where units go from other axes only, such as whole groups of heads with their keys.
    """
    for it in store.constant:
        if root[it.others].any() and not varying_axes(root[it.labels]).isdisjoint(it.dims):
            store.freeze(it.others, "index", "a constant position is counted past it")
            return True
    return False

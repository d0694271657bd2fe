"""Labels that share one fate: connected components, as arrays."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hap.groups.types import Ints


def components(count: int, a: Ints, b: Ints) -> Ints:
    """Connected components of the graph with edges a[i]-b[i]: the smallest member of each node's component.

    Minimum propagation with pointer jumping, vectorised: logarithmically many passes on the graphs that occur.
    """
    root = np.arange(count)
    while True:
        low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
        if np.array_equal(low, high):
            return root
        np.minimum.at(root, high, low)
        while not np.array_equal(root, jumped := root[root]):
            root = jumped


def distinct(labels: ArrayLike) -> Ints:
    """The labels that there are, in order. Those of an axis most often are so already, which is quick to see."""
    flat = np.ravel(np.asarray(labels))
    return flat if bool((flat[1:] > flat[:-1]).all()) else np.unique(flat)


def occurring(count: int, labels: Iterable[Ints]) -> NDArray[np.bool_]:
    """Which of the labels below `count` there are."""
    seen = np.zeros(count, dtype=bool)
    for some in labels:
        seen[some] = True
    return seen

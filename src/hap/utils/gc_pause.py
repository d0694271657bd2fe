"""Work without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Inside, or in a function that this decorates, reference cycles wait to be collected until it ends: looking
    through the many small objects of a graph again and again takes its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

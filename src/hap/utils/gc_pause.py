"""Work without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Inside, or in a function that this decorates, reference cycles wait to be collected until it ends.

    Graphs are many small objects that stay; looking through them again and again for garbage takes its time.
    What is large goes with its last reference in any case.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

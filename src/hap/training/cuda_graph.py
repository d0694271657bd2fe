"""A training step recorded as a CUDA graph, which removes the cost of launching its hundreds of small kernels."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from hap.errors import HapError
from hap.utils.gc_pause import gc_paused

Step = Callable[[], None]

# Steps run before the recording, so that convolution algorithms are chosen and momentum exists by then.
WARM_UP_STEPS = 3


class RecordedStep:
    """A step that is run plainly a few times, then recorded in a graph that is replayed.

    The first calls train like all others, so nothing has to be undone. Recording only notes the kernels down;
    the replay that follows in the same call does their work.
    """

    def __init__(self, step: Step, pool: Any = None, warm_up: int = WARM_UP_STEPS) -> None:
        """Graphs that share a `pool` of memory must not need anything that another one leaves there."""
        self.step, self.pool, self.warm_up = step, pool, warm_up
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self.warm_up:
            caller = torch.cuda.current_stream()
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream):
                self.step()
            caller.wait_stream(self.stream)
            return
        if self.graph is None:
            self.graph = self._record()
        self.graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # a graph of an earlier training that is freed while this one is recorded would break it
        try:
            with gc_paused(), torch.cuda.graph(graph, self.pool, self.stream):
                self.step()
        except RuntimeError as error:
            raise HapError(
                f"the training step cannot be recorded as a CUDA graph ({error}): a forward pass that reads "
                "values back or changes shape cannot be; train with graphs=False"
            ) from error
        return graph

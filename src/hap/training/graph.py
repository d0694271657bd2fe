"""Running one step of several models: in turn, or recorded as parallel branches of one CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from hap.errors import HapError
from hap.utils.gc_pause import gc_paused

Step = Callable[[], None]

# Steps run before the recording, so that convolution algorithms are chosen and momentum exists by then.
WARM_UP_STEPS = 3


def in_turn(steps: list[Step]) -> Step:
    """One call that runs each step."""

    def run_all() -> None:
        for step in steps:
            step()

    return run_all


class Captured:
    """Steps on parallel streams: run plainly a few times, then recorded in one graph that is replayed.

    The first calls train like all others, so nothing has to be undone. Recording only notes the kernels down;
    the replay that follows in the same call does their work. Every stream waits for the caller's stream
    before its step, and the caller's waits for all of them after, in the graph as outside.
    """

    def __init__(self, steps: list[Step], pool: Any = None, warm_up: int = WARM_UP_STEPS) -> None:
        """Graphs that share a `pool` of memory must not need anything that another one leaves there."""
        self.steps, self.pool, self.warm_up = steps, pool, warm_up
        self.streams = [torch.cuda.Stream() for _ in steps]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self.warm_up:
            self._fork_and_join()
            return
        if self.graph is None:
            self.graph = self._record()
        self.graph.replay()

    def _fork_and_join(self) -> None:
        caller = torch.cuda.current_stream()
        for step, stream in zip(self.steps, self.streams, strict=True):
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                step()
        for stream in self.streams:
            caller.wait_stream(stream)

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # a graph of an earlier training that is freed while this one is recorded would break it
        try:
            with gc_paused(), torch.cuda.graph(graph, pool=self.pool):
                self._fork_and_join()
        except RuntimeError as error:
            raise HapError(
                f"the training step cannot be recorded as a CUDA graph ({error}): a forward pass that reads "
                "values back or changes shape cannot be; train with graphs=False"
            ) from error
        return graph

"""Steps of several networks side by side on one GPU, which networks too small to fill it then share."""

from collections.abc import Sequence

import torch

from hap.training.cuda_graph import Step


def in_turn(steps: Sequence[Step]) -> Step:
    """One call that runs each step."""

    def run_all() -> None:
        for step in steps:
            step()

    return run_all


def side_by_side(steps: Sequence[Step]) -> Step:
    """One call that runs the steps on parallel streams, which become parallel branches where it is recorded.

    Every stream waits for the caller's stream before its step, and the caller's waits for all of them after.
    """
    streams = [torch.cuda.Stream() for _ in steps]

    def run_all() -> None:
        caller = torch.cuda.current_stream()
        for step, stream in zip(steps, streams, strict=True):
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                step()
        for stream in streams:
            caller.wait_stream(stream)

    return run_all

"""torch-pruning on the same models, as its own documentation uses it and without code for single models."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hap
from hap.examples import run

Record = dict[str, Any]
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def measure_peer(build: Callable[[], tuple[nn.Module, Any]], flops: float) -> Record:
    """Prune by group magnitude, step by step down to the share of FLOPs; if that breaks the model, halve all widths.

    The better of the two counts, and of the seconds only those spent in torch-pruning.
    """
    record: Record = {}
    for steps in (10, 1):
        model, example = build()
        seconds: list[float] = []
        try:
            return _prune(model, example, flops, steps, seconds) | {"steps": steps, "seconds": sum(seconds)}
        except Exception as error:  # whatever it raises is the record's reason; the first one tells most
            why = f"{type(error).__name__}: {str(error).strip()}"[:400]
            record = record or {"verified": False, "why": why, "steps": steps, "seconds": sum(seconds)}
    return record


def _prune(model: nn.Module, example: Any, flops: float, steps: int, seconds: list[float]) -> Record:
    import torch_pruning

    def timed(work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return work()
        finally:
            seconds.append(time.perf_counter() - begun)

    before, shapes = hap.cost(model, example), _shapes(model, example)
    pruner = timed(
        lambda: torch_pruning.pruner.BasePruner(
            model, example, torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=0.5, iterative_steps=steps, ignored_layers=_last_layers(model, example),
        )
    )  # fmt: skip
    after = before
    for _ in range(steps):
        timed(pruner.step)
        after = hap.cost(model, example)
        if after.macs <= flops * before.macs:
            break
    if _shapes(model, example) != shapes:
        raise RuntimeError(f"the output's shape changed from {shapes} to {_shapes(model, example)}"[:300])
    if after.params == before.params:
        raise RuntimeError("nothing was pruned")
    return {"verified": True, "params": [before.params, after.params], "macs": [before.macs, after.macs]}


def _shapes(model: nn.Module, example: Any) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in pytree.tree_leaves(run(model, example)) if isinstance(x, Tensor)]


def _last_layers(model: nn.Module, example: Any) -> list[nn.Module]:
    """Layers that compute an output of the model: the last one, and those as wide as an output's channels."""
    called: list[Any] = []
    hooks = [
        m.register_forward_hook(lambda module, args, out: called.append(module))
        for m in model.modules()
        if isinstance(m, LAYERS)
    ]
    with torch.no_grad():
        shapes = _shapes(model, example)
    for hook in hooks:
        hook.remove()
    widths = {shape[axis] for shape in shapes for axis in (1, -1) if len(shape) > 1}
    return [m for m in dict.fromkeys(called) if len(m.weight) in widths] + called[-1:]

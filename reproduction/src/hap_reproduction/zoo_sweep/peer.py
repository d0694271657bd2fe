"""torch-pruning on the same models, as its own documentation uses it and without code for single models."""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hap
from hap.execution.calling import run
from hap_reproduction.zoo_sweep.clock import Clock, OutOfTime, failure, warm_memory

Record = dict[str, Any]
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def measure_peer(build: Callable[[], tuple[nn.Module, Any]], flops: float, limit: float = inf) -> Iterator[Record]:
    """Prune by group magnitude, step by step down to the share of FLOPs; if that breaks the model, halve all widths.

    The better of the two counts, and of the seconds only those that this one spent in torch-pruning. A record comes
    after every step, so that whoever has to stop it knows how far it came.
    """
    import torch_pruning  # noqa: F401, its loading is not counted

    first: Record = {}
    for steps in (10, 1):
        clock = Clock(limit)
        record: Record = {"verified": False, "steps": steps, "steps_done": 0}
        try:
            for found in _prune(*build(), flops, steps, clock):
                record |= found
                yield (first or record) | {"seconds": clock.total}
            record |= {"verified": True, "seconds": clock.total}
            record.pop("why")
            yield record
            return
        except OutOfTime as error:
            record |= failure(error) | {"timed_out": True, "seconds": limit}
        except Exception as error:  # whatever it raises is the record's reason; the first one tells most
            record |= failure(error) | {"seconds": clock.total}
        first = first or record
        yield first
        if record.get("timed_out") and not record["steps_done"]:
            return  # one step alone takes too long, whatever its size


def _prune(model: nn.Module, example: Any, flops: float, steps: int, clock: Clock) -> Iterator[Record]:
    import torch_pruning

    warm_memory(model)
    before, shapes = hap.cost(model, example), _shapes(model, example)
    pruner = clock(
        "trace",
        lambda: torch_pruning.pruner.BasePruner(
            model,
            example,
            torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=0.5,
            iterative_steps=steps,
            ignored_layers=_last_layers(model, example),
        ),
    )
    after = before
    for done in range(1, steps + 1):
        clock("step", pruner.step)
        after = hap.cost(model, example)
        cost = {"params": [before.params, after.params], "macs": [before.macs, after.macs]}
        yield cost | {"steps_done": done, "why": f"stopped after step {done}"}
        if after.macs <= flops * before.macs:
            break
    if [shape[1:] for shape in _shapes(model, example)] != [shape[1:] for shape in shapes]:  # boxes may be fewer
        raise RuntimeError(f"the output's shape changed from {shapes} to {_shapes(model, example)}"[:300])
    if after.params == before.params:
        raise RuntimeError("nothing was pruned")


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

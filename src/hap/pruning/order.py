"""order: trace and score once, for a model of every size."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hap.execution.input_checks import check_given, outside_inference
from hap.planning.order import Order
from hap.pruning.prune import traced
from hap.scoring import Criterion, as_criterion, score
from hap.scoring.base import Loss


def order(
    model: nn.Module,
    example: Any,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    *,
    criterion: Criterion | str = "hessian",
    per_cost: bool = False,
    coupling: str = "joint",
    ignore: Sequence[str] = (),
    stream: bool = False,
) -> Order:
    """Find out once what goes first. `hap.prune_(..., order=order)` then meets any budget without scoring again.

    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> order = hap.order(net, torch.randn(2, 4), criterion="magnitude")
    >>> hap.prune_(net, torch.randn(2, 4), order=order, flops=0.75).after.channels
    12

    The plan is the one that `hap.prune_` makes with the same choices in place of the order. Several rounds have no
    order: what is left is repaired and scored again between them, and what they leave depends on the budget.

    Arguments: those of `hap.trace` and `hap.score`, with `per_cost` as in `hap.plan`. The model is left as it was.
    Returns: the order. It goes to JSON and back, or into a checkpoint: `hap.save(path, model, order=order)`.
    """
    check_given(model, example)
    criterion = as_criterion(criterion)
    ignore = ignore if isinstance(ignore, str) else tuple(ignore)
    with outside_inference(model):
        groups, _ = traced(model, example, None, coupling, ignore, stream)
        scores = score(model, groups, batches, loss, criterion)
    choices = {"per_cost": per_cost, "coupling": coupling, "stream": stream, "ignore": ignore}
    return Order.of(scores, criterion, **choices)

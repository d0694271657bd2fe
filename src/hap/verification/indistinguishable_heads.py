"""Heads of which an example shows nothing, so that a wrong split into heads would pass every comparison.

Attention over tokens that are all alike, or over one token, returns the same however its rows are split into heads.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hap.execution.calling import call_arguments, call_with, copied, differentiable, eval_mode
from hap.execution.fast_copy import copy_with
from hap.execution.model_outputs import difference, float_outputs, in_float64, output_tensors

NO_EFFECT = 1e-6
"""Rows of weights that change outputs so many times less than others of their heads may have no effect at all."""
LITTLE_EFFECT = 1e-4
"""In float32, where rounding may be as large as an effect, rows below this are looked at again in float64."""
SAME = dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), 1e-5)
"""How far outputs may be off, relative to the largest, if such rows have no effect."""

Rows = tuple[str, int, Tensor]
"""A weight, one of its axes, and some indices of that."""


def indistinguishable_heads(
    model: nn.Module, example: Any, groups: Mapping[str, list[Rows]], steady: bool = True
) -> list[str]:
    """The groups of heads with rows of weights that might be anything: the outputs would be the same.

    `groups` holds the rows that compute heads and those that read them. Gradients tell which may have no effect, and
    other values in their place whether that is so. None are named for a model without gradients. If the weights are
    `steady`, rounding is small, and float32 may show that all rows have an effect.
    """
    try:
        if steady:
            doubtful = _rows_without_effect(model, example, groups, LITTLE_EFFECT)
            groups = {name: rows for name, rows in groups.items() if name in doubtful}
        if not groups:
            return []
        model, example = in_float64(model, example)
        idle = _rows_without_effect(model, example, groups, NO_EFFECT)
        wanted = output_tensors(model, example) if idle else []
        return [name for name, rows in idle.items() if _changes_nothing(model, example, rows, wanted)]
    except Exception:  # double precision, or derivatives, are more than some models can do
        return []


def _rows_without_effect(
    model: nn.Module, example: Any, groups: Mapping[str, list[Rows]], least: float
) -> dict[str, list[Rows]]:
    """The rows that change outputs at most `least` times as much as the strongest of their group; groups without any
    are left out. The effect of a row is how fast outputs change as it grows by a share of its length."""
    names = {weight for rows in groups.values() for weight, _, _ in rows}
    tensors = {n: p.detach().requires_grad_() for n, p in model.named_parameters(remove_duplicate=False) if n in names}
    args, kwargs = copied(call_arguments(example))
    random = torch.Generator().manual_seed(0)
    with eval_mode(model), torch.enable_grad(), differentiable(model):
        outputs = [x for x in float_outputs(call_with(model, tensors, args, kwargs)) if x.requires_grad]
        total = sum((x * torch.randn(x.shape, generator=random).to(x)).sum() for x in outputs)
        found = torch.autograd.grad(total, [*tensors.values()], allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    changes = {n: (tensors[n].detach(), gradient) for n, gradient in zip(tensors, found, strict=True)}
    return {name: idle for name, rows in groups.items() if (idle := [*_least(changes, rows, least)])}


def _least(changes: Mapping[str, tuple[Tensor, Tensor]], rows: list[Rows], least: float) -> Iterator[Rows]:
    norms = [[x.movedim(dim, 0)[index].flatten(1).norm(dim=1) for x in changes[name]] for name, dim, index in rows]
    sizes = [length * gradient for length, gradient in norms]
    most = max((float(size.max()) for size in sizes if len(size)), default=0.0)
    for (weight, dim, index), size in zip(rows, sizes, strict=True):
        if len(few := index[(size <= least * most).cpu()]):
            yield weight, dim, few


def _changes_nothing(model: nn.Module, example: Any, rows: list[Rows], wanted: list[Any]) -> bool:
    """Whether the outputs stay the same with other values in these rows."""
    random = torch.Generator().manual_seed(0)
    own = dict(model.named_parameters(remove_duplicate=False))
    changed: dict[str, Tensor] = {}
    for weight, dim, index in rows:
        tensor = changed.get(weight, own[weight].detach().clone())
        place = index.to(tensor.device)
        some = tensor.index_select(dim, place)
        drawn = torch.randn(some.shape, generator=random).to(some) * tensor.std()
        changed[weight] = tensor.index_copy(dim, place, drawn)
    return difference(wanted, output_tensors(copy_with(model, changed), example), tolerance=SAME) is None

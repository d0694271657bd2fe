"""What an example does not tell: constant inputs, and heads of which it shows nothing.

Attention over tokens that are all alike, or over one token, returns the same however its rows are split into heads. A
model that splits them in a wrong way would then pass every comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.execution.calling import call_arguments, call_with, copied, eval_mode, run, seeded
from hap.execution.compare_outputs import difference, in_float64
from hap.execution.double_backward import differentiable
from hap.execution.model_outputs import plain_outputs

SILENT = 1e-6
"""Rows of weights with so many times less to say than others of the same heads may say nothing."""
FAINT = 1e-4
"""The same where rounding may be as loud as what they say: then double precision is asked, which takes longer."""
SAME = dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), 1e-5)
"""How far outputs may be off, relative to the largest, if such rows say nothing."""

Rows = tuple[str, int, Tensor]
"""A weight, one of its axes, and some indices of that."""


# ---- examples -----------------------------------------------------------------------------------------------


def _real(outputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(plain_outputs(outputs)) if isinstance(x, Tensor) and x.is_floating_point()]


# ---- heads --------------------------------------------------------------------------------------------------


def indistinguishable_heads(
    model: nn.Module, example: Any, groups: Mapping[str, list[Rows]], steady: bool = True
) -> list[str]:
    """Which groups of heads have rows of weights that might be anything: the outputs would be the same.

    `groups` holds the rows that compute heads and those that read them. Gradients tell which may say nothing, and other
    values in their place whether that is so. A model without gradients tells nothing, and none are named. Rounding must
    be small for single precision to show what is silent for sure: `steady`.
    """
    try:
        if steady:
            faint = _silent_rows(model, example, groups, FAINT)
            groups = {name: rows for name, rows in groups.items() if name in faint}
        if not groups:
            return []
        model, example = in_float64(model, example)
        silent = _silent_rows(model, example, groups, SILENT)
        wanted = pytree.tree_leaves(plain_outputs(run(model, example))) if silent else []
        return [name for name, rows in silent.items() if _idle(model, example, rows, wanted)]
    except Exception:  # double precision, or derivatives, are more than some models can do
        return []


def _silent_rows(
    model: nn.Module, example: Any, groups: Mapping[str, list[Rows]], least: float
) -> dict[str, list[Rows]]:
    """Rows with next to nothing to say beside the loudest of their group. Groups without any are left out.

    What a row has to say is how fast outputs change as it grows by a share of its length.
    """
    names = {weight for rows in groups.values() for weight, _, _ in rows}
    tensors = {n: p.detach().requires_grad_() for n, p in model.named_parameters(remove_duplicate=False) if n in names}
    args, kwargs = copied(call_arguments(example))
    random = torch.Generator().manual_seed(0)
    with eval_mode(model), torch.enable_grad(), differentiable(model):
        outputs = [x for x in _real(call_with(model, tensors, args, kwargs)) if x.requires_grad]
        total = sum((x * torch.randn(x.shape, generator=random).to(x)).sum() for x in outputs)
        found = torch.autograd.grad(total, [*tensors.values()], allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    changes = {n: (tensors[n].detach(), gradient) for n, gradient in zip(tensors, found, strict=True)}
    return {name: silent for name, rows in groups.items() if (silent := [*_quiet(changes, rows, least)])}


def _quiet(changes: Mapping[str, tuple[Tensor, Tensor]], rows: list[Rows], least: float) -> Iterator[Rows]:
    norms = [[x.movedim(dim, 0)[index].flatten(1).norm(dim=1) for x in changes[name]] for name, dim, index in rows]
    sizes = [length * gradient for length, gradient in norms]
    most = max((float(size.max()) for size in sizes if len(size)), default=0.0)
    for (weight, dim, index), size in zip(rows, sizes, strict=True):
        if len(quiet := index[(size <= least * most).cpu()]):
            yield weight, dim, quiet


def _idle(model: nn.Module, example: Any, rows: list[Rows], wanted: list[Any]) -> bool:
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
    args, kwargs = copied(call_arguments(example))
    with eval_mode(model), torch.no_grad(), seeded():
        seen = pytree.tree_leaves(plain_outputs(call_with(model, changed, args, kwargs)))
    return difference(wanted, seen, tolerance=SAME) is None

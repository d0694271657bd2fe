"""Turning heads: other factors of the same products, with the leading singular directions first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.examples import run
from hap.groups import Slice, Space

CLOSE = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-5, torch.float64: 1e-6}
"""How far outputs may be off, relative to the largest: some forwards compute parts in float32 whatever they get."""


@contextmanager
def turned(model: nn.Module, spaces: Sequence[Space], example: Any = None) -> Iterator[None]:
    """Turn these heads in place, for good unless something inside raises.

    With an `example`, HapError if the model then returns anything else.
    """
    if not spaces:
        yield
        return
    tensors = dict(model.named_parameters(remove_duplicate=False))
    wanted = None if example is None else outputs(model, example)
    before = turn_(tensors, spaces)
    try:
        if wanted is not None and (problem := difference(wanted, outputs(model, example))):
            raise HapError(f"the model depends on the basis of heads to be narrowed, so nothing was changed: {problem}")
        yield
    except BaseException:
        for name, values in before.items():
            tensors[name].data.copy_(values)
        raise


@torch.no_grad()
def turn_(tensors: dict[str, nn.Parameter], spaces: Sequence[Space]) -> dict[str, Tensor]:
    """Write the factors of each product by singular values, the largest first; returns what the tensors were."""
    parts = [part for s in spaces for part in (*s.left, *s.right)]
    names = {n for part in parts for n in (part.weight, part.bias) if n is not None}
    before = {n: tensors[n].detach().clone() for n in names}
    for space in spaces:
        sides = [torch.cat([_matrix(tensors, part) for part in side]) for side in (space.left, space.right)]
        for side, values in zip((space.left, space.right), factors(*sides), strict=True):
            for part, rows in zip(side, values.split([len(_matrix(tensors, p)) for p in side]), strict=True):
                _write(tensors, part, rows)
    return before


def factors(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """L and R with the same L R^T, their columns the singular vectors of it times the roots of the singular values.

    Both are (something, width), so the product itself, as large as a layer, is never made.
    """
    (q, a), (p, b) = torch.linalg.qr(left), torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(a @ b.mT)
    rank = len(s)
    made = [(q @ u[:, :rank]) * s.sqrt(), (p @ vh.mT[:, :rank]) * s.sqrt()]
    return tuple(torch.nn.functional.pad(m, (0, left.shape[1] - rank)) for m in made)  # type: ignore[return-value]


def _matrix(tensors: dict[str, nn.Parameter], part: Slice) -> Tensor:
    """(inputs or outputs of the layer, width of the head), with the bias as one more row."""
    matrix = tensors[part.weight].detach().narrow(part.dim, part.start, part.width).double()
    matrix = matrix.mT if part.dim == 0 else matrix
    if part.bias is None:
        return matrix
    return torch.cat([matrix, tensors[part.bias].detach()[None, part.start : part.start + part.width].double()])


def _write(tensors: dict[str, nn.Parameter], part: Slice, values: Tensor) -> None:
    if part.bias is not None:
        tensors[part.bias].data[part.start : part.start + part.width] = values[-1]
        values = values[:-1]
    tensors[part.weight].data.narrow(part.dim, part.start, part.width).copy_(values.mT if part.dim == 0 else values)


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(run(model, example)) if isinstance(leaf, Tensor)]


def difference(wanted: Sequence[Tensor], seen: Sequence[Tensor]) -> str | None:
    """How outputs differ by more than rounding, in words."""
    for i, (a, b) in enumerate(zip(wanted, seen, strict=True)):
        if a.is_floating_point() and a.numel():
            off, most = (float(x.nan_to_num().abs().max()) for x in (a - b, a))
            allowed = CLOSE.get(a.dtype, 1e-5) * most
            if off > allowed or not torch.equal(a.isfinite(), b.isfinite()):
                return f"output {i} is off by {off:.3g} (allowed {allowed:.3g})"
    return None

"""Rotating heads: other factors of the same products, with the leading singular directions first."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.model_outputs import difference, in_float64, is_float32, output_tensors
from hap.groups.types import HeadSlice, HeadSpace

CLOSE = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-5, torch.float64: 1e-6}
"""How far outputs may be off, relative to the largest: some forwards compute parts in float32 whatever they get."""


@contextmanager
def rotated(model: nn.Module, spaces: Sequence[HeadSpace], example: Any = None) -> Iterator[None]:
    """Rotate these heads in place, for good unless something inside raises. With an `example`, HapError if the model
    then returns anything else."""
    if spaces and example is not None:
        problem = rotation_changes(model, spaces, example)
        if problem and is_float32(model):  # by rounding? Float64 tells.
            exact, again = in_float64(model, example)
            problem = rotation_changes(exact, spaces, again)
        if problem:
            what = "the model depends on the basis of heads to be narrowed, so nothing was changed"
            raise HapError(f"{what}: {problem}")
    with restored_on_failure(model, rotate_(model, spaces)):
        yield


@contextmanager
def restored_on_failure(model: nn.Module, before: Mapping[str, Tensor]) -> Iterator[None]:
    """If something inside raises, parameters get these values back."""
    try:
        yield
    except BaseException:
        restore_(model, before)
        raise


def rotation_changes(
    model: nn.Module, spaces: Sequence[HeadSpace], example: Any, wanted: list[Any] | None = None
) -> str | None:
    """What rotating these heads changes in the outputs (`wanted`, where they are known), in words. The model is left as
    it was."""
    wanted = output_tensors(model, example) if wanted is None else wanted
    before = rotate_(model, spaces)
    try:
        return difference(wanted, output_tensors(model, example), tolerance=CLOSE)
    finally:
        restore_(model, before)


@torch.no_grad()
def rotate_(model: nn.Module, spaces: Sequence[HeadSpace]) -> dict[str, Tensor]:
    """Write the factors of each product by singular values, the largest first; returns what the tensors were. HapError
    where a weight is not finite; the model is then as it was."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    parts = [part for s in spaces for part in (*s.left, *s.right)]
    before = values_of(model, {name for part in parts for name, _ in part.axes})
    if bad := [n for n in sorted(before) if not before[n].isfinite().all()]:
        raise HapError(f"{bad[0]} holds values that are not finite; heads can be narrowed where all weights are")
    for space in spaces:
        sides = [torch.cat([_matrix(tensors, part) for part in side]) for side in (space.left, space.right)]
        for side, values in zip((space.left, space.right), balanced_factors(*sides), strict=True):
            for part, rows in zip(side, values.split([len(_matrix(tensors, p)) for p in side]), strict=True):
                _write(tensors, part, rows)
    return before


def values_of(model: nn.Module, names: Container[str] | None = None) -> dict[str, Tensor]:
    """Copies of the parameters with these names, or of all."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.detach().clone() for name, p in named if names is None or name in names}


def restore_(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name, values in before.items():
        tensors[name].data.copy_(values)


def balanced_factors(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """L and R with the same L R^T, their columns its singular vectors times the roots of the singular values. Both are
    (something, width), so the product itself, as large as a layer, is never made."""
    (q, a), (p, b) = torch.linalg.qr(left), torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(a @ b.mT)
    rank = len(s)
    made = [(q @ u[:, :rank]) * s.sqrt(), (p @ vh.mT[:, :rank]) * s.sqrt()]
    return tuple(torch.nn.functional.pad(m, (0, left.shape[1] - rank)) for m in made)  # type: ignore[return-value]


def _matrix(tensors: dict[str, nn.Parameter], part: HeadSlice) -> Tensor:
    """(inputs or outputs of the layer, width of the head), with the bias as one more row; on the CPU, where small
    decompositions are fast."""
    matrix = tensors[part.weight].detach().narrow(part.dim, part.start, part.width)
    matrix = matrix.mT if part.dim == 0 else matrix
    if part.bias is not None:
        matrix = torch.cat([matrix, tensors[part.bias].detach()[None, part.start : part.start + part.width]])
    return matrix.to("cpu", torch.float64)


def _write(tensors: dict[str, nn.Parameter], part: HeadSlice, values: Tensor) -> None:
    if part.bias is not None:
        tensors[part.bias].data[part.start : part.start + part.width] = values[-1]
        values = values[:-1]
    tensors[part.weight].data.narrow(part.dim, part.start, part.width).copy_(values.mT if part.dim == 0 else values)

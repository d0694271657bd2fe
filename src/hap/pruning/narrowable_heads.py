"""narrowable: which attention heads can do with less width, found by trying.

A head's scores depend on its query and key slices through their product alone, and its output on its value and output
slices through theirs. Which rows belong together, and whether something in between such as a rotary embedding depends
on the basis, is not read from names: other factors of the same products are put in, and the outputs must not change.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.calling import hooked, run
from hap.execution.model_outputs import in_float64, output_tensors
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import heads
from hap.groups.types import Group, HeadSlice, HeadSpace
from hap.surgery.rotate_heads import rotation_changes

Widths = dict[str, list[tuple[int, int]]]


def narrowable(model: nn.Module, groups: Groups, example: Any) -> Groups:
    """Find out which heads `hap.NarrowHeads` can narrow, and where. Each possibility is tried on a copy.

    >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(1, 3, 8)
    >>> groups = hap.narrowable(layer, hap.trace(layer, x), x)
    >>> len(groups.head_spaces)  # none, since one weight of nn.MultiheadAttention holds queries, keys and values
    0

    Plan with them by `hap.plan(groups, scores, hap.Budget(flops=0.8), implant=hap.NarrowHeads(ratio=0.5, rank=0.5))`.

    Arguments: `groups` as `hap.trace` found them in this `model`, and an `example` to run copies on.
    Returns: these groups, with the places. Where queries and keys do not bear it, as under rotary embeddings, values
    and outputs alone are narrowed; heads that bear neither are left out.
    """
    names = [n for n in heads(groups) if not groups.pads(n)]
    seen = _layers_seen(model, example, groups, names)
    shapes = [shape for name in names if (shape := _shape_of(groups, groups[name], seen)) is not None]
    if not shapes:
        return replace(groups, head_spaces=())
    trial = _Trial(model, example, shapes)
    values = trial.settle(shapes)
    keys = trial.settle([replace(shape, value=place) for shape, place in values.items()])
    spaces = [space for shape, place in (*values.items(), *keys.items()) for space in _spaces(shape, place)]
    return replace(groups, head_spaces=tuple(spaces))


# ---- what a head owns -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """The slices of the heads of one layer: `computed[u]` are those of queries, keys and values of head u, in some
    order, and `read[u]` those of the output layer. `value` is the place of the values among the first, once known."""

    name: str
    computed: tuple[tuple[HeadSlice, ...], ...]
    read: tuple[tuple[HeadSlice, ...], ...]
    value: int = -1

    @property
    def count(self) -> int:
        return len(self.computed[0])


def _spaces(shape: _Shape, place: int) -> list[HeadSpace]:
    """The spaces between values and outputs, if the slices at this place are the values. Where these are known, those
    between queries and keys, if the keys are at this place and all others are queries."""
    if shape.value < 0:
        return [HeadSpace(shape.name, u, shape.read[u], (own[place],)) for u, own in enumerate(shape.computed)]
    queries = [i for i in range(shape.count) if i not in (place, shape.value)]
    return [
        HeadSpace(shape.name, u, tuple(own[i] for i in queries), (own[place],)) for u, own in enumerate(shape.computed)
    ]


def _shape_of(groups: Groups, group: Group, seen: Widths) -> _Shape | None:
    """The slices of a layer's heads; None where their layers cannot be made narrower one by one."""
    computed = [(p.weight, p.dim, p.unit) for p in group.producers]
    unit = np.full(groups.classes, -1)
    unit[group.classes] = np.arange(len(group))
    read = [(weight, dim, unit[groups.axes[weight, dim]]) for weight, dim in group.consumers]
    for side, layers in enumerate((read, computed)):
        for weight, _, own in layers:
            module, _, leaf = weight.rpartition(".")
            uses = sum(term.weight == weight for term in groups.costs.weight_macs)
            if leaf != "weight" or [widths[side] for widths in seen.get(module, [])] != [len(own)] * uses:
                return None
    rows, columns = (sum(int((own == 0).sum()) for _, _, own in layers) for layers in (computed, read))
    width, rest = divmod(rows - columns, 2)  # queries are as many as outputs, keys and values one each
    if rest or width < 2:
        return None
    made, used = (
        tuple(tuple(_slices(groups, layers, u, width, biased)) for u in range(len(group)))
        for layers, biased in ((computed, True), (read, False))
    )
    whole = len(made[0]) * width == rows and len(used[0]) * width == columns
    even = all(len({len(own) for own in side}) == 1 for side in (made, used))
    return _Shape(group.name, made, used) if whole and even and len(made[0]) > 2 else None


def _slices(groups: Groups, layers: Iterable[Any], unit: int, width: int, biased: bool) -> Iterator[HeadSlice]:
    """A head's blocks of neighbouring rows, each as wide as the head."""
    for weight, dim, own in layers:
        bias = f"{weight.rpartition('.')[0]}.bias"
        bias_of = bias if biased and (bias, 0) in groups.axes else None
        for block in np.split(places := np.flatnonzero(own == unit), range(width, len(places), width)):
            if len(block) == width and block[-1] - block[0] == width - 1:
                yield HeadSlice(weight, dim, int(block[0]), width, bias_of)


def _layers_seen(model: nn.Module, example: Any, groups: Groups, names: Sequence[str]) -> Widths:
    """The widths of what enters and leaves each layer of the heads, call by call, where a hook can change both."""
    computing = [p.weight for n in names for p in groups[n].producers]
    reading = [weight for n in names for weight, _ in groups[n].consumers]
    seen: Widths = {w.rpartition(".")[0]: [] for w in computing + reading}

    def note(calls: list[tuple[int, int]], module: Any, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.append((args[0].shape[-1], output.shape[-1]))

    with hooked(model, after=[(name, partial(note, calls)) for name, calls in seen.items()]):
        run(model, example)
    return seen


class _Trial:
    """A copy of the model with random heads in float64, and what it returns."""

    def __init__(self, model: nn.Module, example: Any, shapes: Sequence[_Shape]):
        self.model, self.example = in_float64(model, example)
        tensors = dict(self.model.named_parameters())
        generator = torch.Generator().manual_seed(0)
        slices = {s for shape in shapes for own in (*shape.computed, *shape.read) for s in own}
        for name in sorted({s.weight for s in slices} | {s.bias for s in slices if s.bias}):
            tensor = tensors[name].data
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(drawn * (2 / max(tensor.shape) ** 0.5 if tensor.ndim > 1 else 0.5))
        try:
            self.wanted = output_tensors(self.model, self.example)
        except Exception as error:
            what, why = type(model).__name__, (str(error).strip() or type(error).__name__).splitlines()[0]
            raise HapError(f"{what} does not run in float64, where narrow heads are tried: {why}") from error

    def settle(self, shapes: Sequence[_Shape]) -> dict[_Shape, int]:
        """For each layer the place with which its heads bear other factors. All layers at once, if that works."""
        found: dict[_Shape, int] = {}
        for place in range(max((s.count for s in shapes), default=0))[::-1]:  # most have the values last
            left = [s for s in shapes if s not in found and s.value != place < s.count]
            if self._bears([space for s in left for space in _spaces(s, place)]):
                found |= dict.fromkeys(left, place)
            else:
                found |= {s: place for s in left if self._bears(_spaces(s, place))}
        return found

    def _bears(self, spaces: Sequence[HeadSpace]) -> bool:
        return bool(spaces) and rotation_changes(self.model, spaces, self.example, self.wanted) is None

"""What a kernel sees: windows of a padded input, and which positions of a large map are looked at."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], sides: Sequence[tuple[int, int]]
) -> Tensor:
    """A view of the input, padded with zeros at both `sides` of each axis, with the inputs of each position on axes of
    their own: (batch, channels, *positions, *kernel)."""
    n = len(kernel)
    x = F.pad(x, [side for pair in reversed(sides) for side in pair])
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    sizes = [(x.shape[2 + i] - reach[i] - 1) // stride[i] + 1 for i in range(n)]
    steps = [x.stride(2 + i) * stride[i] for i in range(n)] + [x.stride(2 + i) * dilation[i] for i in range(n)]
    return x.as_strided((*x.shape[:2], *sizes, *kernel), (*x.stride()[:2], *steps))


def draw_positions(count: int, most: int, generator: torch.Generator) -> Tensor:
    """At most so many of `count` positions."""
    if count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=generator)[:most].sort().values


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def drawn_rows(module: nn.Module, x: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """What a linear layer or a convolution reads at positions drawn at random: (positions, inputs * kernel area)."""
    if isinstance(module, nn.Linear):
        flat = x.reshape(-1, x.shape[-1])
        return flat[draw_positions(len(flat), most, generator)]
    assert isinstance(module, Convolution) and not isinstance(module.padding, str)
    x = x if x.ndim == len(module.kernel_size) + 2 else x[None]
    how = module.kernel_size, module.stride, module.dilation, [(p, p) for p in module.padding]
    seen = windows(x, *how).movedim(1, 1 + len(module.kernel_size))  # (batch, *positions, channels, *kernel)
    places = seen.shape[: 1 + len(module.kernel_size)]
    drawn = draw_positions(places.numel(), most, generator)
    return seen[torch.unravel_index(drawn, places)].flatten(1)


def can_be_solved(module: nn.Module) -> bool:
    """Whether `drawn_rows` knows all that the module reads: linear layers, and convolutions that are not grouped."""
    if isinstance(module, Convolution):
        return module.groups == 1 and not isinstance(module.padding, str) and module.padding_mode == "zeros"
    return isinstance(module, nn.Linear)

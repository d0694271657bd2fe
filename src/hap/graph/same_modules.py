"""Whether two modules could be told apart by what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def same_modules(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules with the same submodules agree in all that these hold, beside the values of tensors."""
    pairs = zip(a.modules(), b.modules(), strict=True)
    try:
        return all(vars(x).keys() == vars(y).keys() and _same_attributes(vars(x), vars(y)) for x, y in pairs)
    except RecursionError:  # something holds itself
        return False


def _same_attributes(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    tensors = all(_forms(a[kind]) == _forms(b[kind]) for kind in ("_parameters", "_buffers"))
    return tensors and all(_same(a[k], b[k]) for k in a if k not in ("_parameters", "_buffers", "_modules"))


def _forms(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {n: None if t is None else (t.shape, t.dtype, t.requires_grad) for n, t in tensors.items()}


def _same(a: Any, b: Any) -> bool:
    """Whether no forward could tell these values apart. Of objects, only one is the same as itself."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, PLAIN):
        return bool(a == b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    return isinstance(a, set | frozenset) and all(isinstance(x, PLAIN) for x in a) and a == b

"""Modules of copies of a model that note which of their attributes are read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

SETTINGS = (bool, str, type(None), torch.dtype)
"""Attributes of these types steer what a forward does. They count nothing."""


def watch_(module: Any, note: Callable[[str], Any], passing: bool = False) -> None:
    """From now on `note` hears the names of numbers, tensors, submodules and the like that are read of this module.

    It is a function, so that copies of the module share it. If the module is `passing`, it returns what it is given.
    """
    kind: Any = type(module)
    module._note = note
    module.__class__ = _watched(kind, passing)


@lru_cache(maxsize=256)
def _watched(kind: Any, passing: bool) -> type[nn.Module]:
    class Watched(kind):
        def __getattribute__(self, name: str) -> Any:
            return _noted(self, name, super().__getattribute__(name))

        def __getattr__(self, name: str) -> Any:  # tensors and submodules, which no plain look-up finds
            return _noted(self, name, super().__getattr__(name))

    class Passing(Watched):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return x

    made = Passing if passing else Watched
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return made


def _noted(module: Any, name: str, value: Any) -> Any:
    if not name.startswith("_") and name != "training" and not isinstance(value, (*SETTINGS, MethodType)):
        module._note(name)
    return value

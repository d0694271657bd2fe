"""Modules of copies of a model that note which of their attributes are read while the model runs."""

from __future__ import annotations

from collections.abc import Set
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

SETTINGS = (bool, str, type(None), torch.dtype)
"""Attributes of these types steer what a forward does. They count nothing."""
CONTENTS = frozenset({"_parameters", "_buffers", "_modules"})
"""What is reached by an index or by `parameters()` is read from these."""
OWN = frozenset(dir(nn.Module())) - CONTENTS
"""What every module has. Some of it, such as `half`, is a method that a module may have a value of its own for."""
STATE = frozenset(vars(nn.Module()))


class Reads:
    """What is read of watched modules while the model that they belong to, or a copy of it, runs.

    A watched module has a subclass of its class. `end` takes it out of the subclasses that its class knows.
    """

    def __init__(self, model: nn.Module):
        self.names: set[tuple[str, str]] = set()
        self.missed: set[str] = set()
        self.running = False
        self.classes: dict[tuple[type, bool], Any] = {}

        def begin(*_: Any) -> None:
            self.running = True

        def stop(*_: Any) -> None:
            self.running = False

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(stop, always_call=True)

    def watch_(self, module: nn.Module, name: str, passing: bool = False) -> bool:
        """Note what is read of this module, known by a name; `passing`: let it return what it is given.

        One that passes on has no use for its tensors and submodules, and copies without them take less time. If they
        are asked for all the same, it is among those `missed`. False, if its class cannot have such a subclass.
        """

        def note(attribute: str, missed: bool = False) -> None:
            if not self.running:
                return
            self.names.add((name, attribute))
            if passing and (missed or attribute in CONTENTS):
                self.missed.add(name)

        key = (type(module), passing)
        try:
            kind = self.classes.get(key) or _watched(*key)
            vars(module)["_note"] = note
            module.__class__ = kind
        except TypeError:
            return False
        self.classes[key] = kind
        if passing:
            vars(module).update({contents: {} for contents in CONTENTS})
        return True

    def forget(self, modules: Set[str]) -> None:
        """What was read of these."""
        self.names = {(module, attribute) for module, attribute in self.names if module not in modules}

    def end(self) -> None:
        """The watched modules are of no use any more."""
        for kind in self.classes.values():
            kind.__bases__ = (nn.Module,)


def _watched(kind: Any, passing: bool) -> Any:
    """A subclass, made in a way that runs no code of its class."""

    class Watched(nn.Module):
        def __getattribute__(self, name: str) -> Any:
            return _noted(self, name, super().__getattribute__(name))

        def __getattr__(self, name: str) -> Any:  # tensors and submodules, which no plain look-up finds
            try:
                return _noted(self, name, super().__getattr__(name))
            except Exception:  # a class that hands on what it lacks to a submodule recurses without it
                if note := vars(self).get("_note"):
                    note(name, missed=True)
                raise

    if passing:
        Watched.forward = _pass_on
    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    Watched.__bases__ = (kind,)
    return Watched


def _pass_on(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _noted(module: Any, name: str, value: Any) -> Any:
    own = name in OWN and (name in STATE or name not in object.__getattribute__(module, "__dict__"))
    if not own and name != "_note" and not isinstance(value, (*SETTINGS, MethodType)):
        module._note(name)
    return value

"""Note which attributes of a model's modules are read while a copy of the model runs."""

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.groups.types import SizeAttribute

SETTINGS = (bool, str, type(None), torch.dtype)
"""Attributes of these types steer what a forward does. They count nothing."""
CONTENTS = frozenset({"_parameters", "_buffers", "_modules"})
"""What is reached by an index or by `parameters()` is read from these."""
OWN = frozenset(dir(nn.Module())) - CONTENTS
"""What every module has. Some of it, such as `half`, is a method that a module may have a value of its own for."""
STATE = frozenset(vars(nn.Module()))


class AttributeReads:
    """What is read of watched modules while the copies of a model that they belong to run.

    A watched module has a subclass of its class. `end` takes it out of the subclasses that its class knows.
    """

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()
        self.watched: set[str] = set()
        self.passing: set[str] = set()
        self.missed: set[str] = set()
        self.running = False
        self.classes: dict[type, Any] = {}

    def watch_(self, model: nn.Module, modules: Iterable[str], blocks: Iterable[str]) -> None:
        """Note what is read of these modules of a model, and let these blocks return what they are given.

        A block that passes on has no use for its tensors and submodules, and copies without them take less time. If
        they are asked for all the same, it is among those `missed`. `nn.MultiheadAttention` is not watched: it gets a
        new class when it is pruned.
        """
        model.register_forward_pre_hook(lambda *_: setattr(self, "running", True))
        model.register_forward_hook(lambda *_: setattr(self, "running", False), always_call=True)
        for name in modules:
            module = model.get_submodule(name)
            if not isinstance(module, nn.MultiheadAttention) and self._watch_(module, name):
                self.watched.add(name)
        for name in blocks:
            if not self._watch_(model.get_submodule(name), name, passing=True):
                raise HapError(f"{name} cannot be left out")
            self.passing.add(name)

    def _watch_(self, module: nn.Module, name: str, passing: bool = False) -> bool:
        """Watch one module. False, if its class cannot have such a subclass."""

        def note(attribute: str, missed: bool = False) -> None:
            if not self.running:
                return
            self.names.add((name, attribute))
            if passing and (missed or attribute in CONTENTS):
                self.missed.add(name)

        kind = type(module)
        try:
            watched = self.classes.get(kind) or _watched(kind)
            vars(module)["_note"] = note
            module.__class__ = watched
        except TypeError:
            return False
        self.classes[kind] = watched
        if passing:
            vars(module).update({held: {} for held in CONTENTS}, forward=MethodType(_pass_on, module))
        return True

    def was_read(self, x: SizeAttribute) -> bool:
        """Whether this attribute was read since `forget`, as far as is known."""
        return x.module not in self.watched or (x.module, x.attribute) in self.names

    def looked_into(self, blocks: Iterable[str]) -> bool:
        """Whether anything was ever read of these blocks, as far as is known."""
        read = {module for module, _ in self.names}
        return any(block in read or block not in self.passing for block in blocks)

    def forget(self) -> None:
        """Forget what was read of modules, but not of blocks that pass on."""
        self.names = {(module, attribute) for module, attribute in self.names if module not in self.watched}

    def end(self) -> None:
        """The watched modules are of no use any more."""
        for kind in self.classes.values():
            kind.__bases__ = (nn.Module,)


def _watched(kind: Any) -> Any:
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

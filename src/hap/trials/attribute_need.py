"""Whether a module would miss an attribute that follows what is cut: asked of that module alone.

A trial runs the whole model. Whether a number need not follow after all shows in the module that holds it, on what that
was called with while the model ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.execution.calling import eval_mode
from hap.execution.compare_outputs import difference
from hap.execution.masked_execution import NoEmptyHeads
from hap.groups.types import SizeAttribute
from hap.surgery.cut import with_entry


class Without(Enum):
    """What becomes of a module if an attribute does not follow."""

    FAILS = "it fails, and so does its model"
    DIFFERS = "it returns something else, which its model may or may not make use of"
    SAME = "it returns the same"
    UNKNOWN = "called again, it does not return the same anyway"


@dataclass
class Call:
    """What a module was called with, and what it returned. `versions` tell if that was written to since, `steady`
    whether it returns the same when it is called again, once that was tried."""

    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    versions: list[int]
    returned: Any = None
    steady: bool | None = None

    def again(self) -> Any:
        args, kwargs = self.given
        with eval_mode(self.module), torch.no_grad(), NoEmptyHeads():
            return self.module(*args, **kwargs)

    def is_returned(self, found: Any) -> bool:
        return difference(pytree.tree_leaves(self.returned), pytree.tree_leaves(found)) is None

    def is_steady(self) -> bool:
        """Not with a state, such as a cache that grows, nor with one that its model gives it for the call."""
        if self.steady is None:
            try:
                self.steady = self.is_returned(self.again())
            except Exception:
                self.steady = False
        return self.steady


class Calls:
    """The first call of each of these modules while a pruned copy of their model runs."""

    def __init__(self, modules: Iterable[str]):
        self.names = set(modules)
        self.model: nn.Module | None = None
        self.found: dict[str, Call] = {}

    def listen_(self, model: nn.Module) -> None:
        """To this copy, which nobody else uses, and to none that was listened to before."""
        self.model = model
        self.found.clear()
        me = weakref.proxy(self)  # a copy that held what holds it would stay until garbage is collected
        for name in self.names:
            model.get_submodule(name).register_forward_pre_hook(_entering(me, name), with_kwargs=True)
            model.get_submodule(name).register_forward_hook(_leaving(me, name))

    def without(self, length: SizeAttribute, dense: Any) -> Without:
        """What becomes of the module with the attribute as it is in the `dense` module."""
        call = self.found.get(length.module)
        if call is None or call.returned is None or not call.is_steady():
            return Without.UNKNOWN
        if _versions((call.given, call.returned)) != call.versions:
            return Without.UNKNOWN
        followed, whole = getattr(call.module, length.attribute), getattr(dense, length.attribute)
        value = whole[length.entry] if isinstance(whole, tuple | list) else whole
        setattr(call.module, length.attribute, with_entry(followed, length.entry, value))
        try:
            return Without.SAME if call.is_returned(call.again()) else Without.DIFFERS
        except Exception:  # a forward that gets other sizes than it counted on may raise anything
            return Without.FAILS
        finally:
            setattr(call.module, length.attribute, followed)


def _entering(calls: Calls, name: str) -> Any:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in calls.found:
            calls.found[name] = Call(module, (args, kwargs), _versions((args, kwargs)))

    return enter


def _leaving(calls: Calls, name: str) -> Any:
    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = calls.found[name]
        if call.returned is None:
            call.returned, call.versions = output, [*call.versions, *_versions(output)]

    return leave


def _versions(values: Any) -> list[int]:
    return [x._version for x in pytree.tree_leaves(values) if isinstance(x, Tensor) and not x.is_inference()]

"""Whether a module would miss an attribute that follows what is cut: asked of that module alone.

A trial runs the whole model. Whether a number need not follow after all shows in the module that holds it, on what that
was called with while the model ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.comparing import difference
from hap.examples import evaluating
from hap.groups import Length
from hap.zeros import NoEmptyHeads


@dataclass
class Call:
    """What a module was called with, and what it returned. `versions` tell if that was written to since."""

    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    versions: list[int]
    returned: Any = None


class Calls:
    """The first call of each of these modules while a pruned copy of their model runs."""

    def __init__(self, modules: Iterable[str]):
        self.names = set(modules)
        self.found: dict[str, Call] = {}

    def listen_(self, model: nn.Module) -> None:
        """To this copy, which nobody else uses."""
        for name in self.names:
            model.get_submodule(name).register_forward_pre_hook(self._enter(name), with_kwargs=True)
            model.get_submodule(name).register_forward_hook(self._leave(name))

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in self.found:
                self.found[name] = Call(module, (args, kwargs), _versions((args, kwargs)))

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.found[name].returned is None:
                call = self.found[name]
                call.returned, call.versions = output, [*call.versions, *_versions(output)]

        return leave

    def missed(self, length: Length, dense: Any) -> bool:
        """Whether the module returns something else, or fails, with the attribute as it is in the `dense` module.

        False, if that is not known.
        """
        call = self.found.get(length.module)
        if call is None or call.returned is None or _versions((call.given, call.returned)) != call.versions:
            return False
        followed = getattr(call.module, length.attribute)
        setattr(call.module, length.attribute, _with_entry(followed, getattr(dense, length.attribute), length.entry))
        try:
            args, kwargs = call.given
            with evaluating(call.module), torch.no_grad(), NoEmptyHeads():
                again = call.module(*args, **kwargs)
        except Exception:  # a forward that gets other sizes than it counted on may raise anything
            return True
        finally:
            setattr(call.module, length.attribute, followed)
        return difference(pytree.tree_leaves(call.returned), pytree.tree_leaves(again)) is not None


def _with_entry(followed: Any, dense: Any, entry: int) -> Any:
    """The dense value; of several in a tuple, the one at `entry`."""
    if isinstance(followed, tuple | list):
        return type(followed)([*followed[:entry], dense[entry], *followed[entry + 1 :]])
    return dense


def _versions(values: Any) -> list[int]:
    return [x._version for x in pytree.tree_leaves(values) if isinstance(x, Tensor) and not x.is_inference()]

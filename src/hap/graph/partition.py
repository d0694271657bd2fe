"""Models that torch.export cannot capture as a whole, such as detectors, by the parts that it can.

A detector picks boxes by value, which no fixed graph can express, but its backbone, neck and heads are plain networks.
`parts` runs the model once, finds the largest submodules that torch.export can capture, and gives a view of the model
that runs just those, each on what it was called with. The view has the same submodules under the same names, so
whatever prunes the view prunes the model.
"""

import inspect
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hap.errors import HapError
from hap.execution.calling import call_arguments
from hap.execution.fast_copy import copy_with
from hap.execution.input_checks import check_given
from hap.execution.sampled_convolution import SampledConvolutions
from hap.graph.capture import Captured, capture, captured, check_runs, running_modules
from hap.utils.module_tree import named_tensors, takes_hooks

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Noted:
    """What a submodule was called with, and the names of the modules that were running then, outer ones first."""

    name: str
    running: tuple[str, ...]
    call: Call

    def within(self, names: Container[str]) -> bool:
        """Whether one of these was running of which the submodule is a part: what it returned then stays inside."""
        return any(other in names and self.name.startswith(f"{other}.") for other in self.running)


class Parts(nn.Module):
    """The parts of a model: same submodules, same names, but a forward that runs each part on its own inputs.

    `example` holds these inputs, one (arguments, keyword arguments) for each call of a part. The outputs of all parts
    are outputs of the view, and so what passes between parts is never cut. A module inside of a part that is also
    called from outside of it, by itself, is one more part.
    """

    def __init__(self, model: nn.Module, calls: list[tuple[str, Call]]):
        super().__init__()
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self.names = [name for name, _ in calls]
        self.example = tuple(call for _, call in calls)

    def forward(self, *calls: Call) -> list[Any]:
        return [self.get_submodule(name)(*args, **kw) for name, (args, kw) in self.named(calls)]

    def named(self, calls: Sequence[Call]) -> list[tuple[str, Call]]:
        """Each call with the name of the part that it is for."""
        if len(calls) != len(self.names):
            raise HapError(
                f"this view runs {len(self.names)} calls of parts, but the example has {len(calls)}: use view.example"
            )
        return list(zip(self.names, calls, strict=True))


def touched(model: nn.Module, example: Any, tensors: Iterable[str]) -> tuple[nn.Module, Any]:
    """The model and its example; of a view, those parts that hold any of these tensors: all others stay as they are."""
    if not isinstance(model, Parts):
        return model, example
    known = named_tensors(model)
    wanted = {id(known[name]) for name in tensors}
    holding = {n: not wanted.isdisjoint(map(id, named_tensors(model.get_submodule(n)).values())) for n in model.names}
    calls = [(name, call) for name, call in model.named(call_arguments(example)[0]) if holding[name]]
    return (Parts(model, calls), tuple(call for _, call in calls)) if calls else (model, example)


def parts(model: nn.Module, example: Any) -> Parts:
    """A view of the largest parts of `model` that torch.export can capture. The model is not changed.

    Prune the view, and the model is pruned: `view = parts(detector, ([image],)); hap.prune_(view, view.example, ...)`.
    """
    check_given(model, example)
    return captured_parts(model, example)[0]


def captured_parts(model: nn.Module, example: Any) -> tuple[Parts, Captured]:
    """The view that `parts` makes, with what torch.export captures of it: that takes as long as all the rest.

    What keeps torch.export from a module is most often a choice by value, which running the model shows. If anything
    else does, the modules that were running are left out, for those inside of them to be tried. Where none was running,
    or that leads nowhere soon, each is tried by itself.
    """
    calls, failing = _calls(model, example)
    for _ in range(MOST_BLAMED):
        view = _view(model, calls, failing)
        try:
            return view, captured(view, view.example)
        except Exception as error:  # whatever it is, it need not be in all of them
            running = {id(module) for module in running_modules(error)}
        blamed = {name for name, module in _able(model, calls, failing).items() if id(module) in running}
        failing |= blamed
        if not blamed:
            break
    view = _one_by_one(model, calls, failing)
    return view, capture(view, view.example)


def view_where_it_chooses(model: nn.Module, example: Any) -> Parts | None:
    """A view of the largest parts that do not choose by value, if the model is seen to do so when it runs; else None.

    torch.export finds that out too, but only after it has captured all that comes before the choice. Models whose code
    does not look like it are not run. Whether torch.export captures the view is not known yet.
    """
    if not may_choose(model):
        return None
    calls, choosing = _coarse_calls(model, example) or _calls(model, example)
    return _view(model, calls, choosing) if WHOLE in choosing else None


def _one_by_one(model: nn.Module, calls: list[Noted], failing: set[str]) -> Parts:
    """A view of the largest modules that torch.export captures by themselves; others are added to `failing`."""
    fine: set[str] = set()
    while True:
        view = _view(model, calls, failing)
        first = dict(zip(reversed(view.names), reversed(view.example), strict=True))  # the first call of each
        unfit = {n for n, call in first.items() if n not in fine and not captures(model.get_submodule(n), *call)}
        if not unfit:
            return view
        fine |= first.keys() - unfit
        failing |= unfit


def _able(model: nn.Module, calls: list[Noted], failing: set[str]) -> dict[str, nn.Module]:
    """Modules that ran, outer ones first, without those that fail when called by themselves and those that ever
    run one of these."""
    unable = set(failing)
    while more := {name for noted in calls if noted.name in unable for name in noted.running} - unable:
        unable |= more
    ran = {noted.name for noted in calls} - unable
    return {name: module for name, module in model.named_modules() if name in ran}


def _view(model: nn.Module, calls: list[Noted], failing: set[str]) -> Parts:
    """All calls of modules that are able, but for those from inside of others that are."""
    able = _able(model, calls, failing)
    if not able:
        raise HapError(f"torch.export can capture no part of {type(model).__name__} on this example")
    place = {name: i for i, name in enumerate(able)}
    outer = [noted for noted in calls if noted.name in able and not noted.within(able)]
    return Parts(model, [(noted.name, noted.call) for noted in sorted(outer, key=lambda noted: place[noted.name])])


MOST_BLAMED = 3
"""How often modules in which capturing failed are left out before each is tried by itself."""
WHOLE = ""
"""The name of the model itself among its modules."""

CHOICES = {"argwhere", "batched_nms", "masked_select", "nms", "nonzero", "unique"}
"""Names of functions whose result is as long as values tell."""
ASKING = {"is_compiling", "is_dynamo_compiling", "is_exporting", "is_torchdynamo_compiling"}
"""Names of functions by which code finds out whether it is captured: it may well choose then in another way."""


def may_choose(model: nn.Module) -> bool:
    """Whether the code of a forward, or of a method that it calls, names such a function, and none that asks."""
    named = set().union(*(_names(kind) for kind in {type(module) for module in model.modules()}))
    return not CHOICES.isdisjoint(named) and ASKING.isdisjoint(named)


def _names(kind: type[nn.Module]) -> set[str]:
    """What the code of a class names, from its forward on."""
    found: set[str] = set()
    waiting = ["forward"]
    while waiting:
        method = inspect.getattr_static(kind, waiting.pop(), None)
        if inspect.isfunction(method):
            new = set(_names_in(inspect.unwrap(method).__code__)) - found
            found |= new
            waiting += [name for name in new if not hasattr(nn.Module, name)]
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    """Those of the code and of what is defined inside, such as comprehensions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


class _Run(TorchDispatchMode):
    """A run of a model that notes what every submodule with parameters is called with, and which modules choose: run an
    operator whose result is as long as values tell, which no graph with fixed sizes has.

    `versions` are those of the tensors noted without `copying`. `last`: no module may be called after a choice.
    """

    def __init__(self, copying: bool, last: bool) -> None:
        super().__init__()
        self.copying, self.last = copying, last
        self.calls: list[Noted] = []
        self.running: list[str] = []
        self.choosing: set[str] = set()
        self.versions: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags and (func is not INDEX or _by_mask(args[1])):
            self.choosing.update(self.running)
        return func(*args, **(kwargs or {}))

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.last and self.choosing:
            raise HapError(f"{name} is called after a choice by value")
        if name != WHOLE:
            given = pytree.tree_map_only(Tensor, self._kept, (args, kwargs))
            self.calls.append(Noted(name, tuple(self.running), given))
        self.running.append(name)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    def _kept(self, tensor: Tensor) -> Tensor:
        if self.copying or tensor.is_inference():  # which has no version
            return tensor.clone()
        self.versions.append((tensor, tensor._version))
        return tensor


INDEX = torch.ops.aten.index.Tensor


def _by_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _calls(model: nn.Module, example: Any, last: bool = False) -> tuple[list[Noted], set[str]]:
    """What every submodule with parameters is called with when the model runs, and which of them choose by value; with
    `last`, a call after a choice is an error. Tensors are copied only if something writes there."""
    for copying in (False, True):
        with _Run(copying, last) as noted, ExitStack() as stack:
            for name, module in model.named_modules():
                if takes_hooks(module) and (name == WHOLE or next(module.parameters(), None) is not None):
                    enter = partial(noted.enter, name)
                    stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(noted.leave).remove)
            check_runs(model, example)
        if all(tensor._version == version for tensor, version in noted.versions):
            break
    return noted.calls, noted.choosing


def _coarse_calls(model: nn.Module, example: Any) -> tuple[list[Noted], set[str]] | None:
    """What `_calls` returns, from a coarse run of a copy, which takes a fraction of the time. None where that fails, or
    where modules are called after a choice: how many boxes they get is up to the true values."""
    try:
        copy = copy_with(model, {})
        with SampledConvolutions():
            return _calls(copy, example, last=True)
    except Exception:  # some models cannot be copied
        return None


def captures(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch.export gives a graph of this module in which every size is known."""
    view = Parts(nn.ModuleList([module]), [("0", (args, kwargs))])
    try:
        capture(view, view.example)
    except HapError:  # whatever keeps torch.export from it, its own parts are tried next
        return False
    return True

"""What torch.export captures of a model, in the form that a trace reads."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from types import SimpleNamespace, TracebackType
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

try:
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
except ImportError:  # it is not for everybody
    _use_lazy_graph_module = None  # type: ignore[assignment]

from hap.errors import CaptureError, HapError
from hap.execution.calling import call_arguments, eval_mode, forgetting_caches, run, seeded
from hap.execution.input_checks import check_given
from hap.execution.model_outputs import returning_plain_outputs
from hap.graph.nodes import schema_name
from hap.utils.module_tree import takes_hooks

CalledArguments = dict[str, list[dict[int | str, tuple[int, ...]]]]
"""By module, for each of its calls, the shapes of the tensors that it is called with."""


@dataclass(frozen=True)
class Captured:
    """The graph of a model, what its modules were called with, and how often each of those with submodules returned
    one tensor just like its first argument (-1: it returned something else at least once)."""

    program: torch.export.ExportedProgram
    called: CalledArguments
    shapes: dict[str, int]


def capture(model: nn.Module, example: Any) -> Captured:
    """What torch.export captures of the model. CaptureError: it cannot."""
    check_given(model, example)
    try:
        return captured(model, example)
    except CaptureError:
        raise
    except Exception as error:
        check_runs(model, example)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CaptureError(
            f"torch.export cannot capture {type(model).__name__} on this example: {reason}. Check that "
            "model(example) runs, and that its forward does not branch on tensor values; see the cause above."
        ) from error


def captured(model: nn.Module, example: Any, training: Set[nn.Module] = frozenset()) -> Captured:
    """As `capture`, but with whatever torch.export raises. Modules in `training` run as they do in training.

    It is stopped as soon as a size is not known, and prints nothing. What modules have written out before would be
    constants of the graph, and what they write out now is of no use.
    """
    args, kwargs = call_arguments(example)
    known = SizesKnown(type(model).__name__)
    start_autograd()
    with ExitStack() as stack:
        called, shapes = stack.enter_context(_recording_calls(model))
        quiet = (_plainly(), torch.no_grad(), redirect_stderr(StringIO()))
        for context in (*quiet, forgetting_caches(model), eval_mode(model), seeded(), known):
            stack.enter_context(context)
        stack.enter_context(returning_plain_outputs(model))
        stack.enter_context(_leaving_nothing(model))
        for module in training:
            module.training = True
        program = torch.export.export(model, args, kwargs, strict=False)
    _inline_regions(program.graph_module)
    for node in program.graph.nodes:
        known.check(node.name, node.meta.get("val"))
    return Captured(program, called, shapes)


@contextmanager
def _recording_calls(model: nn.Module) -> Iterator[tuple[CalledArguments, dict[str, int]]]:
    """Notes what modules are called with. Of those with submodules it counts the calls that return one tensor just like
    their first argument; -1: some other call."""
    called: CalledArguments = {}
    alike: dict[str, int] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        called.setdefault(name, []).append({k: tuple(v.shape) for k, v in given if isinstance(v, Tensor)})
        if name and [*module.children()]:
            same = bool(args) and all(isinstance(x, Tensor) for x in (args[0], output))
            same = same and (args[0].shape, args[0].dtype) == (output.shape, output.dtype)
            alike[name] = alike.get(name, 0) + 1 if same and alike.get(name, 0) >= 0 else -1

    with ExitStack() as stack:
        for name, module in ((n, m) for n, m in model.named_modules() if takes_hooks(m)):
            stack.callback(module.register_forward_hook(partial(note, name), with_kwargs=True).remove)
        yield called, alike


@contextmanager
def _leaving_nothing(model: nn.Module) -> Iterator[None]:
    """What a forward keeps of tensors under new names is gone again after: while it is captured they have no data, and
    no copy can be made. Other new attributes stay: one may say that hooks were put in place."""
    before = [(module, set(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, names in before:
            for name in vars(module).keys() - names:
                if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(vars(module)[name])):
                    del vars(module)[name]


_NO_TRACEBACK: Any = SimpleNamespace(extract=lambda *_, **__: _NO_TRACEBACK, summary=traceback.StackSummary)
"""What torch.fx takes for the stack at a node, with nothing on it."""


@contextmanager
def _plainly() -> Iterator[None]:
    """Inside, torch.export does not note where in the source each node comes from, and writes no code of the graph
    before somebody runs it: a quarter of its time."""
    where, name, value = getattr(fx, "config", None), "do_not_emit_stack_traces", cast(Any, True)
    if not hasattr(where, name):  # torch 2.11 and before
        where, name, value = fx.proxy, "CapturedTraceback", _NO_TRACEBACK
    with ExitStack() as stack:
        if hasattr(where, name):
            stack.enter_context(mock.patch.object(where, name, value))
        if _use_lazy_graph_module is not None:
            stack.enter_context(_use_lazy_graph_module(True))
        yield


@cache
def start_autograd() -> None:
    """Let autograd count the devices first, in a build for GPUs on a machine without one: after torch.export it would
    find some, and start a thread for each, and now and then one of these ends the process."""
    if torch.backends.cuda.is_built() and not torch.cuda.device_count():
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), requires_grad=True).backward()


def exporting(flag: object = True) -> AbstractContextManager[object]:
    """Inside, torch says that it exports, and models run as they do when they are captured."""
    return mock.patch.multiple(torch.compiler, _is_compiling_flag=flag, _is_exporting_flag=flag)


class Asked:
    """Tells models that torch does not export, and notes in `heard` if one wants to know. `known`: one ran with it."""

    def __init__(self) -> None:
        self.heard = self.known = False

    def _hear(self) -> bool:
        caller = sys._getframe(2).f_globals.get("__name__")
        self.heard = self.heard or caller != nn.Module.__module__  # which asks for hooks, and calls them either way
        return False

    def __bool__(self) -> bool:
        return self._hear()

    def __eq__(self, other: object) -> bool:
        return self._hear() == other

    def __str__(self) -> str:
        return str(self._hear())


class SizesKnown(TorchFunctionMode):
    """Raises as soon as a size depends on values: torch.export goes on for long before it gives up."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CHOOSING:
            self.check(func.__name__, result)
        return result

    def check(self, what: str, values: Any) -> None:
        sizes = (size for x in pytree.tree_leaves(values) if isinstance(x, Tensor) for size in x.shape)
        if not all(type(size) is int for size in sizes):
            raise CaptureError(
                f"torch.export cannot tell the sizes of {self.model} on this example: that of what {what} returns "
                "depends on tensor values. Trace parts of the model instead, see hap.parts."
            )


CHOOSING = {getattr(owner, name) for owner in (torch, Tensor) for name in "nonzero masked_select where unique".split()}
CHOOSING.add(Tensor.__getitem__)
"""What may return as much as values tell."""


def check_runs(model: nn.Module, example: Any) -> None:
    try:
        run(model, example)
    except HapError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HapError(f"{type(model).__name__} does not run on this example: {reason}") from error


def running_modules(error: BaseException | None) -> list[nn.Module]:
    """The modules whose forward was running when this was raised, as far as its traceback and its causes tell."""
    found: list[nn.Module] = []
    while error is not None:
        found += modules_in(error.__traceback__)
        error = error.__cause__ or error.__context__
    return found


def modules_in(trace: TracebackType | None) -> list[nn.Module]:
    """The modules whose methods a traceback passes through, outer ones first."""
    frames = (frame for frame, _ in traceback.walk_tb(trace))
    return [module for frame in frames if isinstance(module := frame.f_locals.get("self"), nn.Module)]


def _inline_regions(module: fx.GraphModule) -> None:
    """Put what runs under a `with torch.autocast(...)` or `torch.no_grad()` in place of the node that wraps it."""
    graph = module.graph
    for node in [n for n in graph.nodes if schema_name(n).startswith("wrap_with_")]:
        place = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        region = getattr(module, str(node.args[place].target))
        _inline_regions(region)
        inputs = [n for n in region.graph.nodes if n.op == "placeholder"]
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(region.graph, dict(zip(inputs, node.args[place + 1 :], strict=True)))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)

"""Functions that run in front of modules or behind them, for as long as a context lasts."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

Hooks = Iterable[tuple[str, Callable[..., Any]]]
"""Names of modules, each with a hook as torch's register_forward_pre_hook or register_forward_hook take it."""


@contextmanager
def hooked(model: nn.Module, before: Hooks = (), after: Hooks = (), first: bool = False) -> Iterator[None]:
    """Inside, these hooks run at each call of a module: `before(module, args)` may replace what it is called with,
    `after(module, args, output)` what it returns. With `first` these run in front of those that are there already."""
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name, hook in before:
            stack.callback(modules[name].register_forward_pre_hook(hook).remove)
        for name, hook in after:
            stack.callback(modules[name].register_forward_hook(hook, prepend=first).remove)
        yield

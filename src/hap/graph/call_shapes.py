"""Which modules return a tensor just like their first argument, noted while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hap.utils.module_tree import takes_hooks


@contextmanager
def noting_shapes(model: nn.Module) -> Iterator[dict[str, int]]:
    """Counts calls of the modules that return one tensor just like their first argument; -1: some other call."""
    found: dict[str, int] = {}

    def noter(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x = args[0] if args else None
            same = isinstance(x, Tensor) and isinstance(output, Tensor) and x.shape == output.shape
            same = same and x.dtype == output.dtype  # type: ignore[union-attr]
            found[name] = found.get(name, 0) + 1 if same and found.get(name, 0) >= 0 else -1

        return note

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and [*module.children()] and takes_hooks(module):
                stack.callback(module.register_forward_hook(noter(name)).remove)
        yield found

"""Hints: what modules inside both models return, towards which a model learns faster than towards the outputs alone.

The name is that of Romero et al., "FitNets: Hints for Thin Deep Nets" (2015). An output tells that something is off, a
hint tells where.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hap.distil.objective import relative_error
from hap.errors import HapError
from hap.execution.calling import hooked
from hap.execution.model_outputs import float_outputs
from hap.utils.module_tree import takes_hooks


class Hints:
    """Modules with submodules that are called once in both models, and return a tensor of the same shape there.

    Of what a module returns, the first tensor of real numbers counts. `run` computes one of the models on an input.
    """

    def __init__(self, models: tuple[nn.Module, nn.Module], run: Callable[[nn.Module], Any]):
        ours, theirs = ({name for name, m in model.named_modules() if name and _has_parts(m)} for model in models)
        self.names: Sequence[str] = [name for name, _ in models[1].named_modules() if name in ours & theirs]
        with torch.no_grad():
            seen = [self._seen(model, run) for model in models]
        different: dict[int, str] = {}
        for name in self.names:
            mine, wanted = (found.get(name, ()) for found in seen)
            if len(mine) == len(wanted) == 1 and mine[0].shape == wanted[0].shape and wanted[0].numel():
                different.setdefault(id(wanted[0]), name)
        self.names = list(different.values())

    def _seen(self, model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, list[Tensor]]:
        with self._noting(model) as found:
            run(model)
        return found

    @contextmanager
    def _noting(self, model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
        found: dict[str, list[Tensor]] = {}

        def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
            found.setdefault(name, []).extend(float_outputs(output)[:1])

        with hooked(model, after=[(name, partial(note, name)) for name in self.names]):
            yield found

    def after(self, model: nn.Module, run: Callable[[nn.Module], list[Tensor]]) -> list[Tensor]:
        """What a model returns, and behind it what the modules inside return."""
        with self._noting(model) as found:
            outputs = run(model)
        for name in self.names:
            if len(found.get(name, ())) != 1:
                raise HapError(
                    f"{name} is called {len(found.get(name, ()))} times on one input, and once on another; pass "
                    "hints=False to learn from the outputs alone"
                )
        return [*outputs, *(found[name][0] for name in self.names)]

    def error(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor | float:
        """The sum over modules of the squared error, relative to the variance of what the dense model has there."""
        pairs = list(zip(found, wanted, strict=True))[-len(self.names) :] if self.names else []
        return torch.stack([relative_error(a, b) for a, b in pairs]).sum() if pairs else 0.0

    def outputs(self, found: list[Tensor]) -> list[Tensor]:
        """Without the hints behind them."""
        return found[: len(found) - len(self.names)]


def _has_parts(module: nn.Module) -> bool:
    return takes_hooks(module) and any(True for _ in module.children())

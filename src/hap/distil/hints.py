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
from hap.distil.samples import has_samples_first
from hap.execution.calling import hooked
from hap.execution.model_outputs import float_outputs
from hap.utils.module_tree import takes_hooks


class Hints:
    """Modules with submodules that are called once in both models, and return a tensor of the same shape there.

    Of what a module returns, the first tensor of real numbers counts. Its first axis has to be that of the samples, all
    of it finite, and it is no output of the model itself, which is learnt anyway. `run` computes the outputs of a model
    for an input, of which `inputs` are two: some samples, and the same without the last one.
    """

    def __init__(
        self,
        models: tuple[nn.Module, nn.Module],
        run: Callable[[nn.Module, Any], list[Tensor]],
        inputs: tuple[Any, Any],
    ):
        ours, theirs = ({name for name, m in model.named_modules() if name and _has_parts(m)} for model in models)
        self.names: Sequence[str] = [name for name, _ in models[1].named_modules() if name in ours & theirs]
        with torch.no_grad():
            (_, mine), (outputs, wanted) = (self._seen(model, run, inputs[0]) for model in models)
            (_, mine_fewer), (_, fewer) = (self._seen(model, run, inputs[1]) for model in models)
        taken = {id(tensor) for tensor in outputs}
        names = []
        for name in self.names:
            found = [seen.get(name, []) for seen in (mine, wanted, mine_fewer, fewer)]
            if [len(tensors) for tensors in found] == [1, 1, 1, 1] and id(found[1][0]) not in taken:
                (a,), (b,), (c,), (d,) = found
                same = a.shape == b.shape and c.shape == d.shape and has_samples_first(b, d) and b.numel() > 0
                if same and bool(a.isfinite().all() and b.isfinite().all()):
                    names.append(name)
                    taken.add(id(b))
        self.names = names

    def _seen(
        self, model: nn.Module, run: Callable[[nn.Module, Any], list[Tensor]], x: Any
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        with self._noting(model) as found:
            return run(model, x), found

    @contextmanager
    def _noting(self, model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
        found: dict[str, list[Tensor]] = {}

        def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
            found.setdefault(name, []).extend(float_outputs(output)[:1])

        with hooked(model, after=[(name, partial(note, name)) for name in self.names]):
            yield found

    def after(self, model: nn.Module, run: Callable[[nn.Module], list[Tensor]]) -> list[Tensor]:
        """What a model returns, and behind it what the modules inside return; nothing for one that is not called once
        this time."""
        with self._noting(model) as found:
            outputs = run(model)
        inside = [found.get(name, []) for name in self.names]
        return [*outputs, *(some[0] if len(some) == 1 else torch.empty(0) for some in inside)]

    def error(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor | float:
        """The sum over modules of the squared error, relative to the variance of what the dense model has there."""
        pairs = list(zip(found, wanted, strict=True))[-len(self.names) :] if self.names else []
        errors = [relative_error(a, b) for a, b in pairs if a.shape == b.shape and b.numel()]
        return torch.stack(errors).sum() if errors else 0.0

    def outputs(self, found: list[Tensor]) -> list[Tensor]:
        """Without the hints behind them."""
        return found[: len(found) - len(self.names)]


def _has_parts(module: nn.Module) -> bool:
    return takes_hooks(module) and any(True for _ in module.children())

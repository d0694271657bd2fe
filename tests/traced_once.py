"""For tests about what comes after: networks that are built alike are traced once, and captured once for all files."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hap
from hap.groups.groups import Groups
from hap.io import export
from hap.utils.plain_mapping import as_dict

KNOWN = ("torch.nn.modules.", "hap.models.", "transformers.")
"""Modules of these packages compute the same where their classes, settings and shapes are the same."""


@contextmanager
def tracing_once() -> Iterator[None]:
    """Inside, hap.trace remembers what it found. It does so for networks of known modules alone: what hap adds to a
    pruned network, and what a test defines, may differ in more than shapes."""
    trace, found = hap.trace, {}

    def remembering(model: nn.Module, example: Any, *args: Any, **kwargs: Any) -> Groups:
        if not all(_known(module) for module in model.modules()):
            return trace(model, example, *args, **kwargs)
        key = (*_form(model), *_form_of_example(example), args, tuple(sorted(kwargs.items())))
        if key not in found:
            found[key] = trace(model, example, *args, **kwargs)
        return found[key]

    with mock.patch.object(hap, "trace", remembering):
        yield


@contextmanager
def capturing_once() -> Iterator[None]:
    """Inside, where no model may change, hap.export captures each once for several files of different kinds."""
    capture, found = export.capture, {}

    def remembering(model: nn.Module, example: Any, axes: Any = ()) -> Any:
        key = (model, axes, _form_of_example(example))
        if key not in found:
            found[key] = capture(model, example, axes)
        return found[key]

    with mock.patch.object(export, "capture", remembering):
        yield


def _known(module: nn.Module) -> bool:
    return type(module).__module__.startswith(KNOWN) and not (module._forward_hooks or module._forward_pre_hooks)


def _form(model: nn.Module) -> tuple[Any, ...]:
    """All but the values of a network: modules with their settings, tensors, and which of these are the same."""
    modules = [(name, type(m), m.extra_repr(), m.training) for name, m in model.named_modules()]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    tensors = [(n, first.setdefault(id(t), n), t.shape, t.dtype, t.device, t.requires_grad) for n, t in named]
    return (*modules, *tensors, str(getattr(model, "config", "")))


def _form_of_example(example: Any) -> tuple[Any, ...]:
    leaves, structure = pytree.tree_flatten(as_dict(example))
    return str(structure), *((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves)

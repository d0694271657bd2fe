"""What is asked of a model's modules: the tensors they hold, whether two of them are equal, whether they take hooks."""

from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def takes_hooks(module: nn.Module) -> bool:
    """Modules that torch.jit has scripted take none in Python, and nothing of them can be cut."""
    return not isinstance(module, torch.jit.ScriptModule)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def same_modules(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules agree in all that they and their submodules hold, beside the values of tensors."""
    held, other = ([_held(module) for module in model.modules()] for model in (a, b))
    try:
        return _same(held, other)
    except RecursionError:  # something holds itself
        return False


def _held(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module without its submodules, and in place of its own tensors the forms of these."""
    tensors = {**module._parameters, **module._buffers}
    forms = {n: None if t is None else (t.shape, t.dtype, t.requires_grad) for n, t in tensors.items()}
    others = ("_parameters", "_buffers", "_modules")
    return {name: value for name, value in sorted(vars(module).items()) if name not in others} | forms


def _same(a: Any, b: Any) -> bool:
    """Whether no forward could tell these values apart. Of objects, only one is the same as itself."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, PLAIN):
        return bool(a == b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    return isinstance(a, set | frozenset) and all(isinstance(x, PLAIN) for x in a) and a == b

"""What a user gives: a model and an example that something can be computed with."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.execution.calling import call_arguments
from hap.utils.module_tree import named_tensors


def outside_inference(model: nn.Module) -> AbstractContextManager[object]:
    """What is made inside can be trained, though inference mode is on; unless the model itself was made in it."""
    if not torch.is_inference_mode_enabled() or _first(named_tensors(model).items(), Tensor.is_inference):
        return nullcontext()
    return torch.inference_mode(False)


def check_given(model: nn.Module, example: Any) -> None:
    """Refuse what is no module, or one without code or values, and an example without values."""
    if not isinstance(model, nn.Module):
        raise HapError(f"model is a {type(model).__name__}; expected a torch.nn.Module, whose parameters can be cut")
    if isinstance(model, torch.jit.ScriptModule):
        raise HapError(
            f"model is a {type(model).__name__} of TorchScript, whose code is fixed; prune the module that it was made "
            "from, and script or export that"
        )
    own = named_tensors(model).items()
    if name := _first(own, is_lazy):
        raise HapError(f"{name} has no shape yet, as of a lazy module; run the model once on the example")
    for name, module in model.named_modules():
        packed = any(isinstance(value, torch.ScriptObject) for value in vars(module).values())
        if packed and not isinstance(module, torch.jit.ScriptModule):
            raise HapError(
                f"{name.removesuffix('._packed_params') or 'model'} is quantised, its weights packed where nothing can "
                "cut them; prune the model first, then quantise it"
            )
    tensors = [x for x in pytree.tree_leaves(call_arguments(example)) if isinstance(x, Tensor)]
    inputs = [("an input of the example", x) for x in tensors]
    if name := _first([*own, *inputs], lambda x: x.is_meta):
        raise HapError(
            f"{name} is on the meta device, which holds no values; expected a model with its weights and an example "
            "with numbers, on a CPU or a GPU"
        )
    if not torch.is_inference_mode_enabled() and (name := _first(own, Tensor.is_inference)):
        raise HapError(
            f"{name} was made in inference mode, so that it can be neither traced nor trained; make the model outside "
            "of torch.inference_mode()"
        )
    if tensors and not any(x.numel() for x in tensors):
        raise HapError(
            f"the example has shape {tuple(tensors[0].shape)}, which is empty; expected at least one sample to run on"
        )


def check_finite(model: nn.Module) -> None:
    """Refuse weights that are not finite, and buffers that are no numbers: then nothing tells what may go."""
    for name, tensor in named_tensors(model).items():
        wrong = ~torch.isfinite(tensor) if isinstance(tensor, nn.Parameter) else torch.isnan(tensor)
        if bool(wrong.any()):
            raise HapError(
                f"{name} has values that are not finite, {int(wrong.sum())} of {wrong.numel()}, so that nothing tells "
                "what may go; load or train the model anew"
            )


def _first(named: Iterable[tuple[str, Tensor]], fits: Callable[[Tensor], bool]) -> str | None:
    return next((name for name, tensor in named if fits(tensor)), None)

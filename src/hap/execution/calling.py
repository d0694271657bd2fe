"""How a model is called: with example inputs, with other tensors, in another mode, with hooks that last for a while."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.utils.module_tree import named_tensors
from hap.utils.plain_mapping import as_dict

Hooks = Iterable[tuple[str, Callable[..., Any]]]
"""Names of modules, each with a hook as torch's register_forward_pre_hook or register_forward_hook take it."""
RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
"""The names of torch's recurrent functions."""


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Eval mode inside, every module's own mode restored after."""
    return _in_mode(model, training=False)


@contextmanager
def forgetting_caches(model: nn.Module) -> Iterator[None]:
    """Training mode inside: there modules forget what they have written out for evaluation, such as tables of biases.

    Every module's own mode is restored after, and what is trained.
    """
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with _in_mode(model, training=True):
            yield
    finally:
        for parameter, flag in trained:
            parameter.requires_grad_(flag)


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:  # by the method, which a class may have made its own to change more than a flag
            if module.training != mode:
                module.train(mode)
        for module, mode in modes:
            module.training = mode


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


def differentiable(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, what the model computes can be derived, in eval mode and twice, as cuDNN's recurrent layers cannot be."""
    cuda = any(isinstance(m, nn.RNNBase) and next(m.parameters()).is_cuda for m in model.modules())
    return _RecurrentWithoutCudnn() if cuda else nullcontext()


class _RecurrentWithoutCudnn(TorchFunctionMode):
    """Inside, recurrent layers are made of torch's own operators. All other layers are as fast as ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recurrent = getattr(func, "__name__", None) in RECURRENT
        with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
            return func(*args, **(kwargs or {}))


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Inside, the same random numbers every time; outside, as if none had been drawn."""
    generators = _generators()
    states, python, numpy = [g.get_state() for g in generators], random.getstate(), np.random.get_state()
    for generator in generators:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def _next_random_numbers() -> list[float]:
    """What torch, Python and numpy would draw next."""
    drawn = [torch.rand((), generator=g, device=g.device, dtype=torch.float64).item() for g in _generators()]
    return [*drawn, random.random(), np.random.rand()]


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and keyword arguments: a tensor is one argument, a tuple several, a mapping keywords."""
    if isinstance(example, Mapping):
        return (), as_dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    if isinstance(example, Tensor):
        return (example,), {}
    raise HapError(
        f"example is a {type(example).__name__}; expected a tensor, a tuple of arguments or a dict of keyword arguments"
    )


def copied(inputs: Any) -> Any:
    """Inputs with copies of all tensors, since a forward may write to what it is called with."""
    made: dict[int, Tensor] = {}  # one that is given twice stays one
    return pytree.tree_map_only(Tensor, lambda x: made.setdefault(id(x), x.clone()), inputs)


def run(model: nn.Module, example: Any) -> Any:
    """The model's output on an example, in eval mode and without a graph. Random numbers are the same each time."""
    with seeded():
        return _evaluated(model, example)


def draws_random_numbers(model: nn.Module, example: Any) -> bool:
    """Whether the model, as it is evaluated, draws random numbers."""
    with seeded():
        wanted = _next_random_numbers()
    with seeded():
        _evaluated(model, example)
        return _next_random_numbers() != wanted


def _evaluated(model: nn.Module, example: Any) -> Any:
    args, kwargs = copied(call_arguments(example))
    with eval_mode(model), torch.no_grad():
        return model(*args, **kwargs)


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's output with these in place of parameters or buffers, by name; what shares one goes on sharing it.

    torch.func.functional_call fills in the other names of a tensor by itself, but a module that has several names is
    then left with what it was lent. So each place that holds a tensor is named here, once.
    """
    own = named_tensors(model)
    lent = {id(own[name]): tensor for name, tensor in tensors.items()}
    places = {
        f"{name}.{leaf}".lstrip("."): tensor
        for name, module in model.named_modules()
        for leaf, tensor in {**module._parameters, **module._buffers}.items()
    }
    every = {name: lent[id(tensor)] for name, tensor in places.items() if id(tensor) in lent}
    return torch.func.functional_call(model, every, args, kwargs, tie_weights=False)


def describe(example: Any) -> Any:
    """The example without its values, as JSON: enough to make another one like it."""
    if isinstance(example, Tensor):
        real = example.is_floating_point() or example.is_complex()
        below = int(example.max()) + 1 if not real and example.numel() else None
        return {"shape": list(example.shape), "dtype": str(example.dtype).removeprefix("torch."), "below": below}
    if isinstance(example, Mapping):
        return {"dict": {key: describe(value) for key, value in example.items()}}
    if isinstance(example, tuple | list):
        return {"tuple": [describe(value) for value in example]}
    return {"value": example if isinstance(example, int | float | str | None) else None}


def random_example(description: Any, device: torch.device | None = None) -> Any:
    """An example that fits a description: normal numbers, or integers below the largest one seen. Seeded."""
    generator = torch.Generator().manual_seed(0)

    def make(d: dict[str, Any]) -> Any:
        if "shape" in d:
            dtype = getattr(torch, d["dtype"])
            if d["below"] is None:
                wide = torch.complex64 if dtype.is_complex else torch.float32
                return torch.randn(d["shape"], generator=generator, dtype=wide).to(device, dtype)
            return torch.randint(0, max(d["below"], 1), d["shape"], generator=generator).to(device, dtype)
        if "dict" in d:
            return {key: make(value) for key, value in d["dict"].items()}
        return tuple(make(value) for value in d["tuple"]) if "tuple" in d else d["value"]

    return make(description)

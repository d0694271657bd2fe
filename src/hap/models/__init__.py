"""The model zoo: a table of names, and the way to any other network through `package.module:factory`.

`build` makes a fresh network of the zoo, `resolve` also finds networks of others; `pretrained.py` (`hap.zoo`) loads
trained ones. The networks (`cifar_resnet.py`, `resnet.py`, `vgg.py`) are flat files of plain torch.
Import from here.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from hap.errors import HapError
from hap.models.cifar_resnet import CifarResNet, PreResNet
from hap.models.resnet import BasicBlock, Bottleneck, ResNet
from hap.models.vgg import VGG

__all__ = ["ModelInfo", "build", "info", "names", "resolve"]


@dataclass(frozen=True)
class ModelInfo:
    """One network of the zoo. `input_shape` is (channels, height, width) of one image."""

    name: str
    factory: Callable[..., nn.Module]
    input_shape: tuple[int, int, int] = (3, 32, 32)
    classes: int = 10


_IMAGENET: dict[str, Any] = {"input_shape": (3, 224, 224), "classes": 1000}

_ZOO = {
    entry.name: entry
    for entry in [
        ModelInfo("resnet20", partial(CifarResNet, (3, 3, 3), (16, 32, 64))),
        ModelInfo("resnet32", partial(CifarResNet, (5, 5, 5), (16, 32, 64))),
        ModelInfo("resnet56", partial(CifarResNet, (9, 9, 9), (16, 32, 64))),
        ModelInfo("resnet110", partial(CifarResNet, (18, 18, 18), (16, 32, 64))),
        ModelInfo("wide_resnet32", partial(CifarResNet, (5, 5, 5), (64, 128, 256))),
        ModelInfo("preresnet29", partial(PreResNet, (3, 3, 3), (64, 128, 256))),
        ModelInfo("vgg16_bn", VGG),
        ModelInfo("resnet18", partial(ResNet, BasicBlock, (2, 2, 2, 2)), **_IMAGENET),
        ModelInfo("resnet34", partial(ResNet, BasicBlock, (3, 4, 6, 3)), **_IMAGENET),
        ModelInfo("resnet50", partial(ResNet, Bottleneck, (3, 4, 6, 3)), **_IMAGENET),
        ModelInfo("digits_resnet", partial(CifarResNet, (2, 2, 2), (16, 24, 40), channels=1), input_shape=(1, 8, 8)),
    ]
}


def names() -> list[str]:
    """The names that `build` knows."""
    return list(_ZOO)


def info(name: str) -> ModelInfo:
    """The record of one network of the zoo."""
    if name not in _ZOO:
        raise HapError(f"unknown model {name!r}: expected one of {', '.join(names())}")
    return _ZOO[name]


def build(name: str, classes: int | None = None, **options: Any) -> nn.Module:
    """A freshly initialised network of the zoo.

    Arguments:
        name: one of `names()`.
        classes: as many as its usual data set has, by default.
        options: what the network's class takes by keyword, such as stride_in_1x1 for resnet50.

    >>> build("resnet20", classes=100).fc
    Linear(in_features=64, out_features=100, bias=True)
    """
    entry = info(name)
    _check_options(entry, options)
    count = entry.classes if classes is None else classes
    if count < 1:
        raise HapError(f"classes is {count}: expected at least 1")
    return entry.factory(classes=count, **options)


def resolve(spec: str, classes: int | None = None) -> nn.Module:
    """The network of a zoo name, or what `package.module:factory` returns.

    A factory is called with `classes=` when that is given and accepted, else with no argument.
    """
    if ":" not in spec:
        return build(spec, classes)
    factory = _import_factory(spec)
    model = factory(**_arguments(spec, factory, classes))
    if not isinstance(model, nn.Module):
        raise HapError(f"{spec!r} returned a {type(model).__name__}: expected a torch.nn.Module")
    return model


def _import_factory(spec: str) -> Callable[..., Any]:
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise HapError(f"model {spec!r} is incomplete: expected package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise HapError(
            f"model {spec!r}: cannot import {module_name!r} ({error}); install it, or add its folder to PYTHONPATH"
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise HapError(f"model {spec!r}: module {module_name!r} has no {attribute!r}; check the spelling")
    if not callable(factory):
        raise HapError(
            f"model {spec!r}: {attribute!r} is a {type(factory).__name__}, expected a function or class "
            "that returns the network"
        )
    return factory


def _arguments(spec: str, factory: Callable[..., Any], classes: int | None) -> dict[str, int]:
    """What to call a factory with. One that needs more is told apart from one that fails inside."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables written in C do not tell
        return {}
    accepts = any(p.name == "classes" or p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    arguments = {"classes": classes} if classes is not None and accepts else {}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise HapError(
            f"model {spec!r} cannot be called without arguments ({error}): "
            "give a function that takes none, or only classes"
        ) from error
    return arguments


def _check_options(entry: ModelInfo, options: dict[str, Any]) -> None:
    parameters = inspect.signature(entry.factory).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "classes"]
    if unknown := [option for option in options if option not in known]:
        raise HapError(
            f"model {entry.name!r} has no option {unknown[0]!r}: expected {', '.join(known) or 'no options'}"
        )

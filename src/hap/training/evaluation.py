"""Accuracy and loss of a model."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hap.data import Batch, Data
from hap.errors import HapError
from hap.execution.calling import eval_mode, run


@dataclass(frozen=True)
class Evaluation:
    """`accuracy` from 0 to 1, mean cross-entropy `loss`, and the number of examples."""

    accuracy: float
    loss: float
    count: int


def evaluate(model: nn.Module, data: Data | Iterable[Batch], split: str = "test") -> Evaluation:
    """Accuracy and loss in eval mode on the model's device. `hap.train` has an example.

    Arguments:
        model: turns inputs into one logit for each class.
        data: a data set, or an iterable of (input, target).
        split: which part of a data set, "test" or "train".

    Returns:
        Accuracy, mean cross-entropy, and the number of examples.
    """
    device = device_of(model)
    size = 2000 if device.type == "cuda" else 100  # larger batches leave a CPU's cache
    batches = data.batches(split, size) if isinstance(data, Data) else data
    right = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros((), device=device)
    count = 0
    with eval_mode(model), torch.no_grad():
        for x, y in batches:
            logits, target = model(x.to(device)), y.to(device)
            right += (logits.argmax(1) == target).sum()
            loss += functional.cross_entropy(logits.float(), target, reduction="sum")
            count += len(target)
    if not count:
        raise HapError("evaluation got no examples: expected at least one batch of (input, target)")
    return Evaluation(right.item() / count, loss.item() / count, count)


def device_of(model: nn.Module) -> torch.device:
    """The one device of all parameters."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no parameters"
        raise HapError(f"the model has {found}: expected parameters, all on one device")
    return devices.pop()


def check_reads(model: nn.Module, data: Data, name: str = "the model") -> None:
    """Refuse a network that cannot be run on the data or that has another number of classes."""
    image = next(data.batches("train", 1))[0].to(device_of(model))
    try:
        output = run(model, image)
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HapError(f"{name} cannot read an image of {data.name}, shaped {tuple(image.shape[1:])}: {why}") from error
    found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != (1, data.classes):
        raise HapError(
            f"{name} turns one image of {data.name} into {found}: expected (1, {data.classes}), "
            "one logit for each class"
        )

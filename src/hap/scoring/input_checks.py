"""Whether batches, targets and losses are what a criterion can work with, told before it works on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.scoring.batch import BATCH_FIRST, Batch, Loss, samples


@contextmanager
def as_hap_error(what: str, advice: str = "") -> Iterator[None]:
    """What a user's code raises inside, as a HapError with its reason."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, HapError | torch.OutOfMemoryError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HapError(f"{what}: {reason}{advice}") from error


def is_per_sample(value: Any, count: int) -> bool:
    """Whether this has one index for each of so many samples on its first axis."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def check_steady(batches: Iterable[Batch]) -> None:
    """Refuse inputs that are as long as some batches and not as others: shared ones, taken for one index per sample.

    In a batch of one sample nothing needs to be told apart.
    """
    first: dict[str, bool] = {}
    for batch in batches:
        if (count := samples(batch)) == 1:
            continue
        for path, value in pytree.tree_flatten_with_path(batch)[0]:
            if not isinstance(value, Tensor):
                continue
            name, own = f"batch{pytree.keystr(path)}", is_per_sample(value, count)
            if own != first.setdefault(name, own):
                raise HapError(
                    f"{name} has shape {tuple(value.shape)} in a batch of {count} samples, so that it would "
                    f"{'' if own else 'not '}hold one index per sample, other than in batches before. Make all batches "
                    "alike, and of another size than an input that all samples share."
                )


def check_targets(batch: Batch) -> None:
    """Criteria that tell samples apart take the first axis of all inputs for that of the samples."""
    count, target = samples(batch), batch[1]
    if isinstance(target, Tensor) and target.ndim and len(target) != count:
        raise HapError(
            f"the first axis of a batch's inputs has length {count}, that of its target {len(target)}. {BATCH_FIRST}"
        )


def check_alone(whole: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> None:
    """Refuse a model whose first axis is not that of the samples: with as many tokens as samples, sizes do not tell.

    `whole` holds what was seen of a batch, `alone` the same of its last sample by itself. A first token would not do:
    in a causal model it is the same alone.
    """
    for what, rows in whole.items():
        row, seen = rows[-1:].detach().double(), alone.get(what)
        slack = 0.25 if rows.dtype in (torch.float16, torch.bfloat16) else 0.1
        if seen is None or seen.shape != row.shape or (seen - row).norm() > slack * row.norm():
            raise HapError(f"{what} is not the same for the last sample alone and in its batch. {BATCH_FIRST}")


def draws_when_scored(model: nn.Module) -> str | None:
    """The first module whose output in training mode depends on chance or on the rest of the batch."""
    for name, module in model.named_modules():
        if (
            module.training
            and isinstance(module, _NormBase)
            and (module.track_running_stats or isinstance(module, _BatchNorm))
        ):
            return f"{name or 'the model'} ({type(module).__name__})"
        if module.training and isinstance(module, _DropoutNd) and module.p > 0:
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def check_labels(output: Any, target: Any, loss: Loss) -> None:
    """Class labels out of range crash a GPU for good, so they are looked at first."""
    classification = loss in (F.cross_entropy, F.nll_loss) or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    if not (classification and isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return
    classes = output.shape[1] if output.ndim > 1 else output.shape[0]
    bad = target[(target != getattr(loss, "ignore_index", -100)) & ((target < 0) | (target >= classes))]
    if bad.numel():
        raise HapError(
            f"label {int(bad[0])} is out of range: the model has {classes} outputs, so labels end at {classes - 1}"
        )


def in_words(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_finite_scores(values: Tensor, what: str) -> None:
    if not torch.isfinite(values).all():
        raise HapError(f"{what} is not finite; check the model's weights, or score in float32")

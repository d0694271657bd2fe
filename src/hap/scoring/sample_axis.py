"""Criteria that look at each sample by itself: the first axis must be that of the samples, in inputs and in layers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.execution.calling import hooked
from hap.scoring.base import Batch, ScoringContext, as_hap_error, samples

Calls = dict[str, list[Tensor]]
"""By the name of a weight, what the layer that owns it read and returned."""

BATCH_FIRST = (
    "This criterion looks at each sample by itself and expects batch first, (samples, tokens, ...), and samples that "
    "do not see each other. Wrap a model that has tokens first; for one that looks across its batch, use a criterion "
    "that takes a batch as a whole, such as Taylor."
)


def is_per_sample(value: Any, count: int) -> bool:
    """Whether this has one index for each of so many samples on its first axis."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def samples_of(batch: Batch, part: slice) -> Batch:
    """Some samples of a batch, with what all of them share."""
    x, y = pytree.tree_map(lambda t: t[part] if is_per_sample(t, samples(batch)) else t, tuple(batch))
    return x, y


def check_steady(batches: Iterable[Batch]) -> None:
    """Refuse inputs that are as long as some batches and not as others: shared ones, taken for one index per sample."""
    first: dict[str, bool] = {}
    for batch in batches:
        if (count := samples(batch)) == 1:  # nothing needs to be told apart
            continue
        tensors = [(path, t) for path, t in pytree.tree_flatten_with_path(batch)[0] if isinstance(t, Tensor)]
        for path, value in tensors:
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


def check_alone(batch: Batch, whole: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> None:
    """Refuse a model whose first axis is not that of the samples, which sizes alone may not tell: `whole` was seen of a
    batch, `alone` of its last sample by itself. A first token would not do: in a causal model it is the same alone."""
    for what, rows in ((what, x) for what, x in whole.items() if is_per_sample(x, samples(batch))):
        row, seen = rows[-1:].detach().double(), alone.get(what)
        slack = 0.25 if rows.dtype in (torch.float16, torch.bfloat16) else 0.1
        if seen is None or seen.shape != row.shape or (seen - row).norm() > slack * row.norm():
            raise HapError(f"{what} is not the same for the last sample alone and in its batch. {BATCH_FIRST}")


def last_alone(problem: ScoringContext, batch: Batch) -> Any:
    """The model's output on the last sample of a batch by itself, without a graph."""
    with as_hap_error("the model fails on the last sample of a batch by itself", f". {BATCH_FIRST}"):
        return problem.call({}, samples_of(batch, slice(-1, None))[0])


def run_recorded(
    problem: ScoringContext, batch: Batch, weights: Iterable[str], instead: str
) -> tuple[Any, Tensor, Calls]:
    """A batch's output and loss with their graph, and the calls of the layers that own these weights. Refuses layers
    that do not read one sample at each index of their first axis, or hide what they read: the advice is `instead`."""
    check_targets(batch)
    own = {n: w.clone().requires_grad_() for n, w in problem.weights.items()}
    with torch.enable_grad(), _recorded(problem.model, weights) as calls:
        output, loss = problem.evaluate(own, batch)
    if hidden := [weight for weight in weights if weight not in calls]:
        raise HapError(f"what {hidden[0]} is applied to is hidden from the layer that owns it; {instead}")
    if batch is problem.batches[0]:
        with _recorded(problem.model, weights) as alone:
            last_alone(problem, batch)
        whole, single = ({f"what {n} reads": x for n, (x, *_) in some.items()} for some in (calls, alone))
        check_alone(batch, whole, single)
    return output, loss, calls


@contextmanager
def _recorded(model: nn.Module, weights: Iterable[str]) -> Iterator[Calls]:
    """Inside, each call of a layer that owns one of these weights is recorded; a second call of it is an error."""
    calls = Calls()

    def before(weight: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if weight in calls:
            raise HapError(f"{weight} is used more than once in a forward pass, so its calls are not told apart")
        if args:
            calls[weight] = [args[0]]

    def after(weight: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if args:
            calls[weight].append(output)

    owners = [(weight, weight.rpartition(".")[0]) for weight in weights]
    read = [(owner, partial(before, weight)) for weight, owner in owners]
    returned = [(owner, partial(after, weight)) for weight, owner in owners]
    with hooked(model, before=read, after=returned, first=True):
        yield calls

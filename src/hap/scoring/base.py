"""What a criterion is given, and what all of them share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from hap import distributed
from hap.calibration import pairs
from hap.errors import HapError
from hap.examples import call_arguments, call_with, copied
from hap.groups import Group, Groups, Producer
from hap.recurrent import differentiable

Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any]

PIECE = 1 << 18
"""How many weights are copied to float64 at a time: as many as a processor's cache holds."""

BATCH_FIRST = (
    "This criterion looks at each sample by itself and expects batch first, (samples, tokens, ...), and samples that "
    "do not see each other. Wrap a model that has tokens first; for one that looks across its batch, use a criterion "
    "that takes a batch as a whole, such as Taylor."
)
DETACHED = (
    "the loss has no gradient, or none but zeros; this criterion needs one that autograd can follow from the weights "
    "on. Leave out what keeps it from that in the loss or the model, such as detach(), item(), no_grad() or "
    "inference_mode()"
)


class Scores(dict[str, Tensor]):
    """One value per unit, by group. `errors` holds standard errors of estimates, `about` how the criterion ran."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        errors: Mapping[str, Tensor] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        super().__init__(values)
        self.errors = dict(errors or {})
        self.about = dict(about or {})


@dataclass(frozen=True)
class Problem:
    """A model with its groups and calibration data. Nothing in here is ever written to."""

    model: nn.Module
    groups: Groups
    given: Iterable[Any] | None
    loss: Loss | None

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The weights that compute units, detached."""
        names = dict.fromkeys(p.weight for g in self.groups.values() for p in g.producers)
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name].detach() for name in names}

    @cached_property
    def sharded(self) -> bool:
        """Whether the processes hold shards of the weights, so that all must run the model in step."""
        return any(distributed.is_sharded(w) for w in self.weights.values())

    @cached_property
    def batches(self) -> list[Batch]:
        """The calibration batches, checked, on the model's device."""
        if self.given is None or self.loss is None:
            raise HapError("this criterion needs data: pass batches, an iterable of (input, target), and a loss")
        if (bad := _unsteady(self.model)) is not None:
            raise HapError(f"{bad} is in training mode, so scores would depend on the batch; call model.eval() first")
        return list(pairs(self.given, next(iter(self.model.parameters())).device))

    def evaluate(self, weights: dict[str, Tensor], batch: Batch) -> tuple[Any, Tensor]:
        """Output and loss on a batch with these weights in place of the model's own."""
        assert self.loss is not None
        if weights and self.sharded:
            raise HapError(
                "the model's parameters are sharded over the processes, which this criterion cannot work with; use "
                'HessianTrace(method="exact"), "sampled" or "gauss-newton", or score before sharding'
            )
        args, kwargs = copied(call_arguments(batch[0]))
        with told("the model or the loss fails on a calibration batch"):
            output = self.call(weights, args, kwargs)
            _check_labels(output, batch[1], self.loss)
            loss = self.loss(output, batch[1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise HapError(f"the loss returns {_seen(loss)}; expected a tensor with one value, the mean over the batch")
        if not torch.isfinite(loss):
            raise HapError(f"the loss is {loss.item()} on a calibration batch; check the model's weights and the data")
        if torch.is_grad_enabled() and any(w.requires_grad for w in weights.values()) and not loss.requires_grad:
            raise HapError(DETACHED)
        return output, loss

    def call(self, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output with these weights in place of its own, such that it can be derived twice."""
        with differentiable(self.model):
            return call_with(self.model, weights, args, kwargs)

    def last_alone(self, batch: Batch) -> Any:
        """The model's output on the last sample of a batch by itself, without a graph."""
        count = samples(batch)
        alone = pytree.tree_map(lambda t: t[-1:] if is_per_sample(t, count) else t, batch[0])
        args, kwargs = copied(call_arguments(alone))
        with told("the model fails on the last sample of a batch by itself", f". {BATCH_FIRST}"), torch.no_grad():
            return call_with(self.model, {}, args, kwargs)

    def shares(self) -> list[float]:
        """Each batch's share of the samples of all processes: the weight of its mean loss in the whole."""
        sizes = [samples(b) for b in self.batches]
        total = distributed.total(sum(sizes), next(iter(self.weights.values())).device)
        return [size / total for size in sizes]

    def per_unit(self, group: Group, producer: Producer, values: Tensor) -> Tensor:
        """Sum `values`, shaped like the producer's weight, over everything a unit owns there."""
        rest = [d for d in range(values.ndim) if d != producer.dim]
        return fold(group, producer, values.sum(dim=rest) if rest else values)

    def sum_of(self, what: Callable[[Tensor], Tensor], group: Group, producer: Producer) -> Tensor:
        """Sum what a function makes of each single weight, in float64, over everything a unit owns in a producer.

        A few rows at a time, since a copy of a large weight in float64 takes longer than the sums.
        """
        weight = self.weights[producer.weight]
        if distributed.is_sharded(weight):
            return self.per_unit(group, producer, what(weight.double()))
        rows = weight.movedim(producer.dim, 0)
        pieces = rows.split(max(1, PIECE * len(rows) // max(1, rows.numel())))
        sums = [what(x.double()).flatten(1).sum(1) if x.ndim > 1 else what(x.double()) for x in pieces]
        return fold(group, producer, torch.cat(sums))

    def sizes(self, group: Group, producer: Producer) -> Tensor:
        """How many weights each unit owns in a producer: |p| of equation 6."""
        weight = self.weights[producer.weight]
        each = torch.full(
            (weight.shape[producer.dim],),
            weight.numel() // weight.shape[producer.dim],
            device=weight.device,
            dtype=torch.float64,
        )
        return fold(group, producer, each)

    def assemble(self, formula: Callable[[Group, Producer], Tensor]) -> dict[str, Tensor]:
        """Scores from a formula per producer: a unit's score sums over its producers."""
        return {n: torch.stack([formula(g, p) for p in g.producers]).sum(0) for n, g in self.groups.items()}


def fold(group: Group, producer: Producer, values: Tensor) -> Tensor:
    """Sum one value per index of a producer's axis (the last of `values`) into one value per unit, in float64."""
    values = distributed.whole(values)
    owned = torch.from_numpy(np.flatnonzero(producer.unit >= 0)).to(values.device)
    unit = torch.from_numpy(producer.unit[producer.unit >= 0]).to(values.device)
    out = torch.zeros(*values.shape[:-1], len(group), dtype=torch.float64, device=values.device)
    return out.index_add_(-1, unit, values.double().index_select(-1, owned))


def samples(batch: Batch) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    first = next((t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.ndim), None)
    return len(first) if first is not None else 1


@contextmanager
def told(what: str, advice: str = "") -> Iterator[None]:
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


@dataclass(frozen=True)
class Criterion(ABC):
    """How much the loss is expected to rise when a unit goes. Low scores go first."""

    name: ClassVar[str]

    @abstractmethod
    def scores(self, problem: Problem) -> Scores: ...

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} | json.loads(json.dumps(asdict(self)))


def _unsteady(model: nn.Module) -> str | None:
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


def _check_labels(output: Any, target: Any, loss: Loss) -> None:
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


def _seen(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

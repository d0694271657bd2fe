"""What a criterion is: from a `ScoringContext` (a model with its groups and calibration data) to `Scores`.

And what a batch and a loss are, and what is refused of them before a criterion goes to work.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.execution.calling import call_arguments, call_with, copied, differentiable
from hap.execution.gram_regression import pairs
from hap.groups.groups import Groups
from hap.groups.types import Group, Ints, Producer
from hap.utils import distributed

Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any]
DETACHED = (
    "the loss has no gradient, or none but zeros; this criterion needs one that autograd can follow from the weights "
    "on. Leave out what keeps it from that in the loss or the model, such as detach(), item(), no_grad() or "
    "inference_mode()"
)
PIECE = 1 << 18
"""How many weights are copied to float64 at a time, as many as a processor's cache holds: all at once take longer."""


class Scores(dict[str, Tensor]):
    """One value per unit, by group. `errors` holds standard errors of estimates, `about` how the criterion ran.

    >>> scores = Scores({"conv1": torch.tensor([0.3, 0.1])}, about={"method": "exact"})
    >>> int(scores["conv1"].argmin()), scores.about["method"]
    (1, 'exact')
    """

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
class ScoringContext:
    """A model with its groups and calibration data. Nothing in here is ever written to."""

    model: nn.Module
    groups: Groups
    data: Iterable[Any] | None
    loss: Loss | None
    joint: bool = False
    """Whether all that a unit owns is one p of equation 6, and not what it owns in each producer."""

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The weights that compute units, detached."""
        parameters = dict(self.model.named_parameters())
        return {p.weight: parameters[p.weight].detach() for g in self.groups.values() for p in g.producers}

    @property
    def device(self) -> torch.device:
        """Where the weights are that compute units."""
        return next(iter(self.weights.values())).device

    @cached_property
    def sharded(self) -> bool:
        """Whether the processes hold shards of the weights, so that all must run the model in step."""
        return any(distributed.is_sharded(w) for w in self.weights.values())

    @cached_property
    def batches(self) -> list[Batch]:
        """The calibration batches, checked, on the model's device."""
        if self.data is None or self.loss is None:
            raise HapError("this criterion needs data: pass batches, an iterable of (input, target), and a loss")
        check_mode(self.model)
        return list(pairs(self.data, next(iter(self.model.parameters())).device))

    def evaluate(self, weights: dict[str, Tensor], batch: Batch) -> tuple[Any, Tensor]:
        """Output and loss on a batch with these weights in place of the model's own."""
        assert self.loss is not None
        if weights and self.sharded:
            raise HapError(
                "the model's parameters are sharded over the processes, which this criterion cannot work with; use "
                'HessianTrace(method="exact"), "sampled" or "gauss-newton", or score before sharding'
            )
        with as_hap_error("the model or the loss fails on a calibration batch"):
            output = self.call(weights, batch[0])
            check_labels(output, batch[1], self.loss)
            loss = self.loss(output, batch[1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            seen = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise HapError(f"the loss returns a {seen}; expected a tensor with one value, the mean over the batch")
        if not torch.isfinite(loss):
            raise HapError(f"the loss is {loss.item()} on a calibration batch; check the model's weights and the data")
        if torch.is_grad_enabled() and any(w.requires_grad for w in weights.values()) and not loss.requires_grad:
            raise HapError(DETACHED)
        return output, loss

    def call(self, weights: dict[str, Tensor], inputs: Any) -> Any:
        """The model's output with these weights in place of its own, such that it can be derived twice."""
        with differentiable(self.model):
            return call_with(self.model, weights, *copied(call_arguments(inputs)))

    def shares(self) -> Iterator[tuple[Batch, float]]:
        """Each batch, and its share of the samples of all processes: the weight of its mean loss in the whole."""
        sizes = [samples(b) for b in self.batches]
        total = distributed.total(sum(sizes), self.device)
        return ((batch, size / total) for batch, size in zip(self.batches, sizes, strict=True))

    def sum_over_batches(self, parts: Callable[[Batch, float], Iterable[Mapping[Any, Tensor]]]) -> dict[Any, Tensor]:
        """The sums by name of what parts(batch, share) gives for the batches of all processes, in float64."""
        return self.summed(part for batch, share in self.shares() for part in parts(batch, share))

    @staticmethod
    def summed(parts: Iterable[Mapping[Any, Tensor]]) -> dict[Any, Tensor]:
        """The sums by name of these parts and of those of all other processes, in float64."""
        totals: dict[Any, Tensor] = {}
        for part in parts:
            for name, values in part.items():
                totals[name] = totals.get(name, 0) + values.double()
        distributed.sum_(totals[name] for name in sorted(totals))  # in the same order everywhere
        return totals

    def per_unit(self, group: Group, producer: Producer, values: Tensor) -> Tensor:
        """Sum `values`, shaped like the producer's weight, over everything a unit owns there."""
        rest = [d for d in range(values.ndim) if d != producer.dim]
        return fold(group, producer, values.sum(dim=rest) if rest else values)

    def sum_of(self, what: Callable[[Tensor], Tensor], group: Group, producer: Producer) -> Tensor:
        """Sum what a function makes of each single weight, in float64, over everything a unit owns in a producer."""
        rows = distributed.gathered(self.weights[producer.weight]).movedim(producer.dim, 0)
        pieces = rows.split(max(1, PIECE * len(rows) // max(1, rows.numel())))
        sums = [what(x.double()).reshape(len(x), -1).sum(1) for x in pieces]
        return fold(group, producer, torch.cat(sums))

    def sizes(self, group: Group, producer: Producer) -> Tensor:
        """How many weights each unit owns in a producer: |p| of equation 6."""
        weight = self.weights[producer.weight]
        length = weight.shape[producer.dim]
        return fold(group, producer, torch.full((length,), weight.numel() // length, device=weight.device))

    def mean_square(self, group: Group, producer: Producer) -> Tensor:
        """||w_p||^2 / |p|, p what each unit owns in a producer."""
        return self.sum_of(torch.square, group, producer) / self.sizes(group, producer).clamp_min(1)

    def mean_squares(self) -> dict[str, Tensor]:
        """||w_p||^2 / |p|, summed over each p of a unit."""
        if not self.joint:
            return self.assemble(self.mean_square)
        norms, sizes = self.assemble(partial(self.sum_of, torch.square)), self.assemble(self.sizes)
        return {n: norms[n] / sizes[n].clamp_min(1) for n in norms}

    def assemble(self, formula: Callable[[Group, Producer], Tensor]) -> dict[str, Tensor]:
        """Scores from a formula per producer: a unit's score sums over its producers."""
        return {n: torch.stack([formula(g, p) for p in g.producers]).sum(0) for n, g in self.groups.items()}


def fold(group: Group, producer: Producer, values: Tensor) -> Tensor:
    """Sum one value per index of a producer's axis (the last of `values`) into one value per unit, in float64."""
    values = distributed.gathered(values)
    owned = torch.from_numpy(np.flatnonzero(producer.unit >= 0)).to(values.device)
    unit = torch.from_numpy(producer.unit[producer.unit >= 0]).to(values.device)
    out = torch.zeros(*values.shape[:-1], len(group), dtype=torch.float64, device=values.device)
    return out.index_add_(-1, unit, values.double().index_select(-1, owned))


def unit_map(groups: Groups, group: Group) -> Ints:
    """The unit of a group that each class is, -1 where it is none."""
    unit = np.full(groups.classes, -1, dtype=np.int64)
    unit[group.classes] = np.arange(len(group))
    return unit


@dataclass(frozen=True)
class Criterion(ABC):
    """How much the loss is expected to rise when a unit goes. Low scores go first.

    A subclass is a frozen dataclass whose fields are its settings. `elementwise` says that it looks at each weight by
    itself, so that it can be asked about slices along any axis (`Whole`).
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool] = False

    @abstractmethod
    def scores(self, problem: ScoringContext) -> Scores:
        """One value per unit of every group, most easily by `problem.assemble`."""

    def to_dict(self) -> dict[str, Any]:
        """The name and the settings, as JSON holds them; a criterion among them is a dictionary of the same kind."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"name": self.name} | json.loads(json.dumps(settings, default=Criterion.to_dict))


# ---- batches and losses --------------------------------------------------------------------------------------


def samples(batch: Batch) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    first = next((t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.ndim), None)
    return len(first) if first is not None else 1


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


def check_mode(model: nn.Module) -> None:
    """Refuse modules in training mode whose output then depends on chance or on the rest of the batch."""
    for name, module in model.named_modules():
        norm = isinstance(module, _NormBase) and (module.track_running_stats or isinstance(module, _BatchNorm))
        if module.training and (norm or (isinstance(module, _DropoutNd) and module.p > 0)):
            raise HapError(
                f"{name or 'the model'} ({type(module).__name__}) is in training mode, so scores would depend on the "
                "batch; call model.eval() first"
            )


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


def check_finite_scores(scores: Mapping[str, Tensor], what: str) -> None:
    if not all(bool(values.isfinite().all()) for values in scores.values()):
        raise HapError(f"{what} is not finite; check the model's weights, or score in float32")

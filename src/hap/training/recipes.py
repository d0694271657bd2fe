"""Training recipes: every number that decides how a network is trained, as data."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hap.errors import Argument, HapError


@dataclass(frozen=True)
class Recipe:
    """Stochastic gradient descent with momentum, weight decay on all parameters, and a schedule.

    `milestones` and `warmup` are fractions of the whole training. `distill` is the weight of the divergence
    from a teacher at `temperature`, against the labels' 1 - distill. `ema` is the decay per step of the
    running average of the weights that is evaluated and kept; 0 keeps the last weights. The test split is
    evaluated after every `eval_every` epochs and after the last.
    """

    epochs: int
    batch: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1
    warmup: float = 0.0
    label_smoothing: float = 0.0
    distill: float = 0.0
    temperature: float = 4.0
    ema: float = 0.0
    precision: str = "fp32"
    augment: bool = True
    eval_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for name in ("epochs", "batch", "eval_every"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "temperature", "gamma"):
            _require(self, name, 0 < getattr(self, name) < math.inf, "a number above 0")
        for name in ("momentum", "warmup", "label_smoothing", "ema"):
            _require(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        _require(self, "distill", 0 <= self.distill <= 1, "from 0 to 1")
        _require(self, "weight_decay", 0 <= self.weight_decay < math.inf, "at least 0")
        _require(self, "seed", 0 <= self.seed < 2**32, "from 0 to 2^32 - 1")
        _require(self, "schedule", self.schedule in ("cosine", "step"), "'cosine' or 'step'")
        _require(self, "precision", self.precision in ("fp32", "bf16"), "'fp32' or 'bf16'")
        ordered = list(self.milestones) == sorted(self.milestones)
        inside = all(0 < m < 1 for m in self.milestones)
        _require(self, "milestones", ordered and inside, "rising fractions of the training between 0 and 1")
        _require(self, "nesterov", not self.nesterov or self.momentum > 0, "false when momentum is 0")

    def learning_rate(self, step: int, total: int) -> float:
        """The learning rate of step `step` (from 0) of `total`."""
        done = step / total
        if done < self.warmup:
            return self.lr * min(1.0, (step + 1) / (self.warmup * total))
        if self.schedule == "step":
            return self.lr * self.gamma ** sum(done >= milestone for milestone in self.milestones)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON keeps."""
        return asdict(self) | {"milestones": list(self.milestones)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Recipe":
        """The recipe that `to_dict` described; fields left out take their defaults."""
        _check_fields(values)
        if "epochs" not in values:
            raise HapError("a recipe needs 'epochs', the number of passes over the training data")
        return cls(**values)


def _check_fields(values: dict[str, Any]) -> None:
    known = [field.name for field in fields(Recipe)]
    for name in values:
        if name not in known:
            raise HapError(f"a recipe has no field {name!r}: expected one of {', '.join(known)}")


def _require(recipe: Recipe, name: str, holds: bool, expected: str) -> None:
    if not holds:
        value = getattr(recipe, name)
        raise HapError(Argument(name, value, text=f"recipe field {name}"), f" is {value!r}: expected {expected}")


RECIPES: dict[str, Recipe] = {
    "paper-pretrain": Recipe(200, lr=0.1, weight_decay=2e-4, schedule="step", nesterov=False, eval_every=5),
    "paper-finetune": Recipe(160, batch=64, lr=0.02, weight_decay=4e-4, schedule="step", nesterov=False, eval_every=5),
    "paper-imagenet-finetune": Recipe(120, lr=1e-3, weight_decay=1e-4, schedule="step", nesterov=False, eval_every=5),
    "best-pretrain": Recipe(150, warmup=0.02, precision="bf16", eval_every=5),
    "best-finetune": Recipe(120, lr=0.05, warmup=0.02, distill=0.7, ema=0.999, precision="bf16", eval_every=5),
    "digits": Recipe(15, batch=64, lr=0.1, warmup=0.1, label_smoothing=0.1),
    "digits-finetune": Recipe(8, batch=64, lr=0.03, label_smoothing=0.1),
}


def get(name: str, **overrides: Any) -> Recipe:
    """A named recipe with some of its fields replaced.

    >>> get("digits", epochs=2).epochs
    2
    """
    if name not in RECIPES:
        raise HapError(f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}")
    _check_fields(overrides)
    return replace(RECIPES[name], **overrides)

"""How far what a model returns is from what the dense one returns: a number to make small, without labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.errors import Argument, HapError
from hap.execution.model_outputs import float_outputs, plain_outputs

KINDS = ("error", "divergence")


@dataclass(frozen=True)
class Objective:
    """A number that is zero where two models return the same. By `kind`:

    error: the squared error relative to the variance of what the dense model returns, summed over its outputs.
    divergence: the mean Kullback-Leibler divergence of the softmax over the last axis from the dense model's, in nats;
    of the output named logits, if there is one, else of all.
    """

    kind: str = "error"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            seen = Argument("objective", self.kind, text="objective")
            raise HapError(seen, f" is {self.kind!r}; expected one of {', '.join(map(repr, KINDS))}")

    def read(self, output: Any) -> list[Tensor]:
        """The tensors that are looked at in what a model returned."""
        plain = plain_outputs(output)
        logits = plain.get("logits") if self.kind == "divergence" and isinstance(plain, Mapping) else None
        return float_outputs(output) if logits is None else [logits]

    def __call__(self, found: list[Tensor], wanted: list[Tensor]) -> Tensor:
        compare = _divergence if self.kind == "divergence" else relative_error
        pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a.shape == b.shape]
        if not any(a.numel() for a, _ in pairs):
            raise HapError(
                "the pruned and the dense model return no tensor of real numbers of one shape, so there is nothing to "
                "learn from; was the one made from the other?"
            )
        return torch.stack([compare(a, b) for a, b in pairs if a.numel()]).sum()


def _divergence(found: Tensor, wanted: Tensor) -> Tensor:
    ours, theirs = _single(found).log_softmax(-1), _single(wanted).log_softmax(-1)
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).mean()


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The mean squared error, relative to the variance of what is wanted."""
    found, wanted = _single(found), _single(wanted)
    spread = wanted.var(correction=0)
    return (found - wanted).square().mean() / torch.where(spread > 0, spread, 1)


def _single(values: Tensor) -> Tensor:
    """In single precision at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))

"""Fine-tuning text classifiers, several side by side on the same batches, and what they predict."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hap.errors import HapError
from hap.execution.calling import eval_mode
from hap.training.cuda_graph import WARM_UP_STEPS, RecordedStep, Step
from hap_reproduction.glue.data import Batch, Encoded
from hap_reproduction.streams import in_turn, side_by_side


@dataclass(frozen=True)
class Tuning:
    """AdamW with linear warm-up and decay, RoBERTa's settings for GLUE: betas 0.9 and 0.98, no decay of vectors.

    `warmup` is a share of all steps; `most_steps` ends the training early, with the rate decayed by then.
    """

    epochs: int = 10
    most_steps: int | None = None
    batch: int = 32
    lr: float = 2e-5
    weight_decay: float = 0.1
    warmup: float = 0.06
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1 or (self.most_steps is not None and self.most_steps < 1):
            raise HapError(
                f"epochs={self.epochs}, batch={self.batch}, most_steps={self.most_steps}; expected 1 or more"
            )
        if not 0 < self.lr < math.inf:
            raise HapError(f"lr is {self.lr}; expected a learning rate above 0")

    def steps(self, examples: int) -> int:
        if examples < self.batch:
            raise HapError(f"there are {examples} examples to train on; expected at least one batch of {self.batch}")
        return min(self.epochs * (examples // self.batch), self.most_steps or 10**9)

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = max(1, round(self.warmup * total))
        return self.lr * min((step + 1) / rising, (total - step) / max(1, total - rising))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Tuned:
    """`loss`: mean training loss of each tenth of the training; `seconds`: of all models that ran side by side."""

    loss: list[float]
    steps: int
    seconds: float
    side_by_side: int


def tune(models: Sequence[nn.Module], data: Encoded, tuning: Tuning, graphs: bool = True) -> list[Tuned]:
    """Train each model in place on the same batches, on the device of the data, and leave them in eval mode.

    On CUDA in bf16; with `graphs` the step of all models is recorded once for each length of the padded texts.
    """
    device = data.labels.device
    total = tuning.steps(len(data))
    runs = [_Run(model, tuning, device) for model in models]
    feeds: dict[int, _Feed] = {}
    pool = torch.cuda.graph_pool_handle() if graphs and device.type == "cuda" else None
    marks = [total * (i + 1) // 10 for i in range(10)]
    torch.manual_seed(tuning.seed)
    begun = time.monotonic()
    with _training(models):
        for step, batch in zip(range(total), _batches(data, tuning), strict=False):
            width = next(iter(batch[0].values())).shape[1]
            if width not in feeds:
                feeds[width] = _Feed(batch, runs, pool, 1 if feeds else WARM_UP_STEPS)
            feeds[width].put(batch)
            for run in runs:
                run.set_rate(tuning.rate(step, total))
            feeds[width].step()
            for run in runs if step + 1 in marks else ():
                run.note_loss()
    losses = [run.losses() for run in runs]  # waits for the device
    seconds = time.monotonic() - begun
    return [Tuned(loss, total, seconds, len(runs)) for loss in losses]


def _batches(data: Encoded, tuning: Tuning) -> Iterator[Batch]:
    for epoch in range(tuning.epochs):
        generator = torch.Generator().manual_seed(tuning.seed * 1_000_003 + epoch)
        yield from data.epoch(tuning.batch, generator)


@contextmanager
def _training(models: Sequence[nn.Module]) -> Iterator[None]:
    for model in models:
        model.train()
    try:
        yield
    finally:
        for model in models:
            model.eval()


class _Feed:
    """The fixed tensors that a step reads for texts of one padded length, and the step of all runs on them.

    A step leaves nothing behind but weights, so the recordings of all lengths share one `pool` of memory. It runs
    `warm_up` times before it is recorded: once is enough where another length came before.
    """

    def __init__(self, batch: Batch, runs: Sequence[_Run], pool: Any, warm_up: int):
        self.inputs, self.labels = {k: v.clone() for k, v in batch[0].items()}, batch[1].clone()
        steps: list[Step] = [partial(run.step, self.inputs, self.labels) for run in runs]
        self.step: Step = in_turn(steps) if pool is None else RecordedStep(side_by_side(steps), pool, warm_up)

    def put(self, batch: Batch) -> None:
        for name, values in batch[0].items():
            self.inputs[name].copy_(values)
        self.labels.copy_(batch[1])


class _Run:
    """A model with its optimizer. A step reads nothing back, so that it can be recorded."""

    def __init__(self, model: nn.Module, tuning: Tuning, device: torch.device):
        self.model, self.device = model, device
        if broken := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
            raise HapError(f"{broken[0]} is not finite before fine-tuning; expected finite weights to start from")
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": tuning.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=torch.tensor(tuning.lr, device=device),
            betas=(0.9, 0.98),
            eps=1e-6,
            fused=cuda or None,
            capturable=cuda,
        )
        self.loss_sum = torch.zeros((), device=device)
        self.count = 0
        self.noted: list[tuple[Tensor, int]] = []

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)
        self.count += 1

    def step(self, inputs: dict[str, Tensor], labels: Tensor) -> None:
        with precise(self.device), made_on(self.device):
            logits = self.model(**inputs).logits
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.detach()

    def note_loss(self) -> None:
        self.noted.append((self.loss_sum.clone(), self.count))
        self.loss_sum.zero_()
        self.count = 0

    def losses(self) -> list[float]:
        found = [float(total) / count for total, count in self.noted if count]
        if not all(map(math.isfinite, found)):
            raise HapError(f"the training loss is not finite: {found}; lower the learning rate")
        return found


@contextmanager
def made_on(device: torch.device) -> Iterator[None]:
    """Off the CPU, what a forward makes is made on the device: a recorded step cannot copy from the host."""
    if device.type == "cpu":
        yield
        return
    with torch.device(device), FilledScalars():
        yield


class FilledScalars(TorchFunctionMode):
    """torch.tensor(0.0) by filling memory of its device instead of copying the number there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and args and isinstance(args[0], bool | int | float):
            return torch.full((), args[0], dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        return func(*args, **kwargs)


def precise(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 on CUDA, else full precision. Casts are not cached: they would outlive the recording of a graph."""
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if device.type == "cuda" else nullcontext()


def precision_of(device: torch.device) -> str:
    """What `precise` computes in, in words. Weights and the optimizer's averages are in float32 everywhere."""
    return "bf16 products, float32 weights" if device.type == "cuda" else "float32"


def predict(model: nn.Module, data: Encoded, size: int = 256) -> tuple[Tensor, Tensor]:
    """Predicted and true labels, on the CPU, short texts first."""
    device = data.labels.device
    predicted, labels = [], []
    with eval_mode(model), torch.inference_mode(), precise(device):
        for inputs, target in data.batches(size):
            predicted.append(model(**inputs).logits.argmax(-1))
            labels.append(target)
    return torch.cat(predicted).cpu(), torch.cat(labels).cpu()

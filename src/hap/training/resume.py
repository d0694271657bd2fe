"""The state of a training in one safetensors file: tensors by name, the rest as JSON in its metadata."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hap.errors import HapError
from hap.training.run import Run, under
from hap.utils import distributed
from hap.utils.atomic_files import write_atomic

FORMAT = "hap-training-1"
# A checkpoint is due once this many times the last write's duration has gone by, which caps the cost near 5%.
WORK_PER_WRITE = 20


class TrainingState:
    """All runs of one training in one file, so that networks trained side by side are always at one epoch."""

    def __init__(self, path: Path | None, runs: Sequence[Run]) -> None:
        self.path, self.runs, data = path, runs, runs[0].data
        self.data = {"name": data.name, "train": len(data.train), "classes": data.classes}
        self.wiring = [hashlib.sha256(run.wiring()).hexdigest() for run in runs]
        self.written = -float("inf")
        self.cost = 0.0

    def save(self, epoch: int, always: bool) -> None:
        """Write the state after `epoch` epochs, if it is due or `always`."""
        begun = time.monotonic()
        due = always or begun - self.written >= WORK_PER_WRITE * self.cost
        if self.path is None or not due or not distributed.is_first():
            return
        tensors = {
            f"{index}.{name}": tensor.detach().cpu().contiguous().clone()
            for index, run in enumerate(self.runs)
            for name, tensor in run.tensors().items()
        }
        metadata = {
            "format": FORMAT,
            "epoch": epoch,
            "data": self.data,
            "wiring": self.wiring,
            "recipes": [run.recipe.to_dict() for run in self.runs],
            "histories": [run.history.to_dict() for run in self.runs],
        }
        write_state(self.path, metadata, tensors)
        self.written = time.monotonic()
        self.cost = self.written - begun

    def restore(self) -> int:
        """Load the file, when there is one, into the runs. Returns the number of epochs already done."""
        if self.path is None or not self.path.exists():
            return 0
        metadata, tensors = read_state(self.path)
        self._check("recipe", metadata["recipes"], [run.recipe.to_dict() for run in self.runs])
        self._check("data", metadata["data"], self.data)
        if metadata.get("wiring") != self.wiring:
            raise HapError(
                f"checkpoint {self.path} is of networks pruned in another way: give another path, or delete it"
            )
        for index, run in enumerate(self.runs):
            state = under(f"{index}.", tensors)
            self._check("model", _shapes(state), _shapes(run.tensors()))
            run.load(state)
            run.history = replace(run.history, **metadata["histories"][index])
        return int(metadata["epoch"])

    def _check(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            raise HapError(
                f"checkpoint {self.path} is of another {what} ({_difference(found, expected)}): "
                f"give the {what} it was made with, or another checkpoint path, or delete it"
            )


def write_state(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    text = json.dumps(metadata, allow_nan=False)
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata={"hap": text}))


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("hap", "{}"))
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise HapError(f"cannot read checkpoint {path}: {error}; delete it to start anew") from error
    if metadata.get("format") != FORMAT:
        raise HapError(
            f"{path} is no checkpoint of a training: its format is {metadata.get('format')!r}, "
            f"expected {FORMAT!r}; give another path"
        )
    return metadata, tensors


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes without momentum, which a training that has not begun does not have yet."""
    return {name: (t.shape, t.dtype) for name, t in state.items() if not name.startswith("momentum.")}


def _difference(found: Any, expected: Any) -> str:
    """The first place where two descriptions differ, in words."""
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f"it holds {len(found)} models, expected {len(expected)}"
        found, expected = next((f, e) for f, e in zip(found, expected, strict=True) if f != e)
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            return f"{name} is {_plain(found.get(name))}, expected {_plain(expected.get(name))}"
    return "different"


def _plain(value: Any) -> Any:
    return list(value[0]) if isinstance(value, tuple) else value

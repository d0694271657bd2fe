"""Result files: one frozen record per trained network, as JSON. The report reads these and nothing else."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hap.errors import HapError

KIND, FORMAT = "hap-result", 1
INDEX = "experiment.json"


@dataclass(frozen=True)
class Measured:
    """One network: `accuracy` from 0 to 1, `macs` for one image, `latency` in milliseconds for `batch` images."""

    accuracy: float
    params: int
    macs: int
    latency: float
    latency_spread: float
    batch: int


@dataclass(frozen=True)
class Result:
    """One network trained (`pruned` is None) or pruned and fine-tuned, with all that is needed to judge it.

    Accuracies are those after the last epoch. `one_shot` is the accuracy after pruning and before fine-tuning.
    Latencies of `dense` and `pruned` were measured back to back, so that their ratio holds on a busy machine too.
    """

    name: str
    seed: int
    config: dict[str, Any]
    criterion: str | None
    budget: dict[str, float] | None
    dense: Measured
    pruned: Measured | None
    one_shot: float | None
    test_images: int
    curve: dict[str, list[Any]]
    seconds: float
    revision: str
    hardware: dict[str, Any]
    date: str

    @property
    def measured(self) -> Measured:
        """The network that this record is about."""
        return self.pruned or self.dense

    def to_dict(self) -> dict[str, Any]:
        return {"kind": KIND, "format": FORMAT} | dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        known = {f.name for f in dataclasses.fields(cls)}
        if values.get("kind") != KIND or values.get("format") != FORMAT or not known <= set(values):
            raise HapError("this is not a result that this version of HAP wrote")
        fields = {k: v for k, v in values.items() if k in known}
        try:
            sides = {k: Measured(**fields[k]) if fields[k] is not None else None for k in ("dense", "pruned")}
        except TypeError as error:
            raise HapError(f"this is not a result that this version of HAP wrote: {error}") from error
        return cls(**{**fields, **sides})


def read_json(path: Path) -> Any:
    """What a JSON file holds; HapError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HapError(f"{path} cannot be read: {error}") from error


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """All records of HAP that belong together in a folder: those its experiment.json lists, else all JSON below it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise HapError(f"there is no folder {folder}")
    index = folder / INDEX
    listed = read_json(index).get("files", []) if index.is_file() else None
    paths = [folder / name for name in listed] if listed is not None else sorted(folder.rglob("*.json"))
    values = [read_json(path) for path in paths]
    return [v for v in values if isinstance(v, dict) and str(v.get("kind", "")).startswith("hap-")]


def read_results(folder: str | Path) -> list[Result]:
    """The results in a folder, dense ones first."""
    results = [Result.from_dict(v) for v in read_records(folder) if v["kind"] == KIND]
    return sorted(results, key=lambda r: r.pruned is not None)

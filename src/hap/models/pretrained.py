"""Trained networks by name: `hap.zoo.load("resnet56-cifar10-hap-implant-40")`.

They stand as checkpoints in a folder with a manifest that says of each what it is, how well it does, which result file
says so, and the checksum that it must have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from hap import models
from hap.errors import HapError
from hap.io.checkpoint import load as load_checkpoint
from hap.io.checkpoint import read
from hap.utils.atomic_files import digest, read_record, write_json

MANIFEST = "manifest.json"
BESIDE = Path(__file__).parents[3] / "zoo"
"""The folder of a clone, if the package runs from its source."""
RUN_AGAIN = "get it again from the repository, or delete it and run hap reproduce again"


@dataclass(frozen=True)
class Entry:
    """One network. `accuracy` is that of the file, which is in half precision, on the test images; `params_left` and
    `macs_left` are shares of the dense network; `result` is the file that the figures come from."""

    file: str
    sha256: str
    model: str
    classes: int
    accuracy: float
    params: int
    macs: int
    params_left: float
    macs_left: float
    result: str


def load(name: str, folder: str | Path | None = None) -> nn.Module:
    """The network of that name in eval mode. A file that is not the one the manifest speaks of is refused."""
    entry = entries(folder)[checked(name, folder)]
    return load_checkpoint(path(name, folder), models.build(entry.model, entry.classes)).eval()


def path(name: str, folder: str | Path | None = None) -> Path:
    """The checkpoint of that name, its checksum verified."""
    entry = entries(folder)[checked(name, folder)]
    file = _folder(folder) / entry.file
    if not file.is_file():
        raise HapError(f"the manifest lists {file}, but the file is not there; get it again from the repository")
    if (found := digest(file)) != entry.sha256:
        raise HapError(f"{file} has sha256 {found[:16]}..., not {entry.sha256[:16]}...: it is damaged or another file")
    return file


def names(folder: str | Path | None = None) -> list[str]:
    """The names that `load` knows."""
    return list(entries(folder))


def entries(folder: str | Path | None = None) -> dict[str, Entry]:
    """What the manifest says of each network."""
    manifest = _folder(folder) / MANIFEST
    if not manifest.is_file():
        raise HapError(f"there is no {manifest}; pass folder=, the zoo/ folder of a clone of the repository")
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))["networks"]
        return {name: _as_entry(values) for name, values in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HapError(
            f"{manifest} is no manifest of networks ({type(error).__name__}: {error}); get it again from the "
            "repository, or write it anew with hap reproduce all --render"
        ) from error


def _as_entry(values: Mapping[str, Any]) -> Entry:
    """An entry of a manifest, each value of its kind."""
    entry = Entry(**{field.name: values[field.name] for field in fields(Entry)})
    for name in (field.name for field in fields(Entry)):
        text, value = name in ("file", "sha256", "model", "result"), getattr(entry, name)
        if not isinstance(value, str if text else int | float):
            raise TypeError(f"{name} is {value!r}, expected {'text' if text else 'a number'}")
    return entry


def checked(name: str, folder: str | Path | None = None) -> str:
    """The name, if there is a network of that name."""
    if name not in (known := names(folder)):
        raise HapError(f"there is no network {name!r} in the zoo; it has {', '.join(known) or 'none'}")
    return name


def _folder(folder: str | Path | None) -> Path:
    """The folder asked for, else that of the clone the package runs from, else zoo/ in the current folder."""
    if folder is not None:
        return Path(folder)
    return BESIDE if BESIDE.is_dir() else Path("zoo")


def write_manifest(chosen: Mapping[str, str], folder: Path, results: Path) -> dict[str, Entry]:
    """Describe the chosen networks (name -> name of the run) that have a file in `folder` and a result in `results`."""
    found = {}
    for name, run in chosen.items():
        file, result = folder / f"{run}.safetensors", results / f"{run}.json"
        if file.is_file() and result.is_file():
            found[name] = _entry(file, result)
    write_json(folder / MANIFEST, {"kind": "hap-zoo-files", "format": 1,
                                   "networks": {n: asdict(e) for n, e in found.items()}})  # fmt: skip
    return found


def _entry(file: Path, result: Path) -> Entry:
    record = read_record(result, ("name", "model", "params", "macs"), RUN_AGAIN)
    about = read(file).about
    if about.get("result", "").removesuffix(".json") != record["name"]:
        raise HapError(f"{file} says that it is of {about.get('result')!r}, not of {record['name']!r}")
    half = record.get("accuracy_in_half_precision", record.get("accuracy_as_stored"))
    if half is None or "classes" not in about:
        what = f"{result} has no accuracy_in_half_precision" if half is None else f"{file} does not say its classes"
        raise HapError(f"{what}: it is damaged; {RUN_AGAIN}")
    return Entry(
        file=file.name, sha256=digest(file), model=record["model"], classes=about["classes"], accuracy=half,
        params=record["params"], macs=record["macs"], params_left=record.get("params_left", 1.0),
        macs_left=record.get("macs_left", 1.0), result=f"results/{result.parent.name}/{result.name}",
    )  # fmt: skip

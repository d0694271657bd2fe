"""Trained networks by name: `hap.zoo.load("resnet56-cifar10-hap-implant-40")`.

They stand as checkpoints in a folder with a manifest that says of each what it is, how well it does, which result file
says so, and the checksum that it must have.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn

from hap import models
from hap.errors import HapError
from hap.io.checkpoint import load as load_checkpoint
from hap.utils.atomic_files import digest

MANIFEST = "manifest.json"
BESIDE = Path(__file__).parents[3] / "zoo"
"""The folder of a clone, if the package runs from its source."""


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
    entry = _entry(name, folder)
    return load_checkpoint(path(name, folder), models.build(entry.model, entry.classes)).eval()


def path(name: str, folder: str | Path | None = None) -> Path:
    """The checkpoint of that name, its checksum verified."""
    entry = _entry(name, folder)
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
    kinds = get_type_hints(Entry)
    for name, kind in kinds.items():
        if not isinstance(values[name], str if kind is str else int | float):
            raise TypeError(f"{name} is {values[name]!r}, expected {'text' if kind is str else 'a number'}")
    return Entry(**{name: values[name] for name in kinds})


def _entry(name: str, folder: str | Path | None) -> Entry:
    if name not in (known := entries(folder)):
        raise HapError(f"there is no network {name!r} in the zoo; it has {', '.join(known) or 'none'}")
    return known[name]


def _folder(folder: str | Path | None) -> Path:
    """The folder asked for, else that of the clone the package runs from, else zoo/ in the current folder."""
    if folder is not None:
        return Path(folder)
    return BESIDE if BESIDE.is_dir() else Path("zoo")

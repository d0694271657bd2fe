"""The manifest of the zoo: what each trained network is, how well it does, and which result file says so."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from hap.errors import HapError
from hap.io.checkpoint import read
from hap.models.pretrained import MANIFEST, Entry
from hap.utils.atomic_files import digest, write_json
from hap_reproduction.files import read_record

RUN_AGAIN = "get it again from the repository, or delete it and run hap reproduce again"


def write_manifest(chosen: Mapping[str, str], folder: Path, results: Path) -> dict[str, Entry]:
    """Describe the chosen networks (name -> name of the run) that have a file in `folder` and a result in `results`."""
    found = {}
    for name, run in chosen.items():
        file, result = folder / f"{run}.safetensors", results / f"{run}.json"
        if file.is_file() and result.is_file():
            found[name] = _entry(file, result)
    write_json(
        folder / MANIFEST, {"kind": "hap-zoo-files", "format": 1, "networks": {n: asdict(e) for n, e in found.items()}}
    )
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
        file=file.name,
        sha256=digest(file),
        model=record["model"],
        classes=about["classes"],
        accuracy=half,
        params=record["params"],
        macs=record["macs"],
        params_left=record.get("params_left", 1.0),
        macs_left=record.get("macs_left", 1.0),
        result=f"results/{result.parent.name}/{result.name}",
    )

"""Networks that train side by side, as their state on disk knows them, so that it is found again whatever is asked for
next."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hap.errors import HapError
from hap.utils.atomic_files import write_json
from hap.workflow.results import read_json
from hap_reproduction.cifar10.training import STATE, divide

NOTE = "batch.json"


@dataclass(frozen=True)
class Batch:
    """Jobs by name, in the order of their state in `folder`, and what it depends on beside them: `masked_from` (see
    `Manner`) and the `widths` that those under masks share (see `hap.trimming`), None as long as they are not known.
    `side_by_side` is how many there were at the beginning."""

    folder: Path
    jobs: tuple[str, ...]
    masked_from: float
    side_by_side: int
    widths: dict[str, int] | None = None

    @property
    def state(self) -> Path:
        return self.folder / STATE

    def write(self) -> None:
        write_json(self.folder / NOTE, {k: v for k, v in asdict(self).items() if k != "folder"})

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def new_batch(work: Path, jobs: Sequence[str], masked_from: float) -> Batch:
    """A batch that has not begun, noted down before it does."""
    batch = Batch(_folder(work, jobs), tuple(jobs), masked_from, len(jobs))
    batch.write()
    return batch


def begun(work: Path) -> list[Batch]:
    """The batches that have a state, the one last written first."""
    states = sorted(work.glob(f"*/{STATE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [batch for path in states if isinstance(batch := _read(path.parent), Batch)]


def unknown(work: Path) -> list[str]:
    """States of which nobody can tell whose they are, each with the reason."""
    found = [(path, _read(path.parent)) for path in sorted(work.glob(f"*/{STATE}"))]
    return [f"{path} ({why})" for path, why in found if isinstance(why, str)]


def _read(folder: Path) -> Batch | str:
    """The batch of a folder, or why it is not known."""
    note = folder / NOTE
    if not note.exists():
        return f"no {NOTE} beside it"
    try:
        found = read_json(note)
        widths = found.get("widths", {})  # notes without it are of networks in their dense shape
        return Batch(
            folder,
            tuple(map(str, found["jobs"])),
            float(found["masked_from"]),
            int(found["side_by_side"]),
            None if widths is None else {str(name): int(width) for name, width in widths.items()},
        )
    except (HapError, AttributeError, KeyError, TypeError, ValueError) as error:
        return f"{NOTE} beside it is damaged: {error}"


def only(batch: Batch, jobs: Sequence[str], others: Sequence[str]) -> Batch:
    """The part of a batch that has these jobs, as a batch of its own. The `others` become one too, and what is neither
    is given up with the batch itself."""
    if tuple(jobs) == batch.jobs:
        return batch
    parts = []
    for names in (others, jobs):  # the jobs last, so that `begun` puts them first
        if names:
            part = replace(batch, folder=_folder(batch.folder.parent, names), jobs=tuple(names))
            part.write()
            divide(batch.state, [batch.jobs.index(name) for name in names], part.state)
            parts.append(part)
    batch.remove()
    return parts[-1]


def _folder(work: Path, jobs: Sequence[str]) -> Path:
    return work / hashlib.sha256("\n".join(jobs).encode()).hexdigest()[:12]

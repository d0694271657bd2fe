"""Files of long experiments: records that may be damaged, and folders that one process has to itself."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hap.errors import HapError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def read_record(path: Path, keys: Sequence[str], advice: str) -> dict[str, Any]:
    """A JSON file with these keys at least; HapError, with `advice` on what to do, if it is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HapError(f"{path} cannot be read: {error}; {advice}") from error
    if not isinstance(record, dict):
        raise HapError(f"{path} is damaged: it holds {type(record).__name__}, expected an object of JSON; {advice}")
    if missing := [key for key in keys if key not in record]:
        raise HapError(f"{path} is damaged: it has no {', '.join(missing)}; {advice}")
    return record


@contextmanager
def locked(folder: Path, advice: str) -> Iterator[None]:
    """Inside, no other process can hold the folder; HapError, with `advice` on what to do, if one does already.

    A process that ends, however it does, lets go. Where there is no flock (Windows), nothing is held.
    """
    if fcntl is None:
        yield
        return
    with (folder / ".held").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HapError(f"another process works in {folder}; {advice}") from error
        yield

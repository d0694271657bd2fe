"""Writing files so that a reader, or a run cut short, never sees half of one, and reading what may be damaged."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hap.errors import HapError
from hap.utils.distributed import may_write

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_atomic(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one step.

    Missing folders are made. When `write` fails, an older file at `path` stays as it was. Of several processes that
    torchrun started for one command only the first writes.
    """
    if not may_write():
        return
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
    except OSError as error:
        raise _unwritable(path, error) from error
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, obj: Any) -> None:
    """Write `obj` as indented JSON, atomically. Not-a-number and infinity are refused: they are not JSON."""
    write_text(path, json.dumps(obj, indent=2, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write text, atomically."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


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


def check_writable(folder: str | Path) -> None:
    """Refuse a folder in which no file can be made, before the work whose outcome is to stand there."""
    probe = Path(folder) / ".check"
    write_atomic(probe, lambda temporary: None)
    probe.unlink(missing_ok=True)


@contextmanager
def locked(folder: str | Path, advice: str) -> Iterator[None]:
    """Inside, no other process can hold the folder; HapError, with `advice` on what to do, if one does already.

    A process that ends, however it does, lets go. Where there is no flock (Windows), nothing is held.
    """
    if fcntl is None:
        yield
        return
    with (Path(folder) / ".held").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HapError(f"another process works in {folder}; {advice}") from error
        yield


def digest(path: str | Path) -> str:
    """The SHA-256 of a file's content."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise HapError(f"{path} cannot be read: {error.strerror or error}") from error


def _umask() -> int:
    # The mask can only be read by setting it; mkstemp's private mode would surprise whoever shares the file.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(path: Path, error: OSError) -> HapError:
    return HapError(f"cannot write {path}: {error.strerror or error}; choose a path in a folder you may write to")

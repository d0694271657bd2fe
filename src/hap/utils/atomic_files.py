"""Writing files so that a reader, or a run cut short, never sees half of one."""

import hashlib
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hap.errors import HapError
from hap.utils.distributed import may_write


def write_atomic(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one step.

    Missing folders are made. When `write` fails, an older file at `path` stays as it was. Of several processes that
    torchrun started for one command only the first writes.
    """
    if not may_write():
        return
    path = Path(path)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        advice = "choose a path in a folder you may write to"
        raise HapError(f"cannot write {path}: {error.strerror or error}; {advice}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_json(path: str | Path, obj: Any) -> None:
    """Write `obj` as indented JSON, atomically. Not-a-number and infinity are refused: they are not JSON."""
    write_text(path, json.dumps(obj, indent=2, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write text, atomically."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def check_writable(folder: str | Path) -> None:
    """Refuse a folder in which no file can be made, before the work whose outcome is to stand there."""
    probe = Path(folder) / ".check"
    write_atomic(probe, lambda temporary: None)
    probe.unlink(missing_ok=True)


def digest(path: str | Path) -> str:
    """The SHA-256 of a file's content."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise HapError(f"{path} cannot be read: {error.strerror or error}") from error

"""The exception type that users need to catch, and the pieces of its messages that a command line words otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NO_VALUE: Any = object()


@dataclass(frozen=True)
class Argument:
    """An argument that a message names: `name=value`, `name=`, or another `text` that Python code reads."""

    name: str
    value: Any = NO_VALUE
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.name}={'' if self.value is NO_VALUE else self.value}"

    @staticmethod
    def listed(values: Mapping[str, Any]) -> list[str | Argument]:
        """Several of them, with commas in between."""
        return [piece for name, value in values.items() for piece in (", ", Argument(name, value))][1:]


@dataclass(frozen=True)
class ForPython:
    """Advice that only a program can follow, and what to tell those who type commands instead."""

    text: str
    typed: tuple[str | Argument, ...] = ()

    def __str__(self) -> str:
        return self.text


class HapError(ValueError):
    """Something the caller can mend. The message names the value seen, what was expected and what to do.

    It is made of `pieces`, one after the other: text, `Argument`s, `ForPython`, and other errors with theirs.
    """

    def __init__(self, *pieces: str | Argument | ForPython | HapError) -> None:
        self.pieces: tuple[str | Argument | ForPython, ...] = ()
        for piece in pieces:
            self.pieces += piece.pieces if isinstance(piece, HapError) else (piece,)
        super().__init__("".join(map(str, self.pieces)))

    @property
    def argument(self) -> str | None:
        """The argument that the message is about, if it is about one."""
        return next((piece.name for piece in self.pieces if isinstance(piece, Argument)), None)

    @property
    def value(self) -> Any:
        """The value that was given for it, or None."""
        values = (p.value for p in self.pieces if isinstance(p, Argument))
        return next((value for value in values if value is not NO_VALUE), None)


class CaptureError(HapError):
    """torch.export cannot capture the model as a whole; perhaps it can capture parts of it, see `hap.parts`."""


@contextmanager
def optional_package(what: str, extra: str) -> Iterator[None]:
    """Around the import of a package that not everyone has: `what` needs it, and installing `extra` brings it."""
    try:
        yield
    except ImportError as error:
        raise HapError(f"{what}: pip install 'hessian-aware-pruning[{extra}]'") from error

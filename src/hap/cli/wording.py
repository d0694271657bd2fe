"""The library's messages in the words of the command line: options instead of arguments."""

from __future__ import annotations

from typing import Any

from hap.errors import NO_VALUE, Argument, ForPython, HapError

RECIPE_OPTIONS = ("epochs", "lr", "batch", "distill", "seed")
"""The fields of a recipe that have an option of their own."""


def in_words_of(command: str | None, error: HapError) -> str:
    """An error for who typed `hap COMMAND`. `run` reads a file, whose keys are the arguments' own names."""
    return "".join(_typed(piece, command == "run") for piece in error.pieces)


def _typed(piece: Any, file: bool) -> str:
    if isinstance(piece, ForPython):
        return "".join(_typed(p, file) for p in piece.typed)
    if not isinstance(piece, Argument) or _has_no_key(piece, file):
        return str(piece)
    name = piece.name if file else f"--{piece.name.replace('_', '-')}"
    if piece.text or piece.value is NO_VALUE:
        return name
    return f"{name} = {piece.value}" if file else f"{name} {piece.value}"


def _has_no_key(argument: Argument, file: bool) -> bool:
    """Whether there is no option, or no key of a file, that one could name."""
    if argument.text.startswith("recipe field"):
        return file or argument.name not in RECIPE_OPTIONS
    return file and argument.name == "data_root"

"""Reading CIFAR's "python version" files, which are pickles, without running what a file asks for.

An unpickler may import and call anything that a file names. This one knows four names, those that byte arrays are
pickled by, and each stands for a small function or class of this module: an array is put together here from its shape
and bytes. Any other name is refused.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hap.errors import HapError


class _Array:
    """An array, whose contents come later in the stream as numpy's state: version, shape, dtype, order, bytes."""

    values: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _DType) or dtype.code.lstrip("|") != "u1":
            raise pickle.UnpicklingError(f"an array of {getattr(dtype, 'code', dtype)} stands where uint8 belongs")
        raw = _encode(content) if isinstance(content, str) else content
        self.values = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _DType:
    """The type of an array's values. Byte order and the like, its state, do not matter for bytes."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = _text(code)

    def __setstate__(self, state: Any) -> None: ...


def _encode(text: str, *_: Any) -> bytes:
    """How Python 3 writes bytes in protocol 2."""
    return text.encode("latin-1")


_KNOWN: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray _reconstruct": lambda *_: _Array(),
    "numpy._core.multiarray _reconstruct": lambda *_: _Array(),
    "numpy ndarray": _Array,  # an argument of the two above
    "numpy dtype": _DType,
    "_codecs encode": _encode,
}


class _Unpickler(pickle._Unpickler):
    """The one in Python: that in C takes as much memory for its memo as a file says."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """What a name of the file stands for; every way to a name leads through here."""
        if (known := _KNOWN.get(f"{module} {name}")) is None:
            raise pickle.UnpicklingError(f"a call of {module} {name} is not allowed")
        return known


def read_arrays(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR python file: names to numpy uint8 arrays, lists, numbers or strings."""
    try:
        with path.open("rb") as file:
            found = _Unpickler(file, encoding="latin-1").load()
    except OSError as error:
        raise HapError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # what is no pickle can fail in any way
        raise HapError(
            f"{path} is not a CIFAR python file: {error}; fetch it again or use the binary version"
        ) from error
    if not isinstance(found, dict):
        raise HapError(f"{path} holds a {type(found).__name__}: expected the dictionary of a CIFAR python file")
    return {_text(key): value.values if isinstance(value, _Array) else value for key, value in found.items()}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)

"""Reading CIFAR's "python version" files without unpickling them.

Those files are pickles, and unpickling can run any code. This reader takes the opcodes one by one and knows
only those that build dictionaries, lists, tuples, numbers, strings and numpy byte arrays. It calls nothing
that a file names: an array is put together here from its shape and bytes. Anything else is refused.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hap.errors import HapError

_MARK = object()
_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")


@dataclass(frozen=True)
class _Name:
    """A global that a file refers to; only its spelling is ever used."""

    text: str


@dataclass
class _Array:
    """An array whose contents come later in the stream."""

    values: np.ndarray | None = None


@dataclass
class _DType:
    code: str


class _Refused(Exception):
    pass


def read_arrays(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR python file: names to numpy uint8 arrays, lists, numbers or strings."""
    reader = _Reader()
    try:
        with path.open("rb") as file:
            for opcode, argument, _ in pickletools.genops(file):
                reader.apply(opcode.name, argument)
        found = reader.stack.pop()
    except OSError as error:
        raise HapError(f"cannot read {path}: {error.strerror or error}") from error
    except (_Refused, ValueError, TypeError, LookupError, AttributeError) as error:
        raise HapError(
            f"{path} is not a CIFAR python file: {error}; fetch it again or use the binary version"
        ) from error
    if not isinstance(found, dict):
        raise HapError(f"{path} holds a {type(found).__name__}: expected the dictionary of a CIFAR python file")
    return {_text(key): _finished(value) for key, value in found.items()}


class _Reader:
    """The stack and memo of the pickle virtual machine, without its power to import and to call."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def apply(self, opcode: str, argument: Any) -> None:
        if opcode in _PUSHES:
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode]())
        elif opcode in _ACTIONS:
            _ACTIONS[opcode](self, argument)
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise _Refused(f"opcode {opcode} is not allowed")

    def since_mark(self) -> list[Any]:
        position = len(self.stack) - 1
        while self.stack[position] is not _MARK:
            position -= 1
        items = self.stack[position + 1 :]
        del self.stack[position:]
        return items

    def put(self, key: int | None) -> None:
        self.memo[len(self.memo) if key is None else key] = self.stack[-1]

    def get(self, key: int) -> None:
        self.stack.append(self.memo[key])

    def make_tuple(self, count: int | None) -> None:
        items = self.since_mark() if count is None else [self.stack.pop() for _ in range(count)][::-1]
        self.stack.append(tuple(items))

    def extend(self, items: list[Any]) -> None:
        self._top(list).extend(items)

    def update(self, items: list[Any]) -> None:
        self._top(dict).update(zip(items[::2], items[1::2], strict=True))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_Name(f"{module} {name}"))

    def reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        self.stack.append(_construct(called, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Array):
            target.values = _array(state)
        elif not isinstance(target, _DType):
            raise _Refused(f"BUILD of a {type(target).__name__} is not allowed")

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise _Refused(f"a {type(self.stack[-1]).__name__} stands where a {kind.__name__} belongs")
        return self.stack[-1]


def _construct(called: Any, arguments: Any) -> Any:
    name = called.text if isinstance(called, _Name) else repr(called)
    if name in _RECONSTRUCT:
        return _Array()
    if name == "numpy dtype":
        return _DType(_text(arguments[0]))
    if name == "_codecs encode":  # how Python 3 writes bytes in protocol 2
        return arguments[0].encode("latin-1")
    raise _Refused(f"a call of {name} is not allowed")


def _array(state: tuple[Any, ...]) -> np.ndarray:
    """A uint8 array from numpy's pickled state: version, shape, dtype, Fortran order, bytes."""
    _, shape, dtype, fortran, content = state
    if not isinstance(dtype, _DType) or dtype.code.lstrip("|") != "u1":
        raise _Refused(f"an array of {getattr(dtype, 'code', dtype)} stands where uint8 belongs")
    raw = content.encode("latin-1") if isinstance(content, str) else content
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _finished(value: Any) -> Any:
    return value.values if isinstance(value, _Array) else value


_PUSHES = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG1", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_ACTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "PUT": _Reader.put,
    "BINPUT": _Reader.put,
    "LONG_BINPUT": _Reader.put,
    "MEMOIZE": lambda r, _: r.put(None),
    "GET": _Reader.get,
    "BINGET": _Reader.get,
    "LONG_BINGET": _Reader.get,
    "TUPLE": lambda r, _: r.make_tuple(None),
    "TUPLE1": lambda r, _: r.make_tuple(1),
    "TUPLE2": lambda r, _: r.make_tuple(2),
    "TUPLE3": lambda r, _: r.make_tuple(3),
    "APPEND": lambda r, _: r.extend([r.stack.pop()]),
    "APPENDS": lambda r, _: r.extend(r.since_mark()),
    "SETITEM": lambda r, _: r.update([r.stack.pop(), r.stack.pop()][::-1]),
    "SETITEMS": lambda r, _: r.update(r.since_mark()),
    "GLOBAL": lambda r, name: r.stack.append(_Name(name)),
    "STACK_GLOBAL": lambda r, _: r.stack_global(),
    "REDUCE": lambda r, _: r.reduce(),
    "BUILD": lambda r, _: r.build(),
}

"""Reading CIFAR's "python version" files without unpickling them.

Those files are pickles, and unpickling can run any code. This reader takes the opcodes one by one, and a table has
those that it knows: they build dictionaries, lists, tuples, numbers, strings and numpy byte arrays. Nothing that a file
names is called: a second table says what each of a few names stands for. Anything else is refused.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hap.errors import HapError

_BROKEN = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, MemoryError)
"""What reading may end in where a file is damaged or made to do harm."""


@dataclass
class _Numpy:
    """An array or a dtype, of which a file says more (`state`) after it has asked for it; of a dtype the `code`."""

    code: str = ""
    state: Any = None


def read_arrays(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR python file: names to numpy uint8 arrays, lists, numbers or strings."""
    machine = _Machine()
    try:
        with path.open("rb") as file:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name not in _OPCODES:
                    raise ValueError(f"opcode {opcode.name} is not allowed")
                _OPCODES[opcode.name](machine, argument)
        found = machine.stack.pop()
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, expected a dictionary")
        return {key: _array(value) if isinstance(value, _Numpy) else value for key, value in found.items()}
    except OSError as error:
        raise HapError(f"cannot read {path}: {error.strerror or error}") from error
    except _BROKEN as error:
        why = str(error) or type(error).__name__
        raise HapError(f"{path} is not a CIFAR python file: {why}; fetch it again or use the binary version") from error


class _Machine:
    """The stack and memo of the pickle virtual machine, without its power to import and to call."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def since_mark(self) -> list[Any]:
        return self.pop(len(self.stack) - self.marks.pop())

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"a {type(self.stack[-1]).__name__} stands where a {kind.__name__} belongs")
        return self.stack[-1]

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def update(self, items: list[Any]) -> None:
        self.top(dict).update(zip(map(_text, items[::2]), items[1::2], strict=True))

    def call(self, called: Any, arguments: Any) -> None:
        if (name := _text(called)) not in _CALLS:
            raise ValueError(f"a call of {name} is not allowed")
        self.push(_CALLS[name](*arguments))

    def build(self, state: Any) -> None:
        self.top(_Numpy).state = state


def _array(array: _Numpy) -> np.ndarray:
    """A uint8 array from numpy's pickled state: version, shape, dtype, Fortran order, bytes."""
    _, shape, dtype, fortran, content = array.state
    if not isinstance(dtype, _Numpy) or dtype.code.lstrip("|") != "u1":
        raise ValueError(f"an array of {getattr(dtype, 'code', dtype)} stands where uint8 belongs")
    raw = content.encode("latin-1") if isinstance(content, str) else content
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _text(value: Any) -> str:
    """Keys and names are text and nothing else: the hash of tuples in a million tuples would overflow C's stack."""
    if not isinstance(value, str | bytes):
        raise ValueError(f"a {type(value).__name__} stands where text belongs")
    return value.decode("latin-1") if isinstance(value, bytes) else value


_CALLS: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray _reconstruct": lambda *_: _Numpy(),
    "numpy._core.multiarray _reconstruct": lambda *_: _Numpy(),
    "numpy dtype": lambda code, *_: _Numpy(_text(code)),
    "_codecs encode": lambda text, *_: text.encode("latin-1"),  # how Python 3 writes bytes in protocol 2
}
_VALUES = (
    *("BININT", "BININT1", "BININT2", "INT", "LONG1", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    "GLOBAL",  # only its spelling is ever used
)
_OPCODES: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(_VALUES, _Machine.push),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, key: machine.push(machine.memo[key])),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "APPEND": lambda machine, _: machine.extend(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.update(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.since_mark()),
    "STACK_GLOBAL": lambda machine, _: machine.push(" ".join(machine.pop(2))),
    "REDUCE": lambda machine, _: machine.call(*machine.pop(2)),
    "BUILD": lambda machine, _: machine.build(*machine.pop(1)),
}

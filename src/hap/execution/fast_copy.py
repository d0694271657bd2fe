"""Copies of modules, as copy.deepcopy makes them, in a fraction of the time.

Most of what a module holds are numbers, names and empty dictionaries of hooks, and deepcopy asks each of them how it
wants to be copied. Trials copy a model once for every question. Modules may also hold what they computed in their last
forward, such as the weight of torch.nn.utils.weight_norm; deepcopy refuses that while it belongs to a graph.
"""

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Iterable, Set
from contextlib import suppress
from functools import lru_cache
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.utils.module_tree import named_tensors

ATOMS = {int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device, BuiltinFunctionType}
"""Types of which deepcopy returns the value itself."""
MODEL = -1
"""Where a memo notes whose copy is made, and then the ids of all modules and tensors in it."""
DICTS, FLAT = (dict, OrderedDict), (tuple, list, set)


def deepcopied(value: Any, memo: dict[int, Any]) -> Any:
    """What copy.deepcopy(value, memo) returns. Tensors that belong to a graph are copied without it, and functions that
    reach into the model, such as a forward put in place of another, reach into the copy."""
    kind: Any = type(value)
    if kind in ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is FunctionType:
        return _copied_function(value, memo)
    if kind is MethodType:
        return MethodType(value.__func__, deepcopied(value.__self__, memo))
    if kind in DICTS and not getattr(value, "__dict__", None):
        made = memo[id(value)] = kind()
        for key, item in value.items():
            made[deepcopied(key, memo)] = item if type(item) in ATOMS else deepcopied(item, memo)
        return made
    if kind in FLAT and all(type(item) in ATOMS for item in value):
        return value if kind is tuple else memo.setdefault(id(value), kind(value))
    if isinstance(value, Tensor) and not value.is_leaf:
        return memo.setdefault(id(value), value.detach().clone())
    if isinstance(value, nn.Module) and _is_copied_as_usual(kind):
        memo.setdefault(MODEL, value)
        made = memo[id(value)] = object.__new__(kind)
        state = value.__getstate__()
        made.__setstate__({n: item if type(item) in ATOMS else deepcopied(item, memo) for n, item in state.items()})
        return made
    return copy.deepcopy(value, memo)


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """The function with copies in place of what it reaches of the model; the function itself, if that is nothing."""
    own = _ids_of_model(memo)
    if not _reaches(function, own, set()):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    names = {name: deepcopied(x, memo) for name, x in _global_modules(function).items() if _reaches(x, own, set())}
    globals_ = function.__globals__ | names if names else function.__globals__
    made = FunctionType(function.__code__, globals_, function.__name__, function.__defaults__, cells)
    memo[id(function)] = made
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    for place, old in _closure_contents(function).items():
        cells[place].cell_contents = deepcopied(old, memo) if _reaches(old, own, set()) else old
    return made


def _ids_of_model(memo: dict[int, Any]) -> Set[int]:
    """The ids of the modules and tensors of the model that is copied."""
    if isinstance(model := memo.get(MODEL), nn.Module):
        memo[MODEL] = frozenset(map(id, (*model.modules(), *named_tensors(model).values())))
    return memo.get(MODEL, frozenset())


def _reaches(value: Any, own: Set[int], seen: set[int]) -> bool:
    """Whether one of these objects is reached from a value, as far as functions, methods and plain containers lead."""
    if id(value) in own:
        return True
    if type(value) in ATOMS or id(value) in seen:
        return False
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, FunctionType):
        inside = (*_closure_contents(value).values(), *_global_modules(value).values())
    elif isinstance(value, MethodType):
        inside = (value.__self__,)
    elif isinstance(value, tuple | list | dict):
        inside = value.values() if isinstance(value, dict) else value
    return any(_reaches(item, own, seen) for item in inside)


def _closure_contents(function: FunctionType) -> dict[int, Any]:
    """What the cells of a function's closure hold, by place, without those that nothing was assigned to yet."""
    found = {}
    for place, cell in enumerate(function.__closure__ or ()):
        with suppress(ValueError):
            found[place] = cell.cell_contents
    return found


def _global_modules(function: FunctionType) -> dict[str, nn.Module]:
    """Modules that a function reaches by the names of global variables."""
    known = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    return {name: value for name, value in known if isinstance(value, nn.Module)}


def copy_with(model: nn.Module, changed: dict[str, Tensor]) -> nn.Module:
    """A copy with some tensors changed. Other parameters are shared."""
    memo: dict[int, Any] = {}
    tensors = named_tensors(model)
    for name, new in changed.items():
        old = tensors[name]
        wrap = isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter)
        memo[id(old)] = nn.Parameter(new, old.requires_grad) if wrap else new
    for tensor in tensors.values():
        if isinstance(tensor, nn.Parameter):
            memo.setdefault(id(tensor), tensor)
    made = cast(nn.Module, deepcopied(model, memo))
    if changed:
        made.train()  # to forget what was written out for evaluation; whoever runs a copy evaluates it
    if shared := set(map(id, model.modules())) & set(map(id, made.modules())):
        name = next(n for n, m in model.named_modules() if id(m) in shared)
        raise HapError(f"{name or 'the model'} copies itself as itself (__deepcopy__), so no copy of it can be tried")
    return made


@lru_cache(maxsize=4096)
def _is_copied_as_usual(kind: Any) -> bool:
    """Whether all that makes a module of this class is among its attributes, and it has no way of its own to copy."""
    ways = (kind.__new__, kind.__reduce_ex__, kind.__reduce__, kind.__getstate__)
    usual = (object.__new__, object.__reduce_ex__, object.__reduce__, nn.Module.__getstate__)
    slots = any(vars(k).get("__slots__") for k in kind.__mro__)
    return ways == usual and not slots and not hasattr(kind, "__deepcopy__") and kind not in copyreg.dispatch_table

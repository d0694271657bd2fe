"""What models return without objects that torch.export cannot look into, such as a decoder's cache of keys and values.

Nobody compares such objects, and what is in them changes with the heads: None stands in for them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.errors import HapError

PLAIN = (Tensor, bool, int, float, str, type(None))


def plain_outputs(output: Any) -> Any:
    """What a model returned: tensors, numbers and strings, and None for other objects. Dataclasses become dicts."""
    return pytree.tree_map(_plain_value, output)


def _plain_value(x: Any) -> Any:
    if isinstance(x, PLAIN):
        return x
    if isinstance(x, Mapping):
        return plain_outputs(dict(x))
    if is_dataclass(x) and not isinstance(x, type):
        return plain_outputs({field.name: getattr(x, field.name, None) for field in fields(x)})
    return None


def _with_plain_tuples(output: Any) -> Any:
    """An output with plain tuples in place of named ones and of torch's own: files know no classes."""

    def own(x: Any) -> bool:
        return isinstance(x, tuple) and type(x) is not tuple

    return pytree.tree_map(lambda x: tuple(map(_with_plain_tuples, x)) if own(x) else x, output, is_leaf=own)


def float_outputs(output: Any) -> list[Tensor]:
    """The tensors of real numbers that a model returned."""
    return [x for x in pytree.tree_leaves(plain_outputs(output)) if isinstance(x, Tensor) and x.is_floating_point()]


@contextmanager
def returning_plain_outputs(model: nn.Module, plain_tuples: bool = False) -> Iterator[None]:
    """Inside, the model returns its `plain_outputs`. HapError while it runs, if there is no tensor among them."""

    def leave_out(module: nn.Module, args: Any, output: Any) -> Any:
        found = plain_outputs(output)
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(found)):
            raise HapError(
                f"{type(module).__name__} returns a {type(output).__name__}, in which no tensor is found; expected "
                "tensors, or tuples, lists, dicts or dataclasses of them"
            )
        return _with_plain_tuples(found) if plain_tuples else found

    handle = model.register_forward_hook(leave_out)
    try:
        yield
    finally:
        handle.remove()

"""What rules ask of a node of the captured graph: its operator's name, its shape, its arguments."""

from typing import Any

import torch
from torch import fx

from hap.graph.operator_families import CONVOLUTIONS, TRANSPOSED, Trait, family, having

POINTWISE = family("pointwise")
ADDING, KEEPING_ZERO = having(Trait.ADDS), having(Trait.KEEPS_ZERO)
ENDING_BRANCHES = CONVOLUTIONS | TRANSPOSED | {"batch_norm"}


def schema_name(node: fx.Node) -> str:
    """Such as `aten::conv2d`; `getitem` and other Python functions by their own name."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else getattr(node.target, "__name__", str(node.target))


def short_name(node: fx.Node) -> str:
    """Such as `conv2d`; operators that are not torch's own keep their namespace."""
    return schema_name(node).removeprefix("aten::")


def is_pointwise(node: fx.Node) -> bool:
    """Whether it works element by element, as we declare it or torch tags it."""
    return short_name(node) in POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_sum(node: fx.Node) -> bool:
    """Whether it adds two tensors."""
    return short_name(node) in ADDING and all(isinstance(a, fx.Node) for a in node.args[:2])


def keeps_zero(node: fx.Node) -> bool:
    """A function of one tensor that maps zero to zero, channel by channel."""
    return node.op == "call_function" and short_name(node) in KEEPING_ZERO


def ends_branch(node: fx.Node) -> bool:
    """A convolution or batch normalisation: behind its module a hook can widen a branch."""
    return node.op == "call_function" and short_name(node) in ENDING_BRANCHES


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's result."""
    return tuple(int(s) for s in node.meta["val"].shape)


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments by name, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}

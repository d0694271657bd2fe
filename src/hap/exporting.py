"""export: a pruned model as ONNX or as a torch.export program."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Node
from torch.utils import _pytree as pytree

from hap.comparing import difference, outputs
from hap.errors import HapError
from hap.examples import call_arguments, evaluating
from hap.files import write_atomic
from hap.folding import fold_batchnorms

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
TYPE_AS = torch.ops.aten.type_as.default
CLAMP = torch.ops.aten.clamp.Tensor
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""How far outputs may be off where BatchNorms are folded, relative to the largest."""


def export(path: str | Path, model: nn.Module, example: Any, *, dynamic_batch: bool = True) -> Path:
    """Write the model in eval mode to `path`, as its ending says: .onnx or .pt2; returns the path.

    BatchNorms are folded into what is before them. Shapes are those of the example, but for the first axis of its
    tensors, the batch: that may have any length, unless `dynamic_batch` is False. A warning says if what was captured
    does not compute on the example what the model does: code may go another way while it is captured.
    """
    path = Path(path)
    _writer(path)
    program = capture(model, example, dynamic_batch=dynamic_batch)
    if problem := _other_outputs(model, program, _at_least_two(example) if dynamic_batch else example):
        what = f"what torch.export captured of {type(model).__name__}"
        warnings.warn(f"{what} was not seen to compute the same: {problem}", stacklevel=2)
    return write(path, program)


def write(path: Path, program: ExportedProgram) -> Path:
    """Write a captured program as the ending of the path says."""
    write_atomic(path, lambda temporary: _writer(path)(temporary, program))
    return path


def _writer(path: Path) -> Callable[[Path, ExportedProgram], None]:
    writers = {".onnx": _onnx, ".pt2": _program}
    if path.suffix not in writers:
        raise HapError(f"cannot export to {path}: the name must end in .onnx or .pt2")
    return writers[path.suffix]


def capture(model: nn.Module, example: Any, *, dynamic_batch: bool = False) -> ExportedProgram:
    """The torch.export program of the model in eval mode, BatchNorms folded."""
    args, kwargs = call_arguments(_at_least_two(example) if dynamic_batch else example)
    shapes: Any = _free_batch((args, kwargs)) if dynamic_batch else None
    with evaluating(model), torch.no_grad():
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise HapError(_refusal(model, error, dynamic_batch)) from error
        folded = fold_batchnorms(program.module(check_guards=False))
        return torch.export.export(folded, args, kwargs, dynamic_shapes=shapes, strict=False)


def _other_outputs(model: nn.Module, program: ExportedProgram, example: Any) -> str | None:
    """How far what was captured is from the model, in words, if that is more than rounding."""
    args, kwargs = call_arguments(example)
    with torch.no_grad():
        seen = pytree.tree_leaves(program.module(check_guards=False)(*args, **kwargs))
    return difference(outputs(model, example), seen, tolerance=ROUNDING)


def _refusal(model: nn.Module, error: Exception, dynamic_batch: bool) -> str:
    name, why = type(model).__name__, str(error).strip()
    if "Constraints violated" in why:
        return f"{name} runs with one batch size only, that of the example; pass dynamic_batch=False"
    hint = "; dynamic_batch=False asks less of it" if dynamic_batch else ""
    return f"torch.export cannot capture {name}: {why.splitlines()[0]}{hint}"


def _at_least_two(example: Any) -> Any:
    """The example, twice over if its batch is 1: torch.export takes an axis of length 1 for one that never changes.

    Tensors are not those of the caller, since torch.export marks the ones that it is given.
    """
    batch = _batch(example)

    def grown(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.cat([x, x]) if batch == 1 and _length(x) == 1 else x.detach()

    return pytree.tree_map(grown, example)


def _free_batch(arguments: Any) -> ShapesCollection:
    """Shapes in which the batch of every tensor that has it may change."""
    shapes, batch = ShapesCollection(), _batch(arguments)
    for leaf in pytree.tree_leaves(arguments):
        if _length(leaf) == batch:
            shapes[leaf] = {0: Dim.DYNAMIC}
    return shapes


def _batch(example: Any) -> int | None:
    """The length of the first axis of the first tensor that has one."""
    lengths = (_length(leaf) for leaf in pytree.tree_leaves(example))
    return next((n for n in lengths if n is not None), None)


def _length(x: Any) -> int | None:
    return len(x) if isinstance(x, Tensor) and x.ndim else None


def _program(path: Path, program: ExportedProgram) -> None:
    with path.open("wb") as file:
        torch.export.save(program, file)


def _onnx(path: Path, program: ExportedProgram) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HapError(
            "exporting to ONNX needs the packages onnx and onnxscript: pip install 'hessian-aware-pruning[export]'"
        ) from error
    if table := {n.target: _IN_OTHER_WORDS[n.target] for n in program.graph.nodes if _is_unknown(n)}:
        program = program.run_decompositions(table)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.onnx uses what torch gives up; nobody here can help it
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
    assert converted is not None
    converted.save(str(path), external_data=False)


def _is_unknown(node: Node) -> bool:
    """Whether torch.onnx has no right translation of an operator. Of attention it has that with four dimensions."""
    if node.target is ATTENTION:
        return node.args[0].meta["val"].ndim != 4  # type: ignore[union-attr]
    return node.target in _IN_OTHER_WORDS


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *args: Any,
               **kwargs: Any) -> Tensor:  # fmt: skip
    """Attention as the products and the softmax that it is. These add a mask, also one that says where to look."""
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, *args, **kwargs)[0]


def _type_as(x: Tensor, other: Tensor) -> Tensor:
    return x.to(other.dtype)


def _clamp(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Limits that are tensors get names of their own in ONNX, which clash where one value is clamped several times."""
    x = x if low is None else torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


_IN_OTHER_WORDS: dict[Any, Callable[..., Tensor]] = {ATTENTION: _attention, TYPE_AS: _type_as, CLAMP: _clamp}
"""What stands for operators that not every torch.onnx translates, or not rightly."""

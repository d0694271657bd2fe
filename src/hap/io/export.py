"""export: a pruned model as ONNX or as a torch.export program."""

import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import ConstantArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from hap.errors import Argument, ForPython, HapError, optional_package
from hap.execution.calling import call_arguments, eval_mode, seeded
from hap.execution.model_outputs import difference, output_tensors, returning_plain_outputs
from hap.graph.capture import start_autograd
from hap.io.fold_batchnorm import fold_batchnorms, has_nothing_to_fold
from hap.utils.atomic_files import write_atomic
from hap.utils.plain_mapping import as_dict

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
TYPE_AS = torch.ops.aten.type_as.default
CLAMP = torch.ops.aten.clamp.Tensor
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""How far outputs may be off where BatchNorms are folded, relative to the largest."""


def export(
    path: str | Path, model: nn.Module, example: Any, *, dynamic_batch: bool = True, dynamic_axes: Sequence[int] = ()
) -> Path:
    """Write the model in eval mode as ONNX or as a torch.export program, BatchNorms folded into what is before them.

    >>> import tempfile
    >>> path = export(Path(tempfile.mkdtemp(), "net.pt2"), nn.Linear(2, 3), torch.randn(4, 2))
    >>> torch.export.load(path).module()(torch.randn(7, 2)).shape
    torch.Size([7, 3])

    Arguments: the ending of `path`, .onnx or .pt2, says what is written. `example` is what the model is called with: a
    tensor, a tuple, or a dict of keyword arguments. With `dynamic_batch` the first axis of its tensors, the batch, may
    have any length; so may `dynamic_axes`, such as (1,) for the tokens of a text or (2, 3) for the sides of an image,
    wherever a tensor is as long there as the first that has such an axis.
    Returns: the path.

    What is checked is what torch.export captured, not the file: it is run on the example, with a warning if it does not
    compute there what the model does, since code may go another way while it is captured, and on examples of other
    lengths, and refused if it differs there. How torch.onnx converts it is not checked: run an ONNX file once where it
    is to be used, and compare.
    torch.export may have captured some lengths only, where the model goes another way with others: a .pt2 file refuses
    those, and a warning names them; ONNX has no means to, so that is an error.
    Named tuples that the model returns are plain ones in the file. ONNX holds tensors alone: other values, but for
    None, are refused.
    """
    path = Path(path)
    if path.suffix not in _WRITERS:
        raise HapError(f"cannot export to {path}: the name must end in .onnx or .pt2")
    axes = _dynamic(example, dynamic_batch, dynamic_axes)
    if dynamic_batch and _length(example, 0) == 1:  # torch.export takes an axis of length 1 for one that never changes
        example = _resized(example, {0: 2})
    program = capture(model, example, axes)
    if problem := _unlike(output_tensors(model, example), program.module(check_guards=False), example):
        what = f"what torch.export captured of {type(model).__name__}"
        warnings.warn(f"{what} was not seen to compute the same: {problem}", stacklevel=2)
    elif axes:
        _check_other_lengths(model, program, example, axes, refuses=path.suffix == ".pt2")
    return write(path, program)


def write(path: Path, program: ExportedProgram) -> Path:
    """Write a captured program as the ending of the path says."""
    write_atomic(path, lambda temporary: _WRITERS[path.suffix](temporary, program))
    return path


def capture(model: nn.Module, example: Any, axes: Sequence[int] = ()) -> ExportedProgram:
    """The torch.export program of the model in eval mode, BatchNorms folded. These axes may have any length."""
    own = pytree.tree_map_only(Tensor, Tensor.detach, as_dict(example))  # torch.export marks those that it is given
    args, kwargs = call_arguments(own if axes else example)
    shapes: Any = _free((args, kwargs), axes) if axes else None
    start_autograd()
    with eval_mode(model), torch.no_grad():
        try:
            with returning_plain_outputs(model, plain_tuples=True), _naming(model, kwargs):
                program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise HapError(*_refusal(model, error, axes)) from error
        if has_nothing_to_fold(program):
            return program
        folded = fold_batchnorms(program.module(check_guards=bool(axes)))  # the guards are captured once more
        return torch.export.export(folded, args, kwargs, dynamic_shapes=shapes, strict=False)


@contextmanager
def _naming(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the model's forward names those of these arguments that it takes as **kwargs: torch.export mistakes the
    shapes of arguments without a name."""
    forward, own = model.forward, vars(model).get("forward")
    named_ones = [p for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    unnamed = [name for name in kwargs if name not in {p.name for p in named_ones}]
    if not unnamed:
        yield
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in unnamed]
    vars(named)["__signature__"] = inspect.Signature([*named_ones, *added])
    vars(model)["forward"] = named
    try:
        yield
    finally:
        vars(model).pop("forward") if own is None else vars(model).update(forward=own)


def _unlike(wanted: list[Any], captured: Callable[..., Any], example: Any) -> str | None:
    """How far what was captured is from these outputs of the model, in words, if that is more than rounding."""
    args, kwargs = call_arguments(example)
    with torch.no_grad(), seeded():
        return difference(wanted, pytree.tree_leaves(captured(*args, **kwargs)), tolerance=ROUNDING)


def _refusal(model: nn.Module, error: Exception, axes: Sequence[int]) -> list[str | ForPython]:
    name, why = type(model).__name__, str(error).strip().splitlines()[0]
    if "Constraints violated" in why:
        fixed = sorted({int(axis) for axis in re.findall(r"\.size\(\)\[(\d+)\]", why)})
        if any(fixed):
            only = f"{name} runs with one length of axis {max(fixed)} only, that of the example"
            return [f"{only}; leave it out of dynamic_axes"]
        advice = ForPython("pass dynamic_batch=False", ("give ", Argument("batch")))
        return [f"{name} runs with one batch size only, that of the example; ", advice]
    hint = f"; {'fewer dynamic_axes ask' if any(axes) else 'dynamic_batch=False asks'} less of it" if axes else ""
    return [f"torch.export cannot capture {name}: {why}{hint}"]


# ---- axes of any length ---------------------------------------------------------------------------------------


def _dynamic(example: Any, dynamic_batch: bool, dynamic_axes: Sequence[int]) -> tuple[int, ...]:
    """The axes that may have any length, checked."""
    if not isinstance(dynamic_axes, Sequence) or not all(type(a) is int and a > 0 for a in dynamic_axes):
        raise HapError(
            f"dynamic_axes is {dynamic_axes!r}; expected axes behind the first, such as (1,) for the tokens of a text "
            "or (2, 3) for the sides of an image. The first is the batch, see dynamic_batch."
        )
    for axis in dynamic_axes:
        if (length := _length(example, axis)) is None or length < 2:
            seen = "no tensor of the example has it" if length is None else "torch.export takes a length of 1 for fixed"
            raise HapError(f"axis {axis} cannot have any length: {seen}; give an example that is 2 or longer there")
    return (0,) * dynamic_batch + tuple(dynamic_axes)


def _length(example: Any, axis: int) -> int | None:
    """How long the first tensor is there that has such an axis."""
    tensors = (x for x in pytree.tree_leaves(as_dict(example)) if isinstance(x, Tensor))
    return next((x.shape[axis] for x in tensors if x.ndim > axis), None)


def _has(x: Any, axis: int, length: int | None) -> bool:
    return isinstance(x, Tensor) and x.ndim > axis and x.shape[axis] == length


def _resized(example: Any, lengths: dict[int, int]) -> Any:
    """The example with these axes as long as told: cut off at the end, or begun anew."""
    before = {axis: _length(example, axis) for axis in lengths}

    def resized(x: Any) -> Any:
        for axis, length in lengths.items():
            if _has(x, axis, before[axis]):
                x = x.index_select(axis, torch.arange(length, device=x.device) % x.shape[axis])
        return x

    return pytree.tree_map(resized, as_dict(example))


def _free(arguments: Any, axes: Sequence[int]) -> ShapesCollection:
    """Shapes in which these axes of every tensor that has them may change."""
    shapes, lengths = ShapesCollection(), {axis: _length(arguments, axis) for axis in axes}
    for leaf in pytree.tree_leaves(arguments):
        if free := {axis: Dim.DYNAMIC for axis, length in lengths.items() if _has(leaf, axis, length)}:
            shapes[leaf] = free
    return shapes


def _check_other_lengths(
    model: nn.Module, program: ExportedProgram, example: Any, axes: tuple[int, ...], refuses: bool
) -> None:
    """Run model and file on examples of other lengths. HapError where they differ, a warning where the file fails. A
    .pt2 file `refuses` lengths that it was not captured for; ONNX computes what was captured, whatever that is. A
    length of 1, which torch.export never captures, is no more than a warning."""
    name, missing, warned = type(model).__name__, {axis for axis in axes if axis}, []
    file = program.module() if refuses else program.module(check_guards=False).forward
    for candidates in _other_lengths(program, example, axes):
        for lengths in candidates:
            other = _resized(example, lengths)
            try:
                wanted = output_tensors(model, other)
            except Exception:  # whatever it is that the model has against this length
                continue
            missing -= lengths.keys()
            problem, failed = _tried(wanted, file, other)
            if problem is None:
                break
            where = f"where {' and '.join(f'axis {axis} has length {n}' for axis, n in lengths.items())}"
            if not (failed and refuses) and 1 not in lengths.values():
                fixed = "Leave it out of dynamic_axes" if any(lengths) else "Pass dynamic_batch=False"
                advice = fixed if refuses else f"{fixed}, or write a .pt2 file, which can refuse what was not captured"
                raise HapError(
                    f"what torch.export captured of {name} does not compute the same {where}: {problem}. {advice}."
                )
            if not failed or lengths.get(0) == 1 or 1 not in lengths.values():
                warned.append(f"{where} ({problem})")
    if missing:
        raise HapError(
            f"{name} runs with no other lengths of axes {tuple(sorted(missing))} than those of the example; "
            "leave them out of dynamic_axes"
        )
    if warned:
        warnings.warn(f"the file does not compute what {name} does {', '.join(warned)}", stacklevel=3)


def _tried(wanted: list[Any], file: Callable[..., Any], example: Any) -> tuple[str | None, bool]:
    """How the file differs from these outputs on an example, and whether it fails."""
    try:
        return _unlike(wanted, file, example), False
    except Exception as error:  # guards are asserted, and operators have errors of their own
        return f"it fails: {str(error).strip().splitlines()[0]}", True


LONG = 4096
"""From here on, a limit of the lengths that torch.export captured is not looked into: it would take too long."""


def _other_lengths(program: ExportedProgram, example: Any, axes: tuple[int, ...]) -> Iterator[list[dict[int, int]]]:
    """Lengths by axis to try, of each list the first that both model and program run with: shorter and longer ones,
    another batch, and those right outside of what torch.export captured."""
    now, ranges = {axis: _length(example, axis) or 0 for axis in axes}, _captured_lengths(program, axes)

    def changed(times: float, more: int) -> dict[int, int]:
        return {a: min(max(int(times * n) + more, ranges[a][0]), ranges[a][1]) for a, n in now.items() if a}

    if any(axes):
        yield [changed(0, 0), changed(0.5, 0), changed(1, -1)]
        yield [changed(2, 1), changed(2, 0), changed(1, 1)]
    for axis, (least, most) in ranges.items():
        if not axis and now[axis] < most:
            yield [{axis: now[axis] + 1}]
        yield [{axis: least - 1}]
        if most < LONG:
            yield [{axis: most + 1}]


def _captured_lengths(program: ExportedProgram, axes: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """The least and the greatest length of these axes for which torch.export captured the model, 2 or more."""
    found = dict.fromkeys(axes, (2, LONG))
    inputs = {*program.graph_signature.user_inputs}
    for node in program.graph.find_nodes(op="placeholder"):
        shape = getattr(node.meta.get("val"), "shape", ()) if node.name in inputs else ()
        for axis in (a for a in found if a < len(shape) and isinstance(shape[a], torch.SymInt)):
            seen = program.range_constraints[shape[axis].node.expr]
            found[axis] = (max(found[axis][0], int(seen.lower)), int(min(found[axis][1], seen.upper)))
    return found


# ---- files ----------------------------------------------------------------------------------------------------


def _program(path: Path, program: ExportedProgram) -> None:
    _refuse(program, (str,), "torch.export cannot read a text back from a file; return tensors and numbers alone")
    try:
        with path.open("wb") as file:
            torch.export.save(program, file)
    except NotImplementedError as error:  # classes of inputs that torch has no name for
        raise HapError(f"torch.export cannot write this model: {_in_a_sentence(error)}") from error


def _onnx(path: Path, program: ExportedProgram) -> None:
    with optional_package("exporting to ONNX needs the packages onnx and onnxscript", "export"):
        import onnxscript  # noqa: F401
    _refuse(program, (bool, int, float, str), "ONNX has outputs for tensors alone; return those, or write a .pt2 file")
    table = {n.target: _IN_OTHER_WORDS[n.target] for n in program.graph.nodes if _is_unknown(n)}
    program = program.run_decompositions(table)  # without any, too: nothing is written in place then
    _copy_what_is_turned(program)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.onnx uses what torch gives up; nobody here can help it
        try:
            converted = torch.onnx.export(program, dynamo=True, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            why = _in_a_sentence(cause)
            raise HapError(f"torch.onnx cannot convert this model: {why}; a .pt2 file can hold it") from error
    assert converted is not None
    converted.save(str(path), external_data=False)


def _refuse(program: ExportedProgram, kinds: tuple[type, ...], why: str) -> None:
    """HapError if a value of one of these kinds is among the outputs."""
    outputs = [spec.arg for spec in program.graph_signature.output_specs]
    for value in (x.value for x in outputs if isinstance(x, ConstantArgument) and isinstance(x.value, kinds)):
        raise HapError(f"the model returns {value!r}, and {why}")


def _copy_what_is_turned(program: ExportedProgram) -> None:
    """Put a copy, in this program, wherever a tensor is turned and then reshaped.

    It must write nothing in place: what is written to a copy, what was turned would not show.
    Attention may leave its result so in memory that this takes none, and none is captured. Once torch.onnx has put
    attention in other words it does. ONNX knows nothing of memory, so that a copy costs nothing there.
    """
    aten = torch.ops.aten
    reshaping = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default)
    for turned in [n for n in program.graph.nodes if n.target in (aten.transpose.int, aten.permute.default)]:
        if readers := [user for user in turned.users if user.target in reshaping]:
            with program.graph.inserting_after(turned):
                kept = {"memory_format": torch.contiguous_format}
                copy = program.graph.call_function(aten.clone.default, (turned,), kept)
            copy.meta = {**turned.meta, "val": turned.meta["val"].contiguous()}
            for reader in readers:
                reader.replace_input_with(turned, copy)
    program.graph_module.recompile()


def _in_a_sentence(error: BaseException) -> str:
    """The first sentence of what an exception says, which torch goes on to explain on pages."""
    return re.split(r"[.!] |\n", str(error).strip() or type(error).__name__)[0].rstrip(".!")


def _is_unknown(node: Node) -> bool:
    """Whether torch.onnx has no right translation of an operator. Of attention it has that with four dimensions."""
    if node.target is ATTENTION:
        return node.args[0].meta["val"].ndim != 4  # type: ignore[union-attr]
    return node.target in _IN_OTHER_WORDS


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Attention as the products and the softmax that it is. These add a mask, also one that says where to look."""
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, *args, **kwargs)[0]


def _clamp(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Limits that are tensors get names of their own in ONNX, which clash where one value is clamped several times."""
    x = x if low is None else torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


_IN_OTHER_WORDS: dict[Any, Callable[..., Tensor]] = {
    ATTENTION: _attention,
    TYPE_AS: lambda x, other: x.to(other.dtype),
    CLAMP: _clamp,
}
"""What stands for operators that not every torch.onnx translates, or not rightly."""

_WRITERS: dict[str, Callable[[Path, ExportedProgram], None]] = {".onnx": _onnx, ".pt2": _program}

"""export: a pruned model as ONNX or as a torch.export program."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hap.errors import HapError
from hap.examples import call_arguments, evaluating
from hap.files import write_atomic


def export(path: str | Path, model: nn.Module, example: Any) -> Path:
    """Write the model in eval mode to `path`, as its ending says: .onnx or .pt2; returns the path.

    Input shapes are those of the example.
    """
    path = Path(path)
    writers = {".onnx": _onnx, ".pt2": _program}
    if path.suffix not in writers:
        raise HapError(f"cannot export to {path}: the name must end in .onnx or .pt2")
    args, kwargs = call_arguments(example)
    with evaluating(model), torch.no_grad():
        try:
            program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:
            raise HapError(
                f"torch.export cannot capture {type(model).__name__}: {str(error).splitlines()[0]}"
            ) from error
        write_atomic(path, lambda temporary: writers[path.suffix](temporary, program))
    return path


def _program(path: Path, program: torch.export.ExportedProgram) -> None:
    with path.open("wb") as file:
        torch.export.save(program, file)


def _onnx(path: Path, program: torch.export.ExportedProgram) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HapError(
            "exporting to ONNX needs the packages onnx and onnxscript: pip install 'hessian-aware-pruning[export]'"
        ) from error
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    converted = torch.onnx.export(program, dynamo=True, verbose=False)
    assert converted is not None
    converted.save(str(path), external_data=False)

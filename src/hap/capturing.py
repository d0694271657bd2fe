"""What torch.export captures of a model, in the form that a trace reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn

from hap import rules
from hap.entries import Arguments, recording
from hap.errors import CaptureError, HapError
from hap.examples import call_arguments, evaluating, run


def capture(model: nn.Module, example: Any) -> tuple[torch.export.ExportedProgram, Arguments]:
    """The graph of the model, and what its modules were called with."""
    args, kwargs = call_arguments(example)
    try:
        with evaluating(model), torch.no_grad(), recording(model) as called, redirect_stderr(StringIO()):
            program = torch.export.export(model, args, kwargs, strict=False)  # where it fails, it prints half a graph
    except Exception as error:
        check_runs(model, example)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CaptureError(
            f"torch.export cannot capture {type(model).__name__} on this example: {reason}. Check that "
            "model(example) runs, and that its forward does not branch on tensor values; see the cause above."
        ) from error
    _inline_regions(program.graph_module)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
            raise CaptureError(
                f"torch.export cannot tell the sizes of {type(model).__name__} on this example: that of {node.name} "
                "depends on tensor values. Trace parts of the model instead, see hap.parts."
            )
    return program, called


def check_runs(model: nn.Module, example: Any) -> None:
    try:
        run(model, example)
    except HapError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HapError(f"{type(model).__name__} does not run on this example: {reason}") from error


def _inline_regions(module: fx.GraphModule) -> None:
    """Put what runs under a `with torch.autocast(...)` or `torch.no_grad()` in place of the node that wraps it."""
    graph = module.graph
    for node in [n for n in graph.nodes if rules.schema_name(n).startswith("wrap_with_")]:
        place = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        results = _insert(graph, getattr(module, str(node.args[place].target)), node, node.args[place + 1 :])
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _insert(graph: fx.Graph, region: fx.GraphModule, before: fx.Node, operands: Sequence[Any]) -> Any:
    """Copy the nodes of a region in front of a node; returns what the region returns."""
    _inline_regions(region)
    inputs = [n for n in region.graph.nodes if n.op == "placeholder"]
    known: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    with graph.inserting_before(before):
        for inner in region.graph.nodes:
            if inner.op == "call_function":
                known[inner] = graph.node_copy(inner, lambda n: known[n])
    return fx.map_arg(region.graph.output_node().args[0], lambda n: known[n])

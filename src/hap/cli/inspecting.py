"""hap eval, hap export, hap info."""

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hap
from hap.cli.options import DataRoot, DataSpec, Device, ImageSize, Model, Saved, check_out, open_network, open_with_data
from hap.cli.screen import out as screen
from hap.cli.screen import plan_table, say, share, table, tell_written, working
from hap.errors import HapError
from hap.training.evaluation import device_of
from hap.workflow.networks import checkpoint_path, example_of_checkpoint, load_data, measure_networks


def evaluate(
    checkpoint: Saved,
    data: DataSpec = None,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    model: Model = None,
    data_root: DataRoot = None,
    image_size: ImageSize = None,
    device: Device = None,
) -> None:
    """Measure accuracy, cost and latency of a network.

    \b
    Examples:
      hap eval runs/pruned.safetensors --data digits
      hap eval runs/pruned.safetensors --split train --device cpu
    """
    if split not in ("train", "test"):
        raise HapError(f"--split is {split!r}; expected train or test")
    network, _, _, found = open_with_data(checkpoint, model, device, data, data_root, image_size)
    with working("evaluating"):
        result = hap.evaluate(network, found, split)
        (side,) = measure_networks((network, result.accuracy), data=found)
    on = device_of(network)
    where = "one CPU thread" if on.type == "cpu" else torch.cuda.get_device_name(on)
    rows = [
        ["accuracy", f"{result.accuracy:.2%} of {result.count} {split} images"],
        ["loss", f"{result.loss:.4f}"],
        ["params", f"{side.params:,}"],
        ["FLOPs", f"{side.macs:,} multiply-adds for one image"],
        ["latency", f"{side.latency:.2f} ms for {side.batch} images on {where}"],
    ]
    screen().print(_pairs(rows))


def export(
    checkpoint: Saved,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write: .onnx or .pt2.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Fix the images per call. Default: any number.")] = None,
    input_shape: Annotated[
        str | None, typer.Option(help="The input's shape with its batch, such as 1,3,32,32. Default: the checkpoint's.")
    ] = None,
    dynamic_axes: Annotated[
        str | None, typer.Option(help="Axes that may have any length beside the batch, such as 2,3 for an image.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Take the input's shape from this data instead.")] = None,
    model: Model = None,
    data_root: DataRoot = None,
    image_size: ImageSize = None,
) -> None:
    """Write a network as ONNX or as a torch.export program. BatchNorms are folded.

    \b
    Examples:
      hap export runs/pruned.safetensors runs/pruned.onnx
      hap export runs/pruned.safetensors runs/pruned.pt2 --batch 32
      hap export runs/pruned.safetensors runs/pruned.onnx --dynamic-axes 2,3
      hap export mine.safetensors mine.onnx --model resnet56 --input-shape 1,3,32,32
    """
    shape = _numbers("--input-shape", input_shape, "1,3,32,32", least=2) if input_shape is not None else None
    axes = _numbers("--dynamic-axes", dynamic_axes, "2,3") if dynamic_axes is not None else []
    if shape is not None and (data is not None or batch is not None):
        raise HapError("--input-shape says it all, its batch included; leave out --data and --batch")
    if out.suffix not in (".onnx", ".pt2"):
        raise HapError(f"cannot export to {out}: the name must end in .onnx or .pt2")
    check_out(out)
    network, saved, spec = open_network(checkpoint, model, "cpu")
    if shape is not None:
        example = torch.zeros(shape)
    elif data is not None:
        example = torch.zeros(batch or 1, *load_data(data, spec, data_root, image_size).train.images.shape[1:])
    else:
        example = example_of_checkpoint(saved, checkpoint, batch or 1)
    with working(f"exporting to {out.name}"):
        hap.export(out, network, example, dynamic_batch=batch is None and shape is None, dynamic_axes=axes)
    tell_written(out)


def info(checkpoint: Saved) -> None:
    """Say what a checkpoint holds, without loading its network or running any of its code.

    \b
    Examples:
      hap info runs/pruned.safetensors
      hap info zoo:resnet56-cifar10-dense
    """
    checkpoint = checkpoint_path(checkpoint)
    found = hap.read(checkpoint)
    about, metrics = found.about, found.metrics
    size = sum(math.prod(shape) for shape in found.shapes.values())
    rows = [["file", f"{checkpoint}, format {found.format}"]]
    rows += [[key, _plain(about[key])] for key in ("model", "data", "classes", "input") if key in about]
    rows += [[key, about[word]] for key, word in (("from", "pruned_from"), ("from", "finetuned_from")) if word in about]
    rows.append(["tensors", f"{len(found.shapes)}, {size:,} values"])
    if "accuracy" in metrics:
        rows.append(["accuracy", f"{metrics['accuracy']:.2%}"])
    if found.plan is not None:
        before, after = found.plans[0].before, found.plan.after
        rows.append(["params", f"{before.params:,} -> {after.params:,} ({share(after.params, before.params)} left)"])
        rows.append(["FLOPs", f"{before.macs:,} -> {after.macs:,} ({share(after.macs, before.macs)} left)"])
        rows.append(["coupling", found.plan.coupling])
        if found.plan.implant is not None:
            rows.append(["implants", ", ".join(f"{k} {v}" for k, v in found.plan.implant.to_dict().items())])
    elif "params" in metrics:
        rows.append(["params", f"{metrics['params']:,}"])
        rows.append(["FLOPs", f"{metrics.get('macs', 0):,}"])
    if found.order is not None:
        rows.append(["order", str(found.order)])
    if found.recipe is not None:
        shown = ("epochs", "batch", "lr", "schedule", "distill", "seed")
        rows.append(["recipe", ", ".join(f"{k} {found.recipe[k]}" for k in shown if k in found.recipe)])
    screen().print(_pairs([[key, str(value)] for key, value in rows]))
    for plan in found.plans:
        screen().print(plan_table(plan))
        if plan.untouched:
            say(f"{plan.untouched}.")


def _numbers(option: str, text: str, such_as: str, least: int = 1) -> list[int]:
    """At least so many whole numbers from 1 on."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < least or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise HapError(f"{option} is {text!r}; expected whole numbers with commas, such as {such_as}")
    return [int(part) for part in parts]


def _plain(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(rows: list[list[str]]) -> Any:
    made = table(["", ""], rows)
    made.show_header = False
    made.columns[1].justify = "left"
    made.columns[1].no_wrap = False
    made.columns[1].overflow = "fold"
    return made

"""hap train, hap finetune."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import hap
from hap import models
from hap.cli import options
from hap.cli.options import allow_local_modules, check_saved_name, open_network, open_with_data
from hap.cli.screen import resumable, say, tell_written, working
from hap.data import Data
from hap.errors import HapError
from hap.planning.plan import Plan
from hap.training import recipes
from hap.training.evaluation import check_reads
from hap.training.recipes import Recipe
from hap.utils import distributed
from hap.workflow.config import DISTILL, taught
from hap.workflow.networks import describe_network, load_data, metrics_of, new_network, pick_device

RecipeName = Annotated[str | None, typer.Option("--recipe", help=f"One of {', '.join(recipes.RECIPES)}.")]
Epochs = Annotated[int | None, typer.Option(help="Instead of the recipe's.")]
Rate = Annotated[float | None, typer.Option("--lr", help="The highest learning rate, instead of the recipe's.")]
Batch = Annotated[int | None, typer.Option(help="Images per step, instead of the recipe's.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start anew, also over another training's checkpoint or its interrupted state.")
]
Log = Annotated[Path | None, typer.Option(help="A folder for TensorBoard.")]


def train(
    model: Annotated[str, typer.Option(help="A zoo name or package.module:factory.")],
    data: Annotated[str, typer.Option(help="digits, cifar10, cifar100 or a folder.")],
    out: Annotated[Path, typer.Option(help="The checkpoint to write (.safetensors).")],
    recipe: RecipeName = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch: Batch = None,
    data_root: options.DataRoot = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    log: Log = None,
    anew: Fresh = False,
) -> None:
    """Train a network from scratch. After Ctrl-C the same command goes on.

    \b
    Examples:
      hap train --model digits_resnet --data digits --out runs/dense.safetensors
      hap train --model mynet:build --data photos/ --recipe best-pretrain \\
          --epochs 90 --out runs/mynet.safetensors
    """
    usual = "digits" if data == "digits" else "best-pretrain"
    chosen = _chosen(recipe or usual, seed=seed, epochs=epochs, lr=lr, batch=batch)
    where = pick_device(device)
    if ":" in model:
        allow_local_modules()
    else:
        models.info(model)
    with working("reading the data"):
        found = load_data(data, model, data_root, image_size).to(where)
    path, described = check_saved_name(out), describe_network(model, found)
    _make_way(path, chosen, described, anew)
    network = new_network(model, found.classes, seed).to(where)
    check_reads(network, found, model)
    _train_and_save(network, found, chosen, path, described, (), None, log)


def finetune(
    checkpoint: options.Saved,
    data: options.DataSpec = None,
    recipe: RecipeName = None,
    teacher: Annotated[
        Path | None, typer.Option(help="A checkpoint of the dense network, whose outputs guide the training.")
    ] = None,
    distill: Annotated[
        float | None,
        typer.Option(help=f"The teacher's weight, 0 to 1. Default: the recipe's, else {DISTILL} with a teacher."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The checkpoint to write. Default: CHECKPOINT-finetuned.safetensors")
    ] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch: Batch = None,
    model: options.Model = None,
    data_root: options.DataRoot = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    log: Log = None,
    anew: Fresh = False,
) -> None:
    """Train a pruned (or dense) network further. After Ctrl-C the same command goes on.

    \b
    Examples:
      hap finetune runs/pruned.safetensors --data digits --recipe digits-finetune
      hap finetune runs/pruned.safetensors --teacher runs/dense.safetensors \\
          --out runs/final.safetensors
    """
    network, saved, spec, found = open_with_data(checkpoint, model, device, data, data_root, image_size)
    usual = "digits-finetune" if found.name == "digits" else "best-finetune"
    chosen = _chosen(recipe or usual, seed=seed, epochs=epochs, lr=lr, batch=batch)
    if distill and teacher is None:
        raise HapError(f"--distill {distill} needs --teacher, a checkpoint of the dense network")
    chosen = taught(chosen, teacher is not None, distill)
    guide = open_network(teacher, model, device)[0] if teacher is not None else None
    path = out or checkpoint.with_name(f"{checkpoint.stem}-finetuned.safetensors")
    check_saved_name(path, checkpoint, teacher)
    described = {**describe_network(spec, found), "finetuned_from": checkpoint.name}
    _make_way(path, chosen, described, anew)
    _train_and_save(network, found, chosen, path, described, saved.plans, guide, log)


def _chosen(name: str, **options: Any) -> Recipe:
    """The recipe of that name with the options that were given."""
    return recipes.get(name, **{key: value for key, value in options.items() if value is not None})


def _state(path: Path) -> Path:
    """Where an interrupted training waits."""
    return path.with_name(f"{path.stem}.training.safetensors")


def _make_way(path: Path, recipe: Recipe, described: dict[str, Any], anew: bool) -> None:
    """Refuse to replace a finished training by another one; the same one again, or going on, is fine."""
    if anew:
        _state(path).unlink(missing_ok=True)
        return
    if _state(path).exists() or not path.exists():
        return
    found = hap.read(path)
    wanted = {"finetuned_from": None, **described, **recipe.to_dict()}
    there = {**found.about, **(found.recipe or {})}
    if other := [name for name, value in wanted.items() if there.get(name) != value]:
        name = other[0]
        raise HapError(
            f"{path} is there already and is no result of this training ({name} is {there.get(name)}, not "
            f"{wanted[name]}); give another --out, or --fresh to replace it"
        )


def _train_and_save(
    network: nn.Module,
    data: Data,
    recipe: Recipe,
    path: Path,
    described: dict[str, Any],
    plans: Sequence[Plan],
    teacher: nn.Module | None,
    log: Path | None,
) -> None:
    state = _state(path)
    if state.exists():
        say(f"going on from {state}")
    with resumable(f"the same command goes on from the last finished epoch ({state} keeps it)"):
        history = hap.train(network, data, recipe, teacher=teacher, checkpoint=state, log_dir=log)
        metrics = {**metrics_of(network, data), "seconds": sum(history.seconds)}
        hap.save(path, network, plans, recipe=recipe, metrics=metrics, about=described)
        if distributed.is_first():
            state.unlink(missing_ok=True)
    say(
        f"accuracy {metrics['accuracy']:.2%} on {len(data.test)} test images, after {history.epochs} epochs "
        f"in {metrics['seconds']:.0f} s"
    )
    tell_written(path)

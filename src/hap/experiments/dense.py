"""Dense CIFAR-10 baselines, several side by side on one device, each with a result file and a checkpoint.

    python -m hap.experiments.dense --data data/cifar10 --out results/cifar10 --work runs/dense --seconds 540

The same command goes on where it stopped. What is finished is skipped.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hap
from hap.checkpoint import save
from hap.files import write_json
from hap.provenance import provenance
from hap.training import History, evaluate, train_many


def recipes(epochs: int) -> dict[str, hap.Recipe]:
    """`paper`: the public code's pretraining (step decay, weight decay 2e-4). `best`: cosine, weight decay 5e-4."""
    return {
        "paper": hap.recipes.get("paper-pretrain", epochs=epochs, precision="bf16", eval_every=20),
        "best": hap.recipes.get("best-pretrain", epochs=epochs, eval_every=20),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["resnet56"])
    parser.add_argument("--recipes", nargs="+", default=["paper", "best"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--revision", default=None)
    return parser.parse_args()


def main() -> None:
    options = parse()
    data = hap.data.load(options.data, device=options.device)
    jobs = [(m, r, s) for m in options.models for r in options.recipes for s in options.seeds]
    jobs = [job for job in jobs if not (options.out / f"{name_of(*job)}.json").exists()]
    models, chosen = [], []
    for model, recipe, seed in jobs:
        torch.manual_seed(seed)
        models.append(hap.models.build(model, classes=data.classes).to(options.device))
        chosen.append(hap.recipes.Recipe.from_dict(recipes(options.epochs)[recipe].to_dict() | {"seed": seed}))
    if not jobs:
        print("all done")
        return
    begun = time.monotonic()
    histories = train_many(models, data, chosen, checkpoint_dir=options.work, seconds=options.seconds, progress=False)
    for job, model, recipe, history in zip(jobs, models, chosen, histories, strict=True):
        print(name_of(*job), f"{history.epochs}/{recipe.epochs} epochs", history.final_accuracy, flush=True)
        if history.epochs == recipe.epochs:
            record(options, job, model, recipe, history, data, len(jobs))
    print(f"{time.monotonic() - begun:.0f} s, {sum(h.images_per_second[-1] for h in histories):.0f} images/s")


def name_of(model: str, recipe: str, seed: int) -> str:
    return f"{model}-dense-{recipe}-seed{seed}"


def record(options: argparse.Namespace, job: tuple[str, str, int], model: nn.Module, recipe: hap.Recipe,
           history: History, data: Any, together: int) -> None:  # fmt: skip
    """The result file and the checkpoint; the accuracy is of the last epoch, in fp32, and again as stored in fp16."""
    name = name_of(*job)
    accuracy = evaluate(model, data).accuracy
    half = {n: t.half() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    model.load_state_dict(half)
    count = hap.cost(model, data.train.images[:1].float())
    result = {
        "name": name, "kind": "dense", "model": job[0], "data": data.name, "seed": job[2], "recipe": recipe.to_dict(),
        "accuracy": accuracy, "accuracy_as_stored": evaluate(model, data).accuracy, "params": count.params,
        "macs": count.macs, "seconds": sum(history.seconds), "trained_side_by_side": together,
        "history": history.to_dict(),
    } | provenance(options.revision)  # fmt: skip
    about = {"model": job[0], "classes": data.classes, "data": data.name, "result": f"{name}.json"}
    save(options.work / f"{name}.safetensors", model.half(), metrics={"accuracy": accuracy}, about=about)
    write_json(options.out / f"{name}.json", result)


if __name__ == "__main__":
    main()

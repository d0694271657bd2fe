"""How to prune and train for protocol `best`: ways to leave 29% of ResNet56's FLOPs, trained for a short while.

    python benchmarks/best_choices.py pruning OUT.json --data data/cifar10 --compile --revision HASH     # on a GPU
    python benchmarks/best_choices.py training OTHER.json --data data/cifar10 --dense OUT.dense.safetensors  # on a GPU

Nothing here sees the test images: networks train on 40,000 of the training images and are judged by the other 10,000,
by accuracy and by cross-entropy, which tells smaller differences apart; how sure a network is of itself counts in that,
so that teachers and temperatures are to be judged by accuracy. The dense network, which is also the teacher, is trained
first, on the same 40,000: one that has seen the others would have what stays near to it look better than it is.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hap
from hap.data import Data, Split
from hap.data import load as load_data
from hap.errors import HapError
from hap.io.checkpoint import load, read, save
from hap.training import evaluate, recipes, train
from hap.training.recipes import Recipe
from hap.utils.atomic_files import write_json
from hap.workflow.config import PruneStep
from hap.workflow.networks import first_images, new_network
from hap.workflow.provenance import provenance
from hap_reproduction.cifar10.jobs import GATES, MANY_IMAGES
from hap_reproduction.cifar10.masking import dense_form, pruned_form
from hap_reproduction.cifar10.stacking import train_stacked
from hap_reproduction.cifar10.starting import ScoreCache, prune

STEP = PruneStep("as it is", flops=0.29, coupling="union", per_cost=True, compensate=True, implant=0.2)
RECIPE = recipes.get("best-finetune")
Choice = tuple[PruneStep, Recipe]


def pruning() -> list[Choice]:
    """Ways to prune, trained alike."""
    steps = [
        STEP,
        replace(STEP, name="no implants", implant=0.0),
        *(replace(STEP, name=f"implants for {share:.0%}", implant=share) for share in (0.4, 0.6, 0.8)),
        replace(STEP, name="coupled channels go together", coupling="joint"),
        replace(STEP, name="sensitivity alone", per_cost=False),
        replace(STEP, name="magnitude", criterion="magnitude"),
        replace(STEP, name="curvature of gates", criterion=GATES),
    ]
    return [(step, RECIPE) for step in steps]


def training() -> list[Choice]:
    """Ways to train what is pruned alike."""
    changes: dict[str, dict[str, float]] = {
        "as it is": {},
        "rate 0.1": {"lr": 0.1},
        "rate 0.2": {"lr": 0.2},
        "weight decay 2e-4": {"weight_decay": 2e-4},
        "weight decay 1e-3": {"weight_decay": 1e-3},
        "teacher 0.9": {"distill": 0.9},
        "teacher 0.9, weight decay 2e-4": {"distill": 0.9, "weight_decay": 2e-4},
        "temperature 2": {"temperature": 2.0},
    }
    return [(replace(STEP, name=name), replace(RECIPE, **change)) for name, change in changes.items()]  # type: ignore[arg-type]


CHOICES = {"pruning": pruning, "training": training}


def apart(data: Data, held: int) -> Data:
    """The training images alone: the last of them to judge by, the others to train on."""
    images, labels = data.train.images, data.train.labels
    return replace(data, train=Split(images[:-held], labels[:-held]), test=Split(images[-held:], labels[-held:]))


def train_dense(data: Data, path: Path, epochs: int) -> Path:
    """A dense network that has seen none of the images to judge by."""
    model = new_network("resnet56", data.classes, 0).to(data.train.images.device)
    recipe = replace(recipes.get("best-pretrain"), epochs=epochs, eval_every=epochs)
    train(model, data, recipe, progress=False)
    about = {
        "trained_on": len(data.train),
        "held": len(data.test),
        "recipe": recipe.to_dict(),
        "accuracy": evaluate(model.eval(), data).accuracy,
    }
    return save(path, model, about=about)


def compare(choices: list[Choice], dense: Path, data: Data, images: int, compiled: bool) -> list[dict[str, Any]]:
    """Prune the dense network in each way, train all side by side, and judge each."""
    device, example = data.train.images.device, first_images(data)
    teacher = load(dense, new_network("resnet56", data.classes)).to(device).eval()
    known: ScoreCache = {}
    plans, made = [], []
    for step, _ in choices:
        model = copy.deepcopy(teacher)
        plan = prune(model, step, data, 0, Path(), images, known).plan
        assert plan is not None
        plans.append(plan)
        made.append(dense_form(model, plan, teacher))
    histories = train_stacked(
        [whole for whole, _ in made],
        data,
        [recipe for _, recipe in choices],
        teachers=[teacher] * len(choices),
        masks=[masks for _, masks in made],
        stack=len(choices),
        compiled=compiled,
    )
    rows = []
    for (step, recipe), plan, (whole, _), history in zip(choices, plans, made, histories, strict=True):
        model = pruned_form(whole, plan, example)
        seen, cost = evaluate(model, data), hap.cost(model, example)
        rows.append(
            {
                "name": step.name,
                "accuracy": seen.accuracy,
                "loss": seen.loss,
                "params": cost.params,
                "macs": cost.macs,
                "implants": sum(map(len, plan.implanted.values())),
                "prune": asdict(step),
                "recipe": recipe.to_dict(),
                "training_loss": history.loss,
                "seconds": sum(history.seconds),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", choices=CHOICES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--dense", type=Path, help="a dense network of an earlier call; else one is trained beside OUT")
    parser.add_argument("--dense-epochs", type=int, default=200)
    parser.add_argument("--held", type=int, default=10_000, help="training images to judge by")
    parser.add_argument("--images", type=int, default=MANY_IMAGES, help="training images to score on")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--revision")
    args = parser.parse_args()
    data = apart(load_data(args.data, device=args.device), args.held)
    choices = [(step, replace(r, epochs=args.epochs, eval_every=args.epochs)) for step, r in CHOICES[args.of]()]
    dense = args.dense or train_dense(data, args.out.with_suffix(".dense.safetensors"), args.dense_epochs)
    about = read(dense).about
    if (about.get("trained_on"), about.get("held")) != (len(data.train), args.held):
        raise HapError(f"{dense} was trained on other images than the {len(data.train)} that are not held here")
    rows = compare(choices, dense, data, args.images, args.compile)
    found = {
        "kind": "hap-best-choices",
        "format": 2,
        "of": args.of,
        "dense": about,
        "scored_on": args.images,
        "trained_on": len(data.train),
        "judged_by": len(data.test),
        "rows": rows,
    }
    write_json(args.out, found | provenance(args.revision))
    for row in rows:
        print(f"{row['name']:32} {row['accuracy']:.4f} {row['loss']:.4f} {row['params']:8,} params")


if __name__ == "__main__":
    main()

"""How to prune for protocol `best`: ways to leave 29% of ResNet56's FLOPs, trained for a short while.

    python benchmarks/best_choices.py OUT.json --data data/cifar10 --compile --revision HASH    # 6 minutes on a GPU

Nothing here sees the test images: networks train on 40,000 of the training images and are judged by the other 10,000,
by accuracy and by cross-entropy, which tells smaller differences apart. The dense network, which is also the teacher,
was trained on all 50,000, so accuracies are higher than on the test images; only differences count.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hap
from hap import recipes
from hap.checkpoint import load
from hap.data import Data, Split
from hap.data import load as load_data
from hap.experiments.cifar10 import MANY_IMAGES
from hap.experiments.config import PruneStep
from hap.experiments.networks import example_of, fresh
from hap.experiments.starting import Known, prune
from hap.files import write_json
from hap.masking import dense_form, pruned_form
from hap.provenance import provenance
from hap.training import evaluate, train_many

AS_IT_IS = PruneStep("implant", flops=0.29, coupling="union", per_cost=True, compensate=True, implant=0.2)
CHOICES = (
    AS_IT_IS,
    replace(AS_IT_IS, name="no implants", implant=0.0),
    *(replace(AS_IT_IS, name=f"implants for {share:.0%}", implant=share) for share in (0.4, 0.6, 0.8)),
    replace(AS_IT_IS, name="coupled channels go together", coupling="joint"),
    replace(AS_IT_IS, name="sensitivity alone", per_cost=False),
    replace(AS_IT_IS, name="magnitude", criterion="magnitude"),
)


def apart(data: Data, held: int) -> Data:
    """The training images alone: the last of them to judge by, the others to train on."""
    images, labels = data.train.images, data.train.labels
    return replace(data, train=Split(images[:-held], labels[:-held]), test=Split(images[-held:], labels[-held:]))


def compare(dense: Path, data: Data, images: int, epochs: int, compiled: bool) -> list[dict[str, Any]]:
    """Prune the dense network in each way, train all side by side, and judge each."""
    device, example = data.train.images.device, example_of(data)
    teacher = load(dense, fresh("resnet56", data.classes)).to(device).eval()
    known: Known = {}
    plans, made = [], []
    for step in CHOICES:
        model = load(dense, fresh("resnet56", data.classes)).to(device).eval()
        plan = prune(model, step, data, 0, Path(), images, known).plan
        assert plan is not None
        plans.append(plan)
        made.append(dense_form(model, plan, teacher))
    count, recipe = len(CHOICES), recipes.get("best-finetune", epochs=epochs, eval_every=epochs)
    histories = train_many(
        [whole for whole, _ in made], data, [recipe] * count, teachers=[teacher] * count,
        masks=[masks for _, masks in made], progress=False, stack=count, compiled=compiled,
    )  # fmt: skip
    rows = []
    for step, plan, (whole, _), history in zip(CHOICES, plans, made, histories, strict=True):
        model = pruned_form(whole, plan, example)
        seen, cost = evaluate(model, data), hap.cost(model, example)
        rows.append({"prune": asdict(step), "accuracy": seen.accuracy, "loss": seen.loss, "params": cost.params,
                     "macs": cost.macs, "implants": sum(map(len, plan.implanted.values())),
                     "training_loss": history.loss, "seconds": sum(history.seconds)})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--dense", type=Path, default=Path("zoo/resnet56-dense-best-seed0.safetensors"))
    parser.add_argument("--held", type=int, default=10_000, help="training images to judge by")
    parser.add_argument("--images", type=int, default=MANY_IMAGES, help="training images to score on")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--revision")
    args = parser.parse_args()
    data = apart(load_data(args.data, device=args.device), args.held)
    rows = compare(args.dense, data, args.images, args.epochs, args.compile)
    found = {
        "kind": "hap-best-choices", "format": 1, "dense": args.dense.stem, "seed": 0, "scored_on": args.images,
        "trained_on": len(data.train), "judged_by": len(data.test), "rows": rows,
        "recipe": recipes.get("best-finetune", epochs=args.epochs, eval_every=args.epochs).to_dict(),
    }  # fmt: skip
    write_json(args.out, found | provenance(args.revision))
    for row in rows:
        print(f"{row['prune']['name']:32} {row['accuracy']:.4f} {row['loss']:.4f} {row['params']:8,} params")


if __name__ == "__main__":
    main()

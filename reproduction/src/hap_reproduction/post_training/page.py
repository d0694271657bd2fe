"""docs/without-training.md, from the records in results/post-training and from nothing else.

python -m hap_reproduction.post_training.page      # a test holds the page to the files
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hap.utils.atomic_files import write_text
from hap_reproduction.pages.markdown import table

RECORDS = "results/post-training"
IMAGENET = "imagenet-resnet50"
Record = dict[str, Any]

OPENING = f"""\
# Without training

What a pruned network is worth before anybody trains it. This page is written by
`python -m hap_reproduction.post_training.page` from the files in [{RECORDS}](../{RECORDS}), one for each
network and setting, with configuration, source revision, hardware and date.
[docs/library.md](library.md#without-training) says how to do the same with your network.

Drops are points of top-1 accuracy below the dense network, on test images that nothing was chosen by. Where several
networks were pruned, a cell has the mean, and behind it the drop of each."""

NAMES = {
    "none": "nothing",
    "norms": "BatchNorms estimated again",
    "compensate": "compensation",
    "refit": "refit",
    "distil": "refit and distillation",
}
CRITERIA = {"hessian": "equation 6", "bn-scale": "BN scale", "gate-curvature": "gate curvature"}


def read(folder: Path) -> list[Record]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [record for record in found if "setting" in record]


def page(root: Path) -> str:
    tested, chosen = read(root / RECORDS), read(root / RECORDS / "choosing")
    resnet50, resnet56 = ([r for r in tested if (r["network"] == IMAGENET) == wanted] for wanted in (True, False))
    parts = [OPENING]
    if resnet56:
        parts += ["## ResNet56 on CIFAR-10", _about_resnet56(resnet56), drops(resnet56)]
    if resnet50:
        parts += ["## ResNet50 on ImageNet images, beside Torch-Pruning", _about_resnet50(resnet50), drops(resnet50)]
    if small := [r for r in chosen if r["network"] != IMAGENET]:
        parts += ["## What settings were chosen by", _about_choosing(small), answers(small)]
    if large := [r for r in chosen if r["network"] == IMAGENET]:
        parts += ["On ImageNet images that were held out, one of each class:", drops(large)]
    return "\n\n".join(parts) + "\n"


def drops(records: Sequence[Record]) -> str:
    """A row for each way to prune and repair, a column for each share of the FLOPs."""
    budgets = sorted({r["setting"]["flops"] for r in records}, reverse=True)
    rows = [
        [label, *(_cell([r for r in some if r["setting"]["flops"] == budget]) for budget in budgets)]
        for label, some in _by_label(records)
    ]
    return table(["", *(f"{100 * b:.4g}% of the FLOPs" for b in budgets)], rows)


def _cell(records: Sequence[Record]) -> str:
    values = [100 * r["drop"] for r in sorted(records, key=lambda r: r["network"])]
    each = f" ({', '.join(f'{v:.2f}' for v in values)})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{each}" if values else ""


def answers(records: Sequence[Record]) -> str:
    """Right answers in per cent, and how many answers to mixtures of two images are those of the dense network."""
    budgets = sorted({r["setting"]["flops"] for r in records}, reverse=True)
    rows = []
    for label, some in _by_label(records):
        cells = []
        for budget in budgets:
            of_budget = [r for r in some if r["setting"]["flops"] == budget]
            for key in ("accuracy", "mixed_agreement"):
                cells.append(f"{100 * statistics.mean(r[key] for r in of_budget):.1f}" if of_budget else "")
        rows.append([label, *cells])
    heads = [part for b in budgets for part in (f"{100 * b:.4g}% of the FLOPs", "mixed")]
    return table(["", *heads], rows)


def _by_label(records: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """Records by the way in which they were made, the best first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(label(record["setting"]), []).append(record)
    return sorted(found.items(), key=lambda item: statistics.mean(r["drop"] for r in item[1]))


def label(setting: Record) -> str:
    criterion = CRITERIA.get(setting["criterion"], setting["criterion"])
    parts = ["Torch-Pruning" if setting.get("library") == "torch-pruning" else "", criterion]
    parts[-1] += " per cost" * setting["per_cost"]
    parts += [setting["coupling"] + " coupling", NAMES[setting["repair"]]]
    parts += [f"{setting['minutes']:g} minutes"] if setting.get("minutes") else []
    parts += ["without hints"] if not setting.get("hints", True) else []
    parts += [f"{setting['rounds']} rounds"] if setting.get("rounds", 1) > 1 else []
    parts += ["ReLU not looked at"] if not setting.get("rectified", 2) else []
    return ", ".join([*filter(None, parts), f"{setting['images']:,} images"])


def _about_resnet56(records: Sequence[Record]) -> str:
    dense = {r["network"]: r["dense"] for r in records}
    named = ", ".join(f"{name} {100 * value:.2f}%" for name, value in sorted(dense.items()))
    return (
        f"Dense networks: {named}; those named ours were trained by `hap reproduce`. Accuracy on "
        f"{records[0]['examples']:,} test images. The images that networks are pruned and repaired on are training "
        "images, without their labels but for criteria that need a loss."
    )


def _about_resnet50(records: Sequence[Record]) -> str:
    return (
        f"Keras' first weights, {100 * records[0]['dense']:.2f}% on {records[0]['examples']:,} test images "
        "(`python -m hap_reproduction.post_training.imagenet`). Images are five of each class of the validation set of "
        "ImageNet, from `ndb796/Small-ImageNet-Validation-Dataset-1000-Classes`. Of each class, in the order of names, "
        "1 and 2 calibrate (labels are read by Taylor scores alone), 3 was held out to choose by, and 4 and 5 are test "
        "images. Torch-Pruning "
        "starts from the same weights, and its BatchNorms are estimated again on the same images. Rows differ in what "
        "is removed and in the repair: they do not say how much is due to which. What has no figure has not run."
    )


def _about_choosing(records: Sequence[Record]) -> str:
    names, least = ", ".join(sorted({r["network"] for r in records})), 100 * min(r["dense"] for r in records)
    return (
        f"{records[0]['examples']:,} training images were held out of everything else. Networks know these (right "
        f"answers of {names}: at least {least:.2f}%). So *mixed* counts equal answers to mixtures of two such images, "
        "of which no network is certain."
    )


def main() -> None:
    root = Path.cwd()
    write_text(root / "docs" / "without-training.md", page(root))


if __name__ == "__main__":
    main()

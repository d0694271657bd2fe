"""The experiment of `hap demo`: a small residual network on handwritten digits, cut to 30% of its parameters."""

from __future__ import annotations

from hap.workflow.config import DenseStep, Experiment, FinetuneStep, PruneStep

OUT = "runs/demo"
LEFT = 0.3


def demo_experiment(out: str = OUT, seed: int = 0, quick: bool = False) -> Experiment:
    """Three ways to prune, each fine-tuned with three seeds. `quick` does one epoch of each, once."""
    short = {"epochs": 1} if quick else {}
    return Experiment(
        model="digits_resnet",
        data="digits",
        out=out,
        dense=DenseStep("digits", short),
        finetune=FinetuneStep("digits-finetune", short),
        prune=(
            PruneStep("HAP", params=LEFT),
            PruneStep("HAP + Implant", params=LEFT, implant=0.2),
            PruneStep("Magnitude", criterion="magnitude", params=LEFT),
        ),
        seeds=(seed,) if quick else (seed, seed + 1, seed + 2),
        calibration=128 if quick else 512,
        probes=8 if quick else 200,
        threads=1,  # so small a network gains little from more, and with one its figures do not depend on how many
    )

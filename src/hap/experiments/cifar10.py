"""The paper's CIFAR-10 experiments as jobs. The most telling come first.

Protocol `paper`: the paper's fine-tuning (160 epochs, batch 64, step decay), union coupling, one pass of pruning, no
other help. Mixed precision (bf16) is the one liberty taken with it.
"""

from __future__ import annotations

from hap import recipes
from hap.experiments.campaign import Job
from hap.experiments.config import PruneStep
from hap.recipes import Recipe

# Percent left as the paper reports them: (FLOPs, params or None, accuracy).
HAP_ROWS = (
    (38.74, 41.53, 93.38),
    (22.86, 22.05, 92.06),
    (33.99, 35.50, 93.23),
    (28.85, 31.08, 92.81),
    (21.0, None, 91.57),
)
IMPLANT_ROWS = (
    (40.7, None, 93.55),
    (23.9, None, 92.92),
    (37.15, 34.49, 93.52),
    (33.2, 29.87, 93.40),
    (24.9, 21.92, 92.92),
)
CONTROLS = {
    "magnitude": (93.29, 91.65, 92.99, 92.45),
    "random": (93.12, 90.18, 92.21, 90.95),
    "reversed-hessian": (89.77, 88.18, 89.97, 88.83),
}
"""Accuracies of the control rows that stand beside the first four of HAP, at about the same FLOPs."""
LOW_RANK = {37.15: 90.79, 33.2: 90.34, 24.9: 89.83}
HEADLINES = (38.74, 22.86, 40.7, 23.9)
"""Rows that are repeated with three seeds."""


def dense_recipe(kind: str, seed: int) -> Recipe:
    if kind == "paper":
        return recipes.get("paper-pretrain", precision="bf16", eval_every=20, seed=seed)
    return recipes.get("best-pretrain", epochs=200, eval_every=20, seed=seed)


def finetune_recipe(seed: int) -> Recipe:
    return recipes.get("paper-finetune", precision="bf16", eval_every=20, seed=seed)


def dense_name(model: str, kind: str, seed: int) -> str:
    return f"{model}-dense-{kind}-seed{seed}"


def dense_jobs(model: str) -> list[Job]:
    return [
        Job(dense_name(model, kind, seed), model, dense_recipe(kind, seed), ("dense",))
        for kind in ("paper", "best")
        for seed in range(3)
    ]


def _pruned(step: PruneStep, seed: int, params: float | None, accuracy: float, targets: tuple[str, ...]) -> Job:
    assert step.flops is not None
    paper = {"accuracy": accuracy, "flops": step.flops * 100} | ({"params": params} if params else {})
    return Job(
        f"resnet56-paper-{step.slug}-seed{seed}", "resnet56", finetune_recipe(seed), targets,
        dense=dense_name("resnet56", "paper", seed), prune=step,
        most_params=params / 100 if params else None, paper=paper,
    )  # fmt: skip


def _step(name: str, flops: float, **options: object) -> PruneStep:
    return PruneStep(f"{name}-{flops}", flops=flops / 100, coupling="union", **options)  # type: ignore[arg-type]


def resnet56_jobs(seed: int) -> list[Job]:
    """The rows of both ResNet56 tables and of both ablations for one seed; seeds 1 and 2 run the headlines alone."""
    jobs = []
    for flops, params, accuracy in HAP_ROWS:
        jobs.append(_pruned(_step("hap", flops), seed, params, accuracy, ("resnet56", "ablation")))
    for flops, params, accuracy in IMPLANT_ROWS:
        step = _step("implant", flops, implant=0.2, implant_init="zero")
        jobs.append(_pruned(step, seed, params, accuracy, ("resnet56", "implants")))
    if seed == 0:
        for criterion, accuracies in CONTROLS.items():
            for (flops, _, _), accuracy in zip(HAP_ROWS, accuracies, strict=False):
                jobs.append(_pruned(_step(criterion, flops, criterion=criterion), seed, None, accuracy, ("ablation",)))
        for flops, accuracy in LOW_RANK.items():
            step = _step("low-rank", flops, implant=1.0, implant_kind="LowRank", implant_init="zero")
            jobs.append(_pruned(step, seed, None, accuracy, ("implants",)))
    return jobs if seed == 0 else [job for job in jobs if _is_headline(job)]


def jobs() -> list[Job]:
    """All jobs, most telling first."""
    rows = [resnet56_jobs(seed) for seed in range(3)]
    headlines = [job for seed in rows for job in seed if "resnet56" in job.targets and _is_headline(job)]
    return [*dense_jobs("resnet56"), *headlines, *(job for job in rows[0] if job not in headlines)]


def _is_headline(job: Job) -> bool:
    return job.prune is not None and job.prune.flops is not None and round(job.prune.flops * 100, 2) in HEADLINES

"""The paper's CIFAR-10 experiments as jobs. The most telling come first.

Protocol `paper`: the paper's fine-tuning (160 epochs, batch 64, step decay), union coupling, one pass of pruning, no
other help. Mixed precision (bf16) is the one liberty taken with it. Implants start at the centre of the kernel that
they replace: started at zero, as in the public code, most never move (`from_zero`). Where it is faster, networks train
in a shape that they share with what went held at zero, which takes the same steps (`hap.masking`, `hap.trimming`).
Protocol `best`: distillation from the dense network, cosine, running average of the weights, least-squares implants,
compensation, score per multiply-add saved, on many images.
Protocol `short`: the fine-tuning of `paper` with 40 epochs, for the curves of accuracy against size.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import hap
from hap.data import Data
from hap.errors import HapError
from hap.training import recipes
from hap.training.recipes import Recipe
from hap.workflow.config import PruneStep
from hap_reproduction.cifar10.job import Job
from hap_reproduction.cifar10.starting import IMAGES, BorrowedStep, EigenStep, Step

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
VGG_ROWS = ((29.7, 10.1, 93.66), (20.3, 5.1, 93.37), (7.5, 1.6, 91.22))
PRERESNET_ROW = (31.0, 94.3)
"""Percent of the parameters left, accuracy."""
CONTROLS = {
    "magnitude": ((39.29, 61.82, 93.29), (22.93, 38.25, 91.65), (34.97, 56.15, 92.99), (28.97, 47.28, 92.45)),
    "random": ((46.68, 45.60, 93.12), (25.69, 25.33, 90.18), (33.99, 36.01, 92.21), (31.32, 29.64, 90.95)),
    "reversed-hessian": ((46.98, 47.48, 89.77), (28.04, 23.34, 88.18), (39.99, 42.85, 89.97), (30.61, 27.15, 88.83)),
}
"""The paper's control rows beside the first four of HAP. Ours run at the FLOPs of HAP's rows."""
LOW_RANK = {37.15: (40.33, 39.56, 90.79), 33.2: (37.24, 34.39, 90.34), 24.9: (25.16, 23.05, 89.83)}
"""Low rank beside HAP+Implant, by the FLOPs of the latter, at which ours run."""
HEADLINES = (38.74, 22.86, 40.7, 23.9)
"""Rows that are repeated with three seeds."""
DENSE = {"resnet56": 93.88, "vgg16_bn": 93.88, "preresnet29": 94.4, "wide_resnet32": None}
"""The paper's dense accuracies, where it gives them."""
BEST = {
    "resnet56": (("flops", 53.0, 94.22, "CORING"), ("flops", 29.0, 93.81, "NORTON")),
    "vgg16_bn": (("flops", 40.0, 94.45, "NORTON"), ("flops", 23.0, 94.11, "NORTON")),
    "preresnet29": (("params", 31.0, 94.3, "HAP"),),
}
"""Protocol `best`: what the budget is in, percent left, and the highest published accuracy there with its method."""
HEAD_TO_HEAD = (50.0, 30.0)
BORROWED = {
    "torch-pruning-magnitude": "magnitude",
    "torch-pruning-taylor": "taylor",
    "torch-pruning-bn-scale": "bn-scale",
}
CURVES = {"preresnet29": (50.0, 31.0, 20.0, 12.0), "wide_resnet32": (50.0, 30.0, 18.0, 10.0)}
"""Percent of the parameters left; BN scale and EigenDamage run the first three."""
LONG = ("resnet56", 29.0, 360)
"""Network, per cent of the FLOPs left, epochs: where protocol `best` stays below what is published, once more for
longer."""
FIRST_STEP = 53.0
"""Per cent of the FLOPs that the first of two steps leaves, where that is tried in place of more epochs."""
MANY_IMAGES = 10_000
"""To score on where the paper's 512 are too few: a trained network is sure of nearly all of them, so a few dozen decide
(`sensitivity-images`)."""
GATES = "gate-curvature"
"""A criterion that the paper does not have; `sensitivity-removal` holds it against what the loss does."""
PER_COST = f"hap-per-cost-{MANY_IMAGES}-images"
SHORT_NAMES = {"vgg16_bn": "vgg16", "wide_resnet32": "wideresnet32"}


def short_name(model: str) -> str:
    """A network's name in the names of jobs and files."""
    return SHORT_NAMES.get(model, model)


# ---- recipes ------------------------------------------------------------------------------------------------


def dense_recipe(kind: str, seed: int) -> Recipe:
    if kind == "paper":
        return recipes.get("paper-pretrain", precision="bf16", eval_every=20, seed=seed)
    return recipes.get("best-pretrain", epochs=200, eval_every=20, seed=seed)


def finetune_recipe(seed: int, protocol: str = "paper") -> Recipe:
    if protocol == "best":
        return recipes.get("best-finetune", epochs=160, eval_every=20, seed=seed)
    epochs = {"epochs": 40} if protocol == "short" else {}
    return recipes.get("paper-finetune", precision="bf16", eval_every=4, seed=seed, **epochs)


# ---- jobs ---------------------------------------------------------------------------------------------------


def dense_name(model: str, kind: str, seed: int) -> str:
    return f"{short_name(model)}-dense-{kind}-seed{seed}"


def dense_jobs(model: str, kinds: tuple[str, ...] = ("paper", "best"), seeds: tuple[int, ...] = (0, 1, 2)) -> list[Job]:
    accuracy = DENSE[model]
    paper = {"accuracy": accuracy} if accuracy is not None else None
    return [
        Job(
            dense_name(model, kind, seed),
            model,
            dense_recipe(kind, seed),
            ("dense", f"dense-{short_name(model)}"),
            paper=paper if kind == "paper" else None,
        )
        for kind in kinds
        for seed in seeds
    ]


def _job(
    model: str,
    protocol: str,
    step: Step,
    seed: int,
    targets: tuple[str, ...],
    paper: dict[str, float] | None = None,
    images: int = IMAGES,
) -> Job:
    slug = step.slug if isinstance(step, PruneStep) else step.name
    best = protocol == "best"
    return Job(
        f"{short_name(model)}-{protocol}-{slug}-seed{seed}",
        model,
        finetune_recipe(seed, protocol),
        targets,
        dense=dense_name(model, "best" if best else "paper", seed),
        prune=step,
        paper=paper,
        teacher=best,
        images=images,
    )


def _step(name: str, percent: float, kind: str = "flops", coupling: str = "union", **options: object) -> PruneStep:
    return PruneStep(f"{name}-{percent}", coupling=coupling, **{kind: percent / 100}, **options)  # type: ignore[arg-type]


def _row(
    model: str,
    step: PruneStep,
    seed: int,
    paper: tuple[float, float | None, float],
    targets: tuple[str, ...],
    images: int = IMAGES,
) -> Job:
    """A row of the paper (FLOPs, params, accuracy): at no more FLOPs, and where it gives them no more parameters."""
    params = paper[1]
    return _job(model, "paper", replace(step, params=params and params / 100), seed, targets, _figures(*paper), images)


def _figures(flops: float, params: float | None, accuracy: float) -> dict[str, float]:
    return {"accuracy": accuracy, "flops": flops} | ({"params": params} if params else {})


def _implanted(
    percent: float, kind: str = "flops", name: str = "implant-centre", init: str = "center", **options: object
) -> PruneStep:
    return _step(name, percent, kind, implant=0.2, implant_init=init, **options)  # type: ignore[arg-type]


def resnet56_jobs(seed: int) -> list[Job]:
    """The rows of both ResNet56 tables and of both ablations for one seed; seeds 1 and 2 run the headlines alone."""
    jobs = [_row("resnet56", _step("hap", row[0]), seed, row, ("resnet56", "ablation")) for row in HAP_ROWS]
    jobs += [_row("resnet56", _implanted(row[0]), seed, row, ("resnet56", "implants")) for row in IMPLANT_ROWS]
    return [*jobs, *_controls()] if seed == 0 else [job for job in jobs if _is_headline(job)]


def rankings(seed: int) -> list[Job]:
    """The rows of HAP ranked by sensitivity per parameter and multiply-add saved, found on many images: of the rankings
    below the one that came nearest to the paper. Seeds 1 and 2 run the headlines alone."""
    cheap: dict[str, Any] = {"per_cost": True}
    jobs = [_ranked(_step(PER_COST, row[0], **cheap), seed, row, MANY_IMAGES) for row in HAP_ROWS]
    jobs += [
        _ranked(
            _implanted(row[0], name=f"implant-centre-per-cost-{MANY_IMAGES}-images", **cheap), seed, row, MANY_IMAGES
        )
        for row in IMPLANT_ROWS
    ]
    return jobs if seed == 0 else [job for job in jobs if _is_headline(job)]


def other_rankings() -> list[Job]:
    """The headlines, one seed, ranked in ways that tell what makes the difference: per cost on the paper's number of
    images (`per-cost`), by sensitivity alone on many, by Hutchinson's estimate from three probes, which is what the
    public code takes unless told otherwise, by the curvature of gates, and by magnitude, given what helped HAP."""
    jobs = []
    for row in (row for row in HAP_ROWS if row[0] in HEADLINES):
        jobs += [
            _ranked(_step("hap-per-cost", row[0], per_cost=True), 0, row),
            _ranked(_step(f"hap-{MANY_IMAGES}-images", row[0]), 0, row, MANY_IMAGES),
            _ranked(_step("hap-3-probes", row[0], probes=3), 0, row),
            _ranked(
                _step(f"gates-per-cost-{MANY_IMAGES}-images", row[0], per_cost=True, criterion=GATES),
                0,
                row,
                MANY_IMAGES,
            ),
        ]
        control = _step("magnitude-per-cost", row[0], per_cost=True, criterion="magnitude")
        jobs.append(replace(_row("resnet56", control, 0, row, ("ablation", "rankings")), paper=None))
    for row in (row for row in IMPLANT_ROWS if row[0] in HEADLINES):
        jobs.append(_ranked(_implanted(row[0], name="implant-centre-per-cost", per_cost=True), 0, row))
    return jobs


def _ranked(step: PruneStep, seed: int, row: tuple[float, float | None, float], images: int = IMAGES) -> Job:
    return _row("resnet56", step, seed, row, ("resnet56", "rankings"), images)


def _controls() -> list[Job]:
    """Other rankings at the FLOPs of HAP's rows, and low rank at those of HAP+Implant's. Magnitude is ||w||^2 / p, as
    the paper words it; the headlines also run with the L1 norm, which is not divided by the size of a channel."""
    jobs = []
    for criterion, rows in CONTROLS.items():
        for (flops, _, _), paper in zip(HAP_ROWS, rows, strict=False):
            step = _step(criterion, flops, criterion=criterion)
            jobs.append(_job("resnet56", "paper", step, 0, ("ablation",), _figures(*paper)))
    for flops in (row[0] for row in HAP_ROWS if row[0] in HEADLINES):
        jobs.append(_job("resnet56", "paper", _step("l1", flops, criterion="l1"), 0, ("ablation",)))
    for flops, paper in LOW_RANK.items():
        step = _step("low-rank", flops, implant=1.0, implant_kind="LowRank", implant_init="center")
        jobs.append(_job("resnet56", "paper", step, 0, ("implants",), _figures(*paper)))
    return jobs


def _is_headline(job: Job) -> bool:
    return isinstance(job.prune, PruneStep) and round((job.prune.flops or 0) * 100, 2) in HEADLINES


def from_zero() -> list[Job]:
    """HAP+Implant with implants that start at zero, two seeds. Where the BatchNorm behind an implant has a negative
    bias and a ReLU follows, nothing comes through at the start, so no gradient comes back: such implants stay zero.
    `benchmarks/implants_from_zero.py` counts them."""
    rows = [row for row in IMPLANT_ROWS if row[0] in HEADLINES]
    return [
        _row("resnet56", _implanted(row[0], name="implant", init="zero"), seed, row, ("implants",))
        for seed in range(2)
        for row in rows
    ]


def without_implants() -> list[Job]:
    """HAP at the headline FLOPs of HAP+Implant, so that the two meet at equal FLOPs over three seeds."""
    points = [flops for flops, _, _ in IMPLANT_ROWS if flops in HEADLINES]
    return [_job("resnet56", "paper", _step("hap", f), s, ("implants",)) for s in range(3) for f in points]


def head_to_head() -> list[Job]:
    """HAP beside Torch-Pruning from the same dense network; HAP also with its couplings, `joint`, which it has too."""
    jobs = []
    for flops in HEAD_TO_HEAD:
        steps: list[Step] = [_step("hap", flops), _implanted(flops), _step("hap-joint", flops, coupling="joint")]
        steps += [BorrowedStep(f"{name}-{flops}", flops / 100, criterion) for name, criterion in BORROWED.items()]
        jobs += [_job("resnet56", "paper", step, 0, ("head-to-head",)) for step in steps]
    return jobs


def vgg16_jobs() -> list[Job]:
    """Ranked per cost on many images, three seeds; by sensitivity alone on the paper's number of images, one seed."""
    jobs = [
        _row("vgg16_bn", _step(PER_COST, row[0], per_cost=True), seed, row, ("vgg16",), MANY_IMAGES)
        for seed in range(3)
        for row in VGG_ROWS
    ]
    return jobs + [_row("vgg16_bn", _step("hap", row[0]), 0, row, ("vgg16",)) for row in VGG_ROWS]


def preresnet29_jobs() -> list[Job]:
    """As for VGG16."""
    params, accuracy = PRERESNET_ROW
    paper = {"accuracy": accuracy, "params": params}
    step, plain = _step(PER_COST, params, "params", per_cost=True), _step("hap", params, "params")
    jobs = [_job("preresnet29", "paper", step, seed, ("preresnet29",), paper, MANY_IMAGES) for seed in range(3)]
    return [*jobs, _job("preresnet29", "paper", plain, 0, ("preresnet29",), paper)]


def best_jobs(model: str) -> list[Job]:
    """HAP+Implant with all help, three seeds; for ResNet56 also HAP alone, magnitude, and implants ranked by the
    curvature of gates, given the same, one seed."""
    targets = ("best", f"best-{short_name(model)}")
    methods: dict[str, dict[str, object]] = {"implant": {"implant": 0.2}}
    if model == "resnet56":
        methods |= {"hap": {}, "magnitude": {"criterion": "magnitude"}, "gates": {"implant": 0.2, "criterion": GATES}}
    jobs = []
    for method, options in methods.items():
        for seed in range(3 if method == "implant" else 1):
            for kind, percent, _, _ in BEST[model]:
                step = _step(method, percent, kind, per_cost=True, compensate=True, **options)  # type: ignore[arg-type]
                jobs.append(_job(model, "best", step, seed, targets, images=MANY_IMAGES))
    behind = [job for job in jobs if model == LONG[0] and job.name.startswith(_best_name(*LONG[:2]))]
    return jobs + [_longer(job) for job in behind] + [_in_steps(job) for job in behind]


def _best_name(model: str, percent: float) -> str:
    return f"{short_name(model)}-best-implant-{percent}-"


def _longer(job: Job) -> Job:
    """A job with more epochs."""
    epochs = LONG[2]
    return replace(_variant(job, f"{epochs}-epochs"), recipe=replace(job.recipe, epochs=epochs))


def _in_steps(job: Job) -> Job:
    """A job that starts from what a first step of pruning left and its fine-tuning made of it."""
    return replace(_variant(job, "in-steps"), start=job.name.replace(f"-{LONG[1]}-", f"-{FIRST_STEP}-"))


def _variant(job: Job, how: str) -> Job:
    """A job of protocol `best` under another name."""
    assert isinstance(job.prune, PruneStep)
    step = replace(job.prune, name=job.prune.name.replace("implant-", f"implant-{how}-"))
    return replace(job, name=job.name.replace("-implant-", f"-implant-{how}-"), prune=step)


def curve_jobs(model: str) -> list[Job]:
    """Accuracy against size, one seed. Slimming needs a BatchNorm behind every unit, which the branches of a
    pre-activation network do not have: there its units are coupled (`joint`). EigenDamage comes last: its networks
    have shapes of their own, so they cannot train as one with the others."""
    joint = "joint" if model == "preresnet29" else "union"
    jobs = []
    for i, percent in enumerate(CURVES[model]):
        steps: list[Step] = [
            _step("hap", percent, "params"),
            _implanted(percent, "params"),
            _step("magnitude", percent, "params", criterion="magnitude"),
        ]
        if i < 3:
            steps.append(_step("bn-scale", percent, "params", joint, criterion="bn-scale"))
            steps.append(EigenStep(f"eigendamage-{percent}", percent / 100))
        jobs += [_job(model, "short", step, 0, ("curves", f"curves-{short_name(model)}")) for step in steps]
    return sorted(jobs, key=lambda job: isinstance(job.prune, EigenStep))


def _turn(job: Job) -> tuple[bool, bool]:
    """When a headline of ResNet56 runs: what came nearest to the paper before all, then the first seed."""
    assert isinstance(job.prune, PruneStep)
    return not (job.prune.per_cost and job.images > IMAGES), job.recipe.seed > 0


def jobs() -> list[Job]:
    """All jobs, most telling first. Dense networks come as late as what starts from them allows."""
    rows = [[*rankings(seed), *resnet56_jobs(seed)] for seed in range(3)]
    rows[0] += other_rankings()
    headlines = [job for seed in rows for job in seed if "resnet56" in job.targets and _is_headline(job)]
    return [
        *dense_jobs("resnet56"),
        *sorted(headlines, key=_turn),
        *from_zero(),
        *dense_jobs("vgg16_bn", ("paper",)),
        *dense_jobs("preresnet29", ("paper",)),
        *vgg16_jobs(),
        *preresnet29_jobs(),
        *best_jobs("resnet56"),
        *(job for job in rows[0] if job not in headlines),
        *without_implants(),
        *head_to_head(),
        *dense_jobs("vgg16_bn", ("best",)),
        *dense_jobs("preresnet29", ("best",)),
        *best_jobs("vgg16_bn"),
        *best_jobs("preresnet29"),
        *curve_jobs("preresnet29"),
        *dense_jobs("wide_resnet32", ("paper",), (0,)),
        *curve_jobs("wide_resnet32"),
        *dense_jobs("wide_resnet32", ("paper",), (1, 2)),
        *dense_jobs("wide_resnet32", ("best",), (0,)),
    ]


def headline_networks() -> dict[str, str]:
    """Names of networks to hand out and the jobs that made them. Seed 0 always, so that none is the best of several."""
    chosen = {
        "resnet56-cifar10-dense": dense_name("resnet56", "paper", 0),
        "resnet56-cifar10-dense-best": dense_name("resnet56", "best", 0),
    }
    for job in jobs():
        step = job.prune
        if job.recipe.seed or not isinstance(step, PruneStep) or step.probes or step.implant_init == "zero":
            continue
        if not job.teacher and (job.images != IMAGES) == (job.model == "resnet56"):
            continue
        percent = int(round(100 * (step.flops or step.params or 0), 2))
        method = ("hap-implant" if step.implant else "hap") + ("-per-cost" if step.per_cost else "")
        row = {"resnet56", "vgg16", "preresnet29"} & set(job.targets)
        if row and (job.model != "resnet56" or _is_headline(job)):
            chosen[f"{short_name(job.model)}-cifar10-{method}-{percent}"] = job.name
        elif "best" in job.targets and step.implant:
            chosen.setdefault(f"{short_name(job.model)}-cifar10-best-{percent}", job.name)
    return chosen


# ---- data ---------------------------------------------------------------------------------------------------

WHOLE = (50_000, 10_000, (3, 32, 32), 10)
"""CIFAR-10: training images, test images, the shape of one, classes."""


def load_data(folder: str | Path, device: torch.device | None = None, whole: bool = True) -> Data:
    """CIFAR-10 from a folder. Figures on less than all of it say nothing about the paper's: `whole=False` takes it
    nevertheless."""
    data = hap.data.load("cifar10", root=folder, device=device)
    found = (len(data.train), len(data.test), tuple(data.train.images.shape[1:]), data.classes)
    if whole and found != WHOLE:
        raise HapError(
            f"{folder} holds {_in_words(*found)}; expected {_in_words(*WHOLE)}, which is all of CIFAR-10: "
            "unpack the whole archive"
        )
    return data


def _in_words(train: int, test: int, shape: tuple[int, ...], classes: int) -> str:
    size = " x ".join(map(str, shape))
    return f"{train:,} training and {test:,} test images of {size} in {classes} classes"

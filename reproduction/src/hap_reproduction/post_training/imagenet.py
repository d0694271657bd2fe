"""ResNet50 with ImageNet weights, pruned and not trained, beside Torch-Pruning: top-1 on 2,000 images of two a class.

`python -m hap_reproduction.post_training.imagenet --data FOLDER --weights FILE` runs what has no record yet, in the
folder `results/post-training`. `imagenet_images.py` says which images calibrate, which are held out, and which are test
images. With `--choose` the accuracy is that of the images held out: criterion and coupling were chosen by these, and
the test images are looked at with `CHOSEN` alone.

The weights are Keras' first ResNet50, so that strides, epsilon and inputs are not torchvision's (`dense_network`).
"""

import copy
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file
from torch import Tensor, nn

import hap
from hap.data import Batch
from hap.refit import estimate_norms_
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.files import read_record
from hap_reproduction.post_training.imagenet_images import Images, load
from hap_reproduction.post_training.torch_pruning import CRITERIA, cut_to, gradients

BUDGETS = (0.55, 0.66, 0.4, 0.33)
SCORED = 512
"""So many of the calibration images are looked at by criteria that need data, ours and theirs."""
AT_ONCE = 20
"""So many images are evaluated at once."""
OURS, THEIRS = "hap", "torch-pruning"


@dataclass(frozen=True)
class Setting:
    """How the network is pruned and repaired, and by which library."""

    flops: float
    library: str = OURS
    criterion: str = "magnitude"
    per_cost: bool = True
    coupling: str = "joint"
    repair: str = "refit"
    images: int = 512

    @property
    def slug(self) -> str:
        cost = "-per-cost" if self.per_cost else ""
        how = f"{self.criterion}{cost}-{self.coupling}-{self.repair}"
        return f"{self.library}-{how}-{self.images}-{100 * self.flops:.1f}"


CHOSEN: dict[str, Any] = {"criterion": "reconstruction", "coupling": "joint"}
"""Ours: the best of those in `results/post-training/choosing`, by the images held out."""


def settings(choose: bool) -> Iterator[Setting]:
    """What is measured, the most telling first."""
    if choose:
        for flops in BUDGETS[::2]:
            for coupling in ("joint", "union"):
                for criterion in ("magnitude", "reconstruction"):
                    yield Setting(flops, criterion=criterion, coupling=coupling, images=256)
        return
    first, *others = ([Setting(f, **CHOSEN), *_peers(f)] for f in BUDGETS)
    yield from first
    for many in (slice(0, 2), slice(2, None)):  # ours and magnitude at all budgets, then what is left
        yield from itertools.chain.from_iterable(some[many] for some in others)


def _peers(flops: float) -> list[Setting]:
    return [Setting(flops, THEIRS, criterion, per_cost=False, repair="norms") for criterion in CRITERIA]


# ---- the dense network ---------------------------------------------------------------------------------------


def dense_network(weights: Path) -> nn.Module:
    """ResNet50 as its weights expect it: stride 2 in the first 1x1 convolution of a stage, epsilon 1e-3."""
    model = hap.models.build("resnet50", classes=1000, stride_in_1x1=True, bn_eps=1e-3)
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    if unexpected or any(not name.endswith("num_batches_tracked") for name in missing):
        raise hap.HapError(f"{weights} is not a ResNet50: it lacks {missing[:3]} and has {unexpected[:3]}")
    return model.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]


@dataclass
class Reference:
    """The dense network, the images that accuracies are counted on, and the gradient that Taylor scores read."""

    model: nn.Module
    images: Images
    part: str
    dense: dict[str, float]
    slope: dict[str, Tensor] = field(default_factory=dict)

    def gradient(self, batches: list[Batch]) -> dict[str, Tensor]:
        self.slope = self.slope or gradients(self.model, batches)
        return self.slope


def evaluated(model: nn.Module, images: Images, part: str) -> dict[str, float]:
    """The shares of right answers, as the only one and among five, of the network as it is exported to ONNX.

    On one core onnxruntime is twice as fast as torch. Its answers are those of torch but for rounding.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        example = images.batch(images.rows(part)[:2])[0].contiguous()
        path = hap.export(Path(folder) / "network.onnx", model, example)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name, found = session.get_inputs()[0].name, []
    for rows in images.batches(part, AT_ONCE):
        x, labels = images.batch(rows)
        logits = torch.from_numpy(session.run(None, {name: x.contiguous().numpy()})[0])
        ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        found.append(torch.stack([ranked[:, 0], ranked.any(1)], 1))
    right = torch.cat(found).double()
    return {"accuracy": float(right[:, 0].mean()), "top5": float(right[:, 1].mean()), "examples": len(right)}


# ---- one setting ---------------------------------------------------------------------------------------------


def measure(reference: Reference, setting: Setting) -> dict[str, Any]:
    """Prune the network, repair it, and count right answers."""
    _forget_peak()
    batches = reference.images.calibration(setting.images)
    model, more = (_ours if setting.library == OURS else _theirs)(reference, batches, setting)
    peak = _peak()
    example = batches[0][0][:1]
    before, after = hap.cost(reference.model, example), hap.cost(model, example)
    found = _timed(more["seconds"], "evaluate", lambda: evaluated(model, reference.images, reference.part))
    return {
        "kind": "hap-post-training",
        "format": 1,
        "network": "imagenet-resnet50",
        "setting": asdict(setting),
        "part": reference.part,
        "dense": reference.dense["accuracy"],
        "dense_top5": reference.dense["top5"],
        **found,
        "drop": reference.dense["accuracy"] - found["accuracy"],
        "flops_left": after.macs / before.macs,
        "params_left": after.params / before.params,
        "peak_memory": peak,
        "clock": "processor",
        **more,
        **provenance(),
    }


def _ours(reference: Reference, batches: list[Batch], setting: Setting) -> tuple[nn.Module, dict[str, Any]]:
    model = copy.deepcopy(reference.model)
    seconds: dict[str, float] = {}
    how: dict[str, Any] = {"criterion": setting.criterion, "per_cost": setting.per_cost, "coupling": setting.coupling}
    plan = _timed(
        seconds,
        "prune",
        lambda: hap.prune_(model, batches[0][0][:2], _scored(batches), F.cross_entropy, flops=setting.flops, **how),
    )
    if setting.repair != "refit":
        _timed(seconds, "repair", lambda: estimate_norms_(model, batches))
        return model, {"seconds": seconds}
    report = _timed(seconds, "repair", lambda: hap.refit_(model, reference.model, batches, plan, progress=False))
    return model, {"seconds": seconds, "output_error": {"before": report.before, "after": report.after}}


def _theirs(reference: Reference, batches: list[Batch], setting: Setting) -> tuple[nn.Module, dict[str, Any]]:
    """The seconds of its pruning are those of all cuts of the bisection."""
    seconds: dict[str, float] = {}
    slope: dict[str, Tensor] = {}
    if setting.criterion == "taylor":
        slope = _timed(seconds, "gradient", lambda: reference.gradient(_scored(batches)))
    given = reference.model, batches[0][0][:1], slope, setting.criterion, setting.flops
    model = _timed(seconds, "prune", lambda: cut_to(*given))
    _timed(seconds, "repair", lambda: estimate_norms_(model, batches))
    return model, {"seconds": seconds, "version": version("torch-pruning")}


def _scored(batches: list[Batch]) -> list[Batch]:
    return batches[: max(1, SCORED // len(batches[0][1]))]


def _timed(seconds: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    """Notes the processor's seconds, of one thread: others may use the machine as well."""
    begun = time.process_time()
    done = work()
    seconds[name] = time.process_time() - begun
    return done


def _forget_peak() -> None:
    """Let the peak of this process's memory begin anew, where the system can."""
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        forget.write_text("5")


def _peak() -> int | None:
    """The most memory that this process has had since, in bytes; None where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


# ---- all of them ---------------------------------------------------------------------------------------------


def reference_of(weights: Path, images: Images, part: str, path: Path) -> Reference:
    """The dense network with its accuracies, which are counted once and kept at `path`."""
    model = dense_network(weights)
    if not path.exists():
        found = {"kind": "hap-post-training-dense", "format": 1, "network": "imagenet-resnet50", "part": part}
        write_json(path, found | evaluated(model, images, part) | provenance())
    dense = read_record(path, ["accuracy", "top5"], "remove it to measure again")
    print(f"dense, {part}: {100 * dense['accuracy']:.2f}, {100 * dense['top5']:.2f} among five", flush=True)
    return Reference(model, images, part, dense)


def main(
    data: Annotated[Path, typer.Option(help="The folder of images.")] = Path("data/imagenet-small"),
    weights: Annotated[Path, typer.Option(help="The weights, safetensors.")] = Path("data/resnet50-keras.safetensors"),
    out: Annotated[Path, typer.Option(help="The folder of records.")] = Path("results/post-training"),
    choose: Annotated[bool, typer.Option(help="Measure on the images held out, to choose by.")] = False,
    match: Annotated[str, typer.Option(help="Settings whose name has this in it.")] = "",
) -> None:
    """Prune, repair and evaluate whatever has no record yet."""
    folder, part = (out / "choosing", "held out") if choose else (out, "test")
    found = [(folder / f"imagenet-resnet50-{setting.slug}.json", setting) for setting in settings(choose)]
    missing = [(path, setting) for path, setting in found if match in setting.slug and not path.exists()]
    reference = reference_of(weights, load(data), part, folder / "imagenet-resnet50-dense.json")
    for path, setting in missing:
        record = measure(reference, setting)
        write_json(path, record)
        print(f"{path.stem}: {100 * record['dense']:.2f} -> {100 * record['accuracy']:.2f}", flush=True)


if __name__ == "__main__":
    typer.run(main)

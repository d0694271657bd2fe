"""Sensitivity scores: exact, sampled and Hutchinson's against the procedure of the paper's public code, in one run.

    python benchmarks/scores.py OUT.json --data data/cifar10 --checkpoint dense.safetensors

The public procedure is written down here from its description: gradients once with a graph, then for every probe one
Hessian-vector product, and one dot product per channel on the CPU. Few probes are timed, and the time of 300
is scaled from them. curvlinops and PyHessian, where installed, give one number for the whole network and no scores:
what is timed is one probe. What is known is written after every part; --parts chooses some of them.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.cifar10.removal import rank_correlation

Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Bench:
    """The device, and what is known so far: a run that is cut short leaves its first parts."""

    out: Path
    device: str
    result: dict[str, Any] = field(default_factory=dict)

    def note(self, **values: Any) -> None:
        self.result.update(values)
        write_json(self.out, self.result)
        for key, value in values.items():
            print(f"{key}: {value}", flush=True)

    def wait(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(
        self, work: Callable[[], Any], repeats: int = 1, warm: bool = True
    ) -> tuple[Any, list[float], int | None]:
        """The result, the seconds of each repeat after one warm-up, and the peak of allocated bytes (None on a CPU)."""
        if warm:
            work()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            begun = self.wait()
            result = work()
            times.append(self.wait() - begun)
        return result, times, torch.cuda.max_memory_allocated() if self.device == "cuda" else None


@dataclass
class Subject:
    """A network in eval mode with its groups and calibration images."""

    model: nn.Module
    groups: Any
    batches: Batches

    def score(self, **how: Any) -> hap.Scores:
        return hap.score(self.model, self.groups, self.batches, F.cross_entropy, hap.HessianTrace(**how))

    def public_style(self, probes: int) -> list[Tensor]:
        """Channel traces of every convolution: vectors and products go to the CPU, then a dot product per channel."""
        weights = [m.weight for m in self.model.modules() if isinstance(m, nn.Conv2d)]
        x, y = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        gradients = torch.autograd.grad(F.cross_entropy(self.model(x), y), weights, create_graph=True)
        dots: list[list[list[float]]] = [[[] for _ in w] for w in weights]
        for _ in range(probes):
            vectors = [torch.randint_like(w, 0, 2) * 2 - 1 for w in weights]
            products = torch.autograd.grad(gradients, weights, vectors, retain_graph=True)
            pairs = zip(dots, *([t.cpu() for t in part] for part in (vectors, products)), strict=True)
            for found, v, p in pairs:
                for channel in range(len(v)):
                    found[channel].append(p[channel].flatten().dot(v[channel].flatten()).item())
        return [torch.tensor(found).mean(1) for found in dots]

    def training_step(self) -> Callable[[], None]:
        """A plain step of SGD with momentum on all images at once, on a copy."""
        model = copy.deepcopy(self.model).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        x, y = (torch.cat(parts) for parts in zip(*self.batches, strict=True))

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step


def subject(
    name: str,
    device: str,
    images: int,
    classes: int | None = None,
    data: str | None = None,
    checkpoint: str | None = None,
) -> Subject:
    """A network on its data, or without data on noise, its running statistics then those of the noise."""
    torch.manual_seed(0)
    model = hap.models.build(name) if classes is None else hap.models.build(name, classes)
    if checkpoint:
        hap.load(checkpoint, model)
    model = model.to(device).eval()
    if data is not None:
        batches = hap.data.load(data, device=device).calibration(images, size=images)
    else:
        shape = hap.models.info(name).input_shape
        x = torch.randn(images, *shape, device=device)
        with torch.no_grad():
            model.train()(x[:32])
            outputs = model.eval()(x[:1]).shape[1]
        batches = [(x, torch.randint(0, outputs, (images,), device=device))]
    return Subject(model, hap.trace(model, batches[0][0][:1], coupling="union"), batches)


def flat(scores: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(scores.values()))


# ---- parts --------------------------------------------------------------------------------------------------


def exact(bench: Bench, main: Subject, options: argparse.Namespace) -> None:
    """Exact scores beside a training step and beside the public procedure."""
    _, times, peak = bench.timed(lambda: main.score(method="exact"), 5)
    _, steps, step_peak = bench.timed(main.training_step(), 5)
    bench.note(exact_seconds=times, exact_peak_bytes=peak, training_step_seconds=steps)
    if peak and step_peak:
        bench.note(training_step_peak_bytes=step_peak, exact_peak_to_training_step=peak / step_peak)
    _, (taken,), _ = bench.timed(lambda: main.public_style(options.public_probes))
    public = taken / options.public_probes * 300
    bench.note(public_seconds_per_probe=public / 300, public_seconds_300=public)
    bench.note(exact_faster_than_public=public / median(times))


def hutchinson(bench: Bench, main: Subject, options: argparse.Namespace) -> None:
    """300 probes, scaled from fewer, one at a time and as many at a time as memory allows."""
    for chunk in (1, None):
        how = {"method": "hutchinson", "probes": options.probes, "chunk": chunk}
        _, (taken,), peak = bench.timed(lambda how=how: main.score(**how))
        seconds, name = taken / options.probes * 300, f"hutchinson_chunk_{chunk or 'found'}"
        bench.note(**{f"{name}_seconds_300": seconds, f"{name}_peak_bytes": peak})
        if public := bench.result.get("public_seconds_300"):
            bench.note(**{f"{name}_faster_than_public": public / seconds})


def long_run(bench: Bench, main: Subject, options: argparse.Namespace) -> None:
    """Exact scores against Hutchinson's limit: 300 Hessian products plainly and with deflation, then a long run.

    A run's own noise is known from its standard errors; how far from the exact scores it should be with such noise and
    no other difference is found by adding it to these.
    """
    wanted, generator = main.score(method="exact"), torch.Generator().manual_seed(0)
    runs: list[dict[str, Any]] = []
    for products, deflate in ((300, 0), (300, options.deflate), (options.long_probes, options.deflate)):
        how = {"probes": products - 2 * deflate, "deflate": deflate, "seed": 1}
        scores, (taken,), peak = bench.timed(lambda how=how: main.score(method="hutchinson", **how), warm=False)
        noise = flat(scores.errors) * torch.randn(len(flat(wanted)), generator=generator, dtype=torch.float64)
        runs.append(
            {
                "products": products,
                "deflate": deflate,
                "seconds": taken,
                "peak_bytes": peak,
                "spearman_to_exact": rank_correlation(wanted, scores),
                "spearman_that_its_noise_explains": rank_correlation(wanted, {"": flat(wanted) + noise}),
            }
        )
        bench.note(long_runs=runs)


def others(bench: Bench, main: Subject, options: argparse.Namespace) -> None:
    """One probe of the whole network's trace by libraries from PyPI."""
    x, y = (torch.cat(parts) for parts in zip(*main.batches, strict=True))
    model = copy.deepcopy(main.model)
    weights = [p for p in model.parameters() if p.ndim == 4]
    try:
        from curvlinops import HessianLinearOperator
    except ImportError as error:
        bench.note(curvlinops=f"not installed ({error})")
    else:
        operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), weights, [(x, y)], check_deterministic=False)
        vectors = [torch.randint_like(w, 0, 2) * 2 - 1 for w in weights]
        _, times, peak = bench.timed(lambda: operator @ vectors, 3)
        bench.note(curvlinops_seconds_per_probe=median(times), curvlinops_peak_bytes=peak)
    try:
        from pyhessian import hessian
    except ImportError as error:
        bench.note(pyhessian=f"not installed ({error})")
    else:
        found = hessian(model, nn.CrossEntropyLoss(), data=(x, y), cuda=bench.device == "cuda")
        count = min(options.public_probes, 5)
        _, times, peak = bench.timed(lambda: found.trace(maxIter=count, tol=0.0))
        bench.note(pyhessian_seconds_per_probe=times[0] / count, pyhessian_peak_bytes=peak)


def growth(bench: Bench, main: Subject, options: argparse.Namespace) -> None:
    """Seconds and peak bytes of exact scores, or sampled ones beyond 20 classes, as one thing grows at a time."""
    small = options.small

    def curve(name: str, made: dict[int, Callable[[], Subject]]) -> None:
        points = []
        for size, make in made.items():
            chosen = make()
            scores, times, peak = bench.timed(lambda s=chosen: s.score(), 3)
            points.append({"size": size, "seconds": median(times), "peak_bytes": peak} | scores.about)
            bench.note(**{f"growth_{name}": points})

    images, device = (4 if small else 256), bench.device
    counts = (2, 4) if small else (64, 128, 256, 512, 1024)
    curve("images", {n: lambda n=n: subject("resnet20", device, n) for n in counts})
    depths = {"resnet20": 20} if small else {"resnet20": 20, "resnet32": 32, "resnet56": 56, "resnet110": 110}
    known = {n: d for n, d in depths.items() if n in hap.models.names()}
    curve("depth", {d: lambda n=n: subject(n, device, images) for n, d in known.items()})
    classes = (10, 30) if small else (5, 10, 20, 50, 200, 1000)
    curve("classes", {c: lambda c=c: subject("resnet20", device, images, c) for c in classes})
    widths = (4, 8) if small else (16, 32, 64, 128)
    curve("channels", {w: lambda w=w: plain(w, device, images) for w in widths})


def plain(width: int, device: str, images: int) -> Subject:
    """Six convolutions of one width on 32 x 32 noise."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [nn.Conv2d(width if index else 3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).to(device)
    x = torch.randn(images, 3, 32, 32, device=device)
    with torch.no_grad():
        model(x[:32])
    batches = [(x, torch.randint(0, 10, (images,), device=device))]
    return Subject(model.eval(), hap.trace(model, x[:1]), batches)


def many_classes(bench: Bench, main: Subject, options: argparse.Namespace) -> None:
    """ResNet50 with 1000 classes at its size of image, untrained, on noise: sampled scores against a long run."""
    name, images = ("resnet20", 4) if options.small else ("resnet50", 256)
    chosen = subject(name, bench.device, images, 1000)
    scores, times, peak = bench.timed(lambda: chosen.score(method="sampled"), 3)
    bench.note(
        sampled_model=name,
        sampled_images=images,
        sampled_seconds=times,
        sampled_peak_bytes=peak,
        sampled_draws=scores.about["draws"],
    )
    _, _, step_peak = bench.timed(chosen.training_step())
    bench.note(sampled_training_step_peak_bytes=step_peak)
    draws = 32 if options.small else 64
    bench.note(
        sampled_long_draws=draws,
        spearman_sampled_long=rank_correlation(scores, chosen.score(method="sampled", draws=draws, seed=1)),
    )


PARTS = {p.__name__: p for p in (exact, hutchinson, many_classes, others, growth, long_run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", default=None, help="default: noise")
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--public-probes", type=int, default=10)
    parser.add_argument("--probes", type=int, default=50, help="of Hutchinson's, timed and scaled to 300")
    parser.add_argument("--long-probes", type=int, default=3000)
    parser.add_argument("--deflate", type=int, default=32, help="directions, in a long run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--small", action="store_true", help="sizes for a look on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--revision", default=None)
    options = parser.parse_args()
    bench = Bench(options.out, options.device)
    chosen = subject(options.model, options.device, options.images, None, options.data, options.checkpoint)
    bench.result = {
        "model": options.model,
        "images": options.images,
        "data": options.data or "noise",
        "units": chosen.groups.units,
    } | provenance(options.revision)
    for name in options.parts:
        begun = time.perf_counter()
        PARTS[name](bench, chosen, options)
        bench.note(**{f"part_seconds_{name}": time.perf_counter() - begun})


if __name__ == "__main__":
    main()

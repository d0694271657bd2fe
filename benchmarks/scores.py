"""Sensitivity scores: exact and Hutchinson against the procedure of the paper's public code, in one run.

    python benchmarks/scores.py OUT.json --data data/cifar10 --checkpoint dense.safetensors

The public procedure is written down here from its description: gradients once with a graph, then for every probe one
Hessian-vector product and one dot product per channel, read back to the host. Few probes are timed, and the time of 300
is scaled from them. What is known is written after every part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.files import write_json
from hap.provenance import provenance


def timed(work: Callable[[], Any], device: str, repeats: int) -> tuple[Any, list[float]]:
    """The result and the seconds of each repeat, after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        result = work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return result, times


def public_style(model: nn.Module, batches: list[Any], probes: int) -> list[Tensor]:
    """Channel traces of every convolution, the slow way: a dot product per channel, each read back."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), weights, create_graph=True)
    totals = [torch.zeros(len(w)) for w in weights]
    for _ in range(probes):
        vectors = [torch.randint_like(w, 0, 2) * 2 - 1 for w in weights]
        products = torch.autograd.grad(gradients, weights, vectors, retain_graph=True)
        for total, v, p in zip(totals, vectors, products, strict=True):
            for channel in range(len(v)):
                total[channel] += (v[channel] * p[channel]).sum().cpu() / probes
    return totals


def spearman(a: Tensor, b: Tensor) -> float:
    ranks = [t.argsort().argsort().double() for t in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--public-probes", type=int, default=10)
    parser.add_argument("--probes", type=int, default=50, help="of Hutchinson's, timed and scaled to 300")
    parser.add_argument("--long-probes", type=int, default=3000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 5, 25])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--revision", default=None)
    options = parser.parse_args()
    device = options.device
    data = hap.data.load(options.data, device=device)
    model = hap.models.build(options.model)
    if options.checkpoint:
        hap.load(options.checkpoint, model)
    model = model.to(device).eval()
    batches = data.calibration(options.images, size=options.images)
    groups = hap.trace(model, batches[0][0][:1], coupling="union")

    def score(**how: Any) -> hap.Scores:
        return hap.score(model, groups, batches, F.cross_entropy, hap.HessianTrace(**how))

    result: dict[str, Any] = {"model": options.model, "images": options.images, "units": groups.units} | provenance(
        options.revision
    )

    def note(**values: Any) -> None:
        """Print and keep what is known so far: a run that is cut short leaves its first parts."""
        result.update(values)
        write_json(options.out, result)
        for key, value in values.items():
            print(f"{key}: {value}", flush=True)

    exact, exact_times = timed(lambda: score(method="exact"), device, 5)
    median = sorted(exact_times)[len(exact_times) // 2]
    note(exact_seconds=exact_times, exact_peak_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else None)
    _, public_times = timed(lambda: public_style(model, batches, options.public_probes), device, 1)
    public = public_times[0] / options.public_probes * 300
    note(public_seconds_per_probe=public / 300, public_seconds_300=public, exact_faster_than_public=public / median)
    for chunk in options.chunks:
        _, times = timed(lambda c=chunk: score(method="hutchinson", probes=options.probes, chunk=c), device, 1)
        seconds = times[0] / options.probes * 300
        note(
            **{
                f"hutchinson_seconds_300_chunk_{chunk}": seconds,
                f"hutchinson_faster_than_public_chunk_{chunk}": public / seconds,
            }
        )
    long = score(method="hutchinson", probes=options.long_probes, chunk=options.chunks[-1], seed=1)
    flat = {n: torch.cat(list(s.values())) for n, s in (("exact", exact), ("long", long))}
    gaps = (flat["long"] - flat["exact"]) / torch.cat(list(long.errors.values()))
    note(
        long_probes=options.long_probes, spearman_exact_long=spearman(flat["exact"], flat["long"]),
        share_within_3_standard_errors=float((gaps.abs() <= 3).double().mean()),
    )  # fmt: skip


if __name__ == "__main__":
    main()

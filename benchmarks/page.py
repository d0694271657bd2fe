"""docs/speed.md from the files in results/benchmarks, and from nothing else.

python benchmarks/page.py               # a test holds the page to the files
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from hap.utils.atomic_files import write_atomic
from hap_reproduction.pages.markdown import table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "benchmarks"
Record = dict[str, Any]


def source(name: str, record: Record) -> str:
    """The file, and on what it was measured."""
    where = record["hardware"]["gpu"] or f"{record['hardware']['cpu']}, {record['hardware']['threads']} threads"
    return f"[{name}](../results/benchmarks/{name}.json): {where}, torch {record['hardware']['torch']}."


def training(name: str, record: Record) -> str:
    rows = record["rows"]
    plain = next(row["images_per_second"] for row in rows if row.get("loop") == "plain loop, fp32")
    lines = []
    for row in rows:
        if "images_per_second" not in row:
            continue
        what = row.get("loop") or f"{row['networks']} networks, {row['form']}{', compiled' * row['compiled']}"
        rate = row["images_per_second"]
        lines.append([f"{what}, batch {row['batch']}", f"{rate:,.0f}", f"{rate / plain:.1f}"])
    return f"""## Training

`python benchmarks/train_throughput.py OUT.json --compile --loops --batch 64` on {record["model"]}. Small networks leave
a GPU waiting for kernels. The step is recorded as a CUDA graph; several networks are recorded side by side; and
networks of one shape run as one, with grouped convolutions (`stacked`, eight in a stack). A pruned network keeps that
shape while it trains, with what went held at zero (`masked`). {source(name, record)}

{table(["", "images a second, all networks", "times a plain loop"], lines)}"""


def scores(name: str, record: Record) -> str:
    step, public = record["training_step_peak_bytes"], record["public_seconds_300"]

    def line(what: str, seconds: float, peak: int | None) -> list[str]:
        return [what, f"{seconds:.2f}", f"{public / seconds:.1f}", f"{peak / step:.1f}" if peak else ""]

    lines = [
        line("exact", median(record["exact_seconds"]), record["exact_peak_bytes"]),
        line("the public procedure, 300 probes", public, None),
        *(
            line(
                f"300 probes, {how}",
                record[f"hutchinson_chunk_{key}_seconds_300"],
                record[f"hutchinson_chunk_{key}_peak_bytes"],
            )
            for key, how in (("1", "one at a time"), ("found", "as many at a time as fit"))
        ),
        *(
            line(
                f"300 products of the whole Hessian by {peer}",
                300 * record[f"{peer.lower()}_seconds_per_probe"],
                record[f"{peer.lower()}_peak_bytes"],
            )
            for peer in ("curvlinops", "PyHessian")
            if f"{peer.lower()}_seconds_per_probe" in record
        ),
    ]
    runs = [
        [
            str(r["products"]),
            str(r["deflate"]),
            f"{r['spearman_to_exact']:.4f}",
            f"{r['spearman_that_its_noise_explains']:.4f}",
            f"{r['seconds']:.1f}",
        ]
        for r in record["long_runs"]
    ]
    return f"""## Scores

`python benchmarks/scores.py OUT.json --data data/cifar10` on {record["model"]}, {record["images"]} images. The public
procedure takes one Hessian product a probe and a dot product per channel on the CPU; it and other lines of 300 are
scaled from fewer. curvlinops and PyHessian give no scores, only products or one trace. Memory is against a training
step on as many images. {source(name, record)}

{table(["", "seconds", "times faster than the public procedure", "times the memory of a training step"], lines)}

Hutchinson's estimate goes to the exact scores, and `HessianTrace(deflate=32)` gets there sooner: it takes the
directions that the Hessian stretches most out of the noise. Rank correlation with the exact scores, beside the one that
the estimate's own standard errors explain:

{table(["Hessian products", "directions", "rank correlation", "explained by its noise", "seconds"], runs)}"""


def growth(name: str, record: Record) -> str:
    curves = []
    for key, unit in (
        ("images", "images, ResNet20"),
        ("depth", "layers, 256 images"),
        ("classes", "classes, ResNet20"),
        ("channels", "channels, six convolutions"),
    ):
        points = record[f"growth_{key}"]
        curves.append([unit, ", ".join(f"{p['size']}: {1000 * p['seconds']:.0f}" for p in points)])
    memory = record["sampled_peak_bytes"] / record["sampled_training_step_peak_bytes"]
    return f"""## Scores of larger problems

Sampled scores of {record["sampled_model"]} with 1000 classes on {record["sampled_images"]} images of 224 pixels, from
{record["sampled_draws"]} draws: {median(record["sampled_seconds"]):.2f} s with {memory:.2f} times the memory of a
training step; rank correlation {record["spearman_sampled_long"]:.4f} with {record["sampled_long_draws"]} draws.
Milliseconds as one thing grows at a time (exact, and sampled beyond 20 classes): {source(name, record)}

{table(["", "milliseconds"], curves)}"""


def latency(name: str, record: Record) -> str:
    lines, gpu = [], record["hardware"]["gpu"]
    for run in record["runs"]:
        for row in run["rows"]:
            if "speed" in row:
                threads = "" if gpu else f", {run['threads']} thread{'s' * (run['threads'] > 1)}"
                what = row["network"] + threads
                lines.append([what, f"{100 * row['flops_left']:.1f}", f"{row['speed']:.2f}", f"{row['time_left']:.3f}"])
    budget = record["budget"]
    return f"""## Latency of {record["model"]} on {"a GPU" if gpu else "a CPU"}

`python benchmarks/latency.py OUT.json`: {record["backend"]}, batch {record["batch"]}\
{", bfloat16, channels_last" if gpu else ""}, pruned to {100 * record["flops"]:g}% of the FLOPs with widths held to
multiples, timed in turns with the dense network. Units are chosen by {record["criterion"]} scores: this is about time,
not about accuracy. {source(name, record)}

{table(["", "FLOPs left %", "times faster", "time left"], lines)}

A budget of {budget["latency"]:g} of the dense network's time: {budget["ratio_anew"]:.3f} when timed anew."""


def surgery(name: str, record: Record) -> str:
    lines = []
    for network, found in record["networks"].items():
        ours = [sum(run[step] for step in ("trace", "plan", "apply")) for run in found["seconds"]["hap"]]
        line = [network, f"{median(ours):.1f}"]
        keys = ("times_faster_than_torch_pruning", "times_torch_export")
        lines.append([*line, *(f"{found[key]:.1f}" if key in found else "" for key in keys)])
    head = ["", "seconds", "times faster than Torch-Pruning", "times torch.export alone"]
    return f"""## Trace, plan and apply

`python benchmarks/surgery.py OUT.json`, without the check that runs the result. {source(name, record)}

{table(head, lines)}"""


PAGE: dict[str, Callable[[str, Record], str]] = {
    "train-throughput-h200": training,
    "scores-h200": scores,
    "scores-growth-h200": growth,
    "latency-h200": latency,
    "latency-cpu-2": latency,
    "surgery-cpu": surgery,
}


def page(results: Path = RESULTS) -> str:
    opening = """# Speed

This page is written by `python benchmarks/page.py` from the files in [results/benchmarks](../results/benchmarks), each
with its settings, every repeat, source revision, hardware and date. Ratios are of one run."""
    read = {name: json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in PAGE}
    return "\n\n".join([opening, *(make(name, read[name]) for name, make in PAGE.items())]) + "\n"


if __name__ == "__main__":
    write_atomic(ROOT / "docs" / "speed.md", lambda path: path.write_text(page(), encoding="utf-8"))

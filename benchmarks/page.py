"""docs/speed.md from the files in results/benchmarks, and from nothing else.

python benchmarks/page.py               # a test holds the page to the files
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from hap.files import write_atomic
from hap.report.results import table

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
    lines = [
        [f"exact, {record['model']}, {record['images']} images", f"{median(record['exact_seconds']):.2f}",
         f"{record['exact_peak_to_training_step']:.2f}"],
        ["300 probes, one at a time (scaled from fewer)", f"{record['hutchinson_chunk_1_seconds_300']:.1f}",
         f"{record['hutchinson_chunk_1_peak_bytes'] / record['training_step_peak_bytes']:.1f}"],
        ["300 probes, as many at a time as fit", f"{record['hutchinson_chunk_found_seconds_300']:.1f}",
         f"{record['hutchinson_chunk_found_peak_bytes'] / record['training_step_peak_bytes']:.1f}"],
        [f"sampled, {record['sampled_model']}, 1000 classes, {record['sampled_images']} images",
         f"{median(record['sampled_seconds']):.2f}",
         f"{record['sampled_peak_bytes'] / record['sampled_training_step_peak_bytes']:.2f}"],
    ]  # fmt: skip
    return f"""## Scores

`python benchmarks/scores.py OUT.json --data data/cifar10`. Peak memory is against a training step on as many images.
{source(name, record)}

{table(["", "seconds", "times the memory of a training step"], lines)}"""


def latency(name: str, record: Record) -> str:
    lines = []
    for run in record["runs"]:
        for row in run["rows"]:
            if "speed" in row:
                what = f"{row['network']}, {run['threads']} thread{'s' * (run['threads'] > 1)}"
                lines.append([what, f"{100 * row['flops_left']:.1f}", f"{row['speed']:.2f}", f"{row['time_left']:.3f}"])
    return f"""## Latency of {record["model"]} in {record["backend"]}, batch {record["batch"]}

`python benchmarks/latency.py OUT.json`: pruned to {100 * record["flops"]:g}% of the FLOPs with widths held to
multiples, timed in turns with the dense network. {source(name, record)}

{table(["", "FLOPs left %", "times faster", "time left"], lines)}"""


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

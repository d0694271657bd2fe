"""Real speed: a dense network against pruned ones, timed in turns, and a budget of measured time.

    python benchmarks/latency.py OUT.json
    python benchmarks/latency.py OUT.json --device cuda

On a CPU the networks run in onnxruntime with a batch of 1, on one thread and on two. On CUDA they are compiled, in
bfloat16 and channels_last, with a batch of 64. Weights are random: time does not depend on them, and units are drawn at
random, so that all layers get narrower; or ranked per cost with a limit on activations too, so that units at large
sizes of image go first. Widths are held to multiples of several numbers, to see what the hardware likes. Then a network
is planned for half of the dense one's time, and timed anew. What is known is written after every part, each round's
time included.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hap
from hap.pruning.latency import Latency
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance


def subject(name: str, device: str, batch: int) -> tuple[nn.Module, Tensor]:
    """A network with random weights and its input, in the layout and type that the device is fastest with."""
    torch.manual_seed(0)
    model = hap.models.build(name).eval()
    example = torch.randn(batch, *hap.models.info(name).input_shape)
    return laid_out(model, device), laid_out(example, device)


def laid_out(x: Any, device: str) -> Any:
    return x.to("cuda", torch.bfloat16, memory_format=torch.channels_last) if device == "cuda" else x


def pruned(model: nn.Module, plan: hap.Plan, device: str) -> nn.Module:
    return laid_out(hap.apply_(copy.deepcopy(model), plan, verify=False), device)


def described(names: list[str], found: list[Latency], plans: list[hap.Plan]) -> list[dict[str, Any]]:
    """A row for each pruned network: its time against that of the dense one, which comes first."""
    dense = found[0]
    rows = [{"network": "dense", "median_ms": dense.median, "spread_ms": dense.spread, "times_ms": dense.times}]
    for name, latency, plan in zip(names, found[1:], plans, strict=True):
        rows.append(
            {
                "network": name,
                "flops_left": plan.after.macs / plan.before.macs,
                "activations_left": plan.after.activations / plan.before.activations,
                "speed": dense.ratio_to(latency),
                "time_left": latency.ratio_to(dense),
                "median_ms": latency.median,
                "spread_ms": latency.spread,
                "times_ms": latency.times,
            }
        )
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(title)
    for row in rows:
        speed = f"{row['flops_left']:.4f} of the FLOPs  {row['speed']:.2f}x" if "speed" in row else ""
        print(f"  {row['network']:24} {row['median_ms']:9.2f} ms  {speed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--criterion", default="random")
    parser.add_argument("--flops", type=float, default=0.5)
    parser.add_argument("--activations", type=float, nargs="+", default=[0.5])
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--round-to", type=int, default=1, help="in the budget of time; default: found by timing")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a CPU")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--revision", default=None)
    options = parser.parse_args()
    device = options.device
    backend, batch = ("compile", 64) if device == "cuda" else ("onnxruntime", 1)
    model, example = subject(options.model, device, batch)
    groups = hap.trace(model, example[:1])
    scores = hap.score(model, groups, None, None, options.criterion)
    result: dict[str, Any] = {
        "model": options.model,
        "criterion": options.criterion,
        "coupling": "joint",
        "backend": backend,
        "batch": batch,
        "flops": options.flops,
        "rounds": options.rounds,
        "runs": [],
    } | provenance(options.revision)
    ways = [(n, a) for n in options.multiples for a in (None, *options.activations)]
    budgets = [hap.Budget(flops=options.flops, activations=a) for _, a in ways]
    plans = [
        hap.plan(groups, scores, b, limits=hap.Limits(round_to=n), per_cost=b.activations is not None)
        for (n, _), b in zip(ways, budgets, strict=True)
    ]
    names = [f"multiples of {n}" + (f", {a:g} of the activations" if a else "") for n, a in ways]
    models = [model, *(pruned(model, plan, device) for plan in plans)]
    for threads in options.threads if device == "cpu" else options.threads[:1]:
        found = hap.compare_latency(models, example, options.rounds, 5, backend=backend, threads=threads)
        rows = described(names, found, plans)
        show(f"{options.model}, {backend}, batch {batch}, {threads} threads on {device}", rows)
        result["runs"].append({"threads": threads, "rows": rows})
        write_json(options.out, result)
    timed = hap.plan_for_latency(
        model,
        groups,
        scores,
        example,
        hap.Budget(latency=options.latency),
        backend=backend,
        threads=options.threads[0],
        per_cost=True,
        limits=hap.Limits(round_to=options.round_to),
    )
    again = hap.compare_latency(
        [model, pruned(model, timed.plan, device)],
        example,
        options.rounds,
        5,
        backend=backend,
        threads=options.threads[0],
    )
    rows = described([f"multiples of {timed.round_to}"], again, [timed.plan])
    show(
        f"planned for {options.latency} of the time: {timed.ratio:.4f} while planning, "
        f"{rows[1]['time_left']:.4f} timed anew",
        rows,
    )
    trials = [{"flops": t.flops, "round_to": t.round_to, "ratio": t.ratio} for t in timed.trials]
    result["budget"] = {
        "latency": options.latency,
        "planned_ratio": timed.ratio,
        "ratio_anew": rows[1]["time_left"],
        "off_by": rows[1]["time_left"] / options.latency - 1,
        "threads": timed.threads,
        "trials": trials,
        "rows": rows,
    }
    write_json(options.out, result)


if __name__ == "__main__":
    main()

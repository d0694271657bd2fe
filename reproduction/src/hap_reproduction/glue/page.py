"""The results of `hap glue` as a page of tables like the paper's, made from the result files alone."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hap.errors import HapError
from hap.workflow.results import read_records
from hap_reproduction.glue import head_costs, head_latency
from hap_reproduction.glue.job import FORMAT, KIND

Record = dict[str, Any]

PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "mrpc": {"gradient": (92.06, 92.19, 89.52, 89.36, 89.07), "hessian": (92.06, 91.97, 90.74, 90.43, 89.89)},
    "qnli": {"gradient": (93.12, 92.4, 91.78, 91.71, 91.38), "hessian": (93.12, 93.3, 92.93, 92.59, 92.27)},
}
"""The paper's figures for RoBERTa-base with 100, 80, 60, 50 and 40% of the heads."""

CLAIMED = (0.6, 0.5, 0.4)
"""The shares of the heads for which the paper has the Hessian ahead."""
NETWORKS = ("dense", "pruned")
FIELDS = ("metrics", "metrics_before_tuning")
NAMES = {
    "hessian": "Hessian trace (HAP)",
    "hessian-deflated": "Hessian trace, less noise",
    "narrow": "Hessian trace, narrow heads, same FLOPs",
    "gauss-newton": "Gauss-Newton trace",
    "gradient": "gradient, per layer (Michel)",
    "gradient-raw": "gradient, not per layer",
    "magnitude": "magnitude",
    "random": "random",
}


def render(folder: str | Path) -> str:
    """The page, in Markdown."""
    found = read_records(folder)
    records, costs, latencies = (
        [r for r in found if (r["kind"], r.get("format")) == kind]
        for kind in ((KIND, FORMAT), (head_costs.KIND, head_costs.FORMAT), (head_latency.KIND, head_latency.FORMAT))
    )
    if not records:
        raise HapError(f"{folder} holds no results of hap glue")
    tasks: dict[str, list[Record]] = {}
    for record in records:
        tasks.setdefault(record["task"], []).append(record)
    lines = ["# Attention heads on GLUE", "", *_preface(records), "", *_in_short(tasks), ""]
    for task, found in tasks.items():
        lines += _task(task, found)
    return "\n".join([*lines, *_costs(costs), *_latencies(latencies)])


def _preface(records: Sequence[Record]) -> list[str]:
    models = sorted({f"{r['model']['note']} ({r['model']['type']}, {r['model']['heads']} heads)" for r in records})
    machines = sorted({str(r["hardware"]["gpu"] or r["hardware"]["cpu"]) for r in records})
    revisions = sorted({r["revision"] for r in records})
    return [
        f"Made by `hap glue --render` from {len(records)} files. Model: {', '.join(models)}. "
        f"Hardware: {', '.join(machines)}. Revision: {', '.join(revisions)}.",
        "",
        "Each network is fine-tuned, loses heads over all layers at once (at least one stays in each), and is trained "
        "on. Figures are percent on the development set after the LAST step, never the best of several: mean over "
        "seeds ± standard deviation. The network with all heads is the one before pruning: those with fewer heads were "
        "trained on from it, and may end above it. The paper's figures are for RoBERTa-base and stand beside ours for "
        "orientation.",
    ]


def _in_short(tasks: Mapping[str, Sequence[Record]]) -> list[str]:
    """One figure for each criterion and task: the mean over the shares that the paper's claim is about."""
    criteria = [c for c in NAMES if any(r["criterion"] == c for records in tasks.values() for r in records)]
    rows = [[NAMES[c], *(_mean(_means(records, c)) for records in tasks.values())] for c in criteria]
    leads = [_lead(records) for records in tasks.values()]
    rows.append(
        [
            "**Hessian minus gradient ± its standard error**",
            *(f"**{x[0]:+.2f} ± {x[1]:.2f}**" if x else "-" for x in leads),
        ]
    )
    return [
        f"Mean over {', '.join(f'{share:.0%}' for share in CLAIMED)} of the heads, as far as a task has them. The "
        "paper's claim, the Hessian ahead of the gradient by about one point there, would show in the last row.",
        "",
        *_table(["after further training", *tasks], rows),
    ]


def _means(records: Sequence[Record], criterion: str) -> dict[int, float]:
    """Each seed's mean score over the shares that the claim is about, of seeds that have all that the task has."""
    found = [_values(records, criterion, share) for share in _measured(records)]
    seeds = set[int].intersection(*map(set, found)) if found else set()
    return {seed: statistics.mean(x[seed] for x in found) for seed in sorted(seeds)}


def _measured(records: Sequence[Record]) -> list[float]:
    """The shares that the claim is about, as far as the task has them."""
    return [share for share in CLAIMED if any(b["heads"] == share for r in records for b in r["budgets"])]


def _lead(records: Sequence[Record]) -> tuple[float, float, int] | None:
    """How far the Hessian is ahead of the gradient: mean over seeds, its standard error, and how many seeds."""
    ours, theirs = _means(records, "hessian"), _means(records, "gradient")
    leads = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return (statistics.mean(leads), statistics.stdev(leads) / len(leads) ** 0.5, len(leads)) if len(leads) > 1 else None


def _task(task: str, records: Sequence[Record]) -> list[str]:
    first = records[0]
    shares = sorted({b["heads"] for r in records for b in r["budgets"]}, reverse=True)
    criteria = [c for c in NAMES if any(r["criterion"] == c for r in records)]
    lines = [f"## {task}", "", _about(task, records), ""]
    head = ["heads left", *(f"{s:.0%}" for s in shares)]
    rows = {f: [[NAMES[c], *_cells(records, c, shares, f)] for c in criteria] for f in FIELDS}
    lines += _table(head, rows["metrics"] + _paper_rows(task, shares))
    lines += ["", "Right after pruning, before any further training:", ""]
    lines += _table(head, rows["metrics_before_tuning"])
    if "hessian" in criteria and "gradient" in criteria:
        lines += ["", _verdict(records, shares)]
    return [*lines, "", f"Metric: {' and '.join(first['metrics'])}{', mean' if len(first['metrics']) > 1 else ''}.", ""]


def _about(task: str, records: Sequence[Record]) -> str:
    first = records[0]
    seeds = sorted({r["seed"] for r in records})
    examples, before = first["examples"], first["dense"]["steps"]
    after = next(b["steps"] for b in first["budgets"] if "steps" in b)
    split = " QNLI's development set alone, split in two; not comparable with QNLI." if task == "qnli-dev" else ""
    return (
        f"{examples['train']:,} examples to train on, {examples['dev']:,} to measure on.{split} "
        f"{before:,} steps of fine-tuning before pruning and {after:,} after; seeds {', '.join(map(str, seeds))}."
        f"{_trained_anew(records, seeds)}{_noise(records)}"
    )


def _noise(records: Sequence[Record]) -> str:
    """How much of the Hessian's ranking is one: heads that differ by less than their errors stand in any order."""
    found = [r for r in records if r["criterion"] == "hessian" and r["scoring"]["signal"] is not None]
    if not found:
        return ""
    shares = ", ".join(f"{r['scoring']['signal']:.0%}" for r in sorted(found, key=lambda r: r["seed"]))
    return (
        f" Of how the Hessian's scores of heads differ, {shares} (seed by seed) is not noise of its "
        f"{found[0]['settings']['criterion']['probes']} probes."
    )


def _trained_anew(records: Sequence[Record], seeds: Sequence[int]) -> str:
    """Criteria of a seed are compared on one dense network; a folder of work that was lost makes them several."""
    losses = {seed: {tuple(r["dense"]["loss"]) for r in records if r["seed"] == seed} for seed in seeds}
    several = [str(seed) for seed, found in losses.items() if len(found) > 1]
    if not several:
        return ""
    return f" Not all criteria start from the same dense network with seed {', '.join(several)}: it was trained anew."


def _cells(records: Sequence[Record], criterion: str, shares: Sequence[float], field: str) -> list[str]:
    return [_mean(_values(records, criterion, share, field)) for share in shares]


def _values(records: Sequence[Record], criterion: str, share: float, field: str = "metrics") -> dict[int, float]:
    """The score of each seed."""
    return {
        r["seed"]: 100 * (b.get(field) or b["metrics"])["score"]
        for r in records
        if r["criterion"] == criterion
        for b in r["budgets"]
        if b["heads"] == share
    }


def _mean(values: dict[int, float]) -> str:
    found = list(values.values())
    if not found:
        return "-"
    return f"{statistics.mean(found):.2f}" + (f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else "")


def _paper_rows(task: str, shares: Sequence[float]) -> list[list[str]]:
    columns = dict(zip((1.0, 0.8, 0.6, 0.5, 0.4), range(5), strict=True))
    rows = PAPER.get(task, {})
    return [
        [f"*paper, {name}*", *(f"*{rows[name][columns[s]]:.2f}*" if s in columns else "-" for s in shares)]
        for name in rows
    ]


def _verdict(records: Sequence[Record], shares: Sequence[float]) -> str:
    """How far the Hessian is ahead of the gradient, seed by seed: both start from the same dense network."""
    gaps = {share: _gaps(records, share) for share in shares if share < 1}
    parts = [
        f"{share:.0%}: {_mean(found)} ({', '.join(f'{g:+.2f}' for g in found.values())})"
        for share, found in gaps.items()
        if found
    ]
    return f"Hessian minus gradient, points (seed by seed): {'; '.join(parts)}. {_claim(_lead(records))}"


def _gaps(records: Sequence[Record], share: float) -> dict[int, float]:
    ours, theirs = (_values(records, c, share) for c in ("hessian", "gradient"))
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours) if seed in theirs}


def _claim(lead: tuple[float, float, int] | None) -> str:
    """Whether the paper's claim holds."""
    if lead is None:
        return "Too few seeds to judge the paper's claim by."
    mean, error, seeds = lead
    if abs(mean) <= 2 * error:
        verdict = "not held, the difference is within what seeds do"
    else:
        verdict = (
            "not held, it is behind" if mean < 0 else "held" if mean >= 0.5 else "held in part, it is ahead by less"
        )
    return (
        "The paper has the Hessian ahead by about one point with 40 to 60% of the heads. Here: "
        f"{verdict} (mean lead {mean:+.2f}, standard error {error:.2f}, {seeds} seeds)."
    )


def _costs(found: Sequence[Record]) -> list[str]:
    """Time and memory of scores beside those of fine-tuning in the same run."""
    lines = []
    for record in found:
        dense, plain, where = record["dense"], record["plain"], _machine(record)
        rows = [
            [
                NAMES[r["criterion"]],
                str(r["batch"]),
                f"{r['seconds']:.2f}",
                f"{r['of_an_epoch']:.2f}",
                f"{r['of_a_plain_epoch']:.2f}",
                f"{r['peak_memory'] / 2**30:.2f}" if r["peak_memory"] else "-",
                f"{r['of_a_step']:.2f}" if r["of_a_step"] else "-",
            ]
            for r in record["rows"]
        ]
        step = f", its largest {plain['step_memory'] / 2**30:.2f} GiB" if plain["step_memory"] else ""
        lines += [
            f"On {where}, {record['rows'][0]['examples']} texts of {record['task']}; one epoch of fine-tuning took "
            f"{dense['seconds_per_epoch']:.2f} s, of steps that are not recorded "
            f"{plain['seconds_per_epoch']:.2f} s{step}. Revision: {record['revision']}.",
            "",
            *_table(
                ["criterion", "texts at once", "s", "of an epoch", "of a plain one", "peak, GiB", "of a step's"], rows
            ),
            "",
        ]
    return ["## What the scores cost", "", *lines] if lines else []


def _latencies(found: Sequence[Record]) -> list[str]:
    """A dense network and one without half of its heads, timed in turns."""
    lines = []
    for record in found:
        rows = [
            [r["backend"], str(r["batch"]), *(f"{r[n]['median']:.1f}" for n in NETWORKS), f"{r['faster']:.2f}"]
            for r in record["rows"]
        ]
        lines += [
            f"On {_machine(record)} ({record['precision']}), {record['heads']:.0%} of the heads and "
            f"{record['macs_left']:.1%} of the multiply-adds left, {record['length']} tokens; medians, and the median "
            f"of the ratios of rounds in which both took turns. Revision: {record['revision']}.",
            "",
            *_table(["", "texts at once", "dense, ms", "pruned, ms", "times faster"], rows),
            "",
        ]
    return ["## Latency", "", *lines] if lines else []


def _machine(record: Record) -> str:
    hardware = record["hardware"]
    cpu = f"{hardware['cpu']}, {hardware['threads']} thread{'s' * (hardware['threads'] != 1)}"
    return hardware["gpu"] if record["device"].startswith("cuda") else cpu


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]

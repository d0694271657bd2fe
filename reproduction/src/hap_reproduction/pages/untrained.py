"""What the page of results says of scores before any fine-tuning."""

import statistics
from collections.abc import Mapping, Sequence

from hap_reproduction.pages.markdown import command, link, number, table
from hap_reproduction.pages.rows import CRITERIA, Record

REMOVAL, ONE_SHOT = "sensitivity-removal", "sensitivity-one-shot"
NAMES = CRITERIA | {"taylor": "Taylor", "fisher": "Fisher", "geometric-median": "Geometric median"}


def before_training(records: Mapping[str, Record]) -> str:
    """The section; empty where nothing of it has run."""
    parts = []
    if REMOVAL in records:
        parts.append(_one_by_one(records[REMOVAL]))
    if runs := [record for name, record in records.items() if name.startswith(ONE_SHOT)]:
        parts.append(_pruned(runs))
    return "\n\n".join(["## Before fine-tuning", command("sensitivity"), *parts]) if parts else ""


def by_stage(records: Mapping[str, Record]) -> str:
    """What equation 6 says of the stages of ResNet56 beside what their channels do; empty where that has not run."""
    if REMOVAL not in records:
        return ""
    record = records[REMOVAL]
    rows = {row["criterion"]: row for row in record["rows"]}
    measured = record["measured"]["own"]
    told = {
        name: ", ".join(f"{rows[name]['predicted'][stage] / rise:.2f}" for stage, rise in measured.items())
        for name in ("hessian", "gate-curvature")
    }
    return f"""Is sensitivity really lowest in late layers? Every channel of the dense network was taken out alone, and
the rises of the loss, with labels as the dense network sees them, were added up over {", ".join(measured)}. Of these,
equation 6 says {told["hessian"]}: it is not out by the same factor everywhere. The curvature of a gate on
what a channel hands on is w^T H w along the one direction that is taken, with the shift of the BatchNorm behind it,
where equation 6 has the mean over all directions of the weights; it says {told["gate-curvature"]}: see
[Before fine-tuning](#before-fine-tuning)."""


def _one_by_one(record: Record) -> str:
    measured, lines = record["measured"]["own"], []
    for row in record["rows"]:
        found = [row[labels][where] for labels in ("own", "given") for where in ("all", "within_layers")]
        shares = [row["predicted"][stage] / rise if "predicted" in row else None for stage, rise in measured.items()]
        lines.append([NAMES[row["criterion"]], *(number(value, 2) for value in (*found, *shares))])
    ranks = [f"{labels}, {where}" for labels in ("own labels", "labels given") for where in ("all", "within a layer")]
    head = ["", *ranks, *(f"says of {stage}" for stage in measured)]
    text = f"""Each of the {record["units"]:,} channels of one dense ResNet56 ({link("file", record)}) was taken out
alone, the BatchNorm behind it with it, and the loss measured on {record["images"]:,} training images; scores are from
{record["scored_on"]} of another draw. How far the order of the scores is that of the rises (rank correlation), and, of
criteria that say how far the loss rises, what part of it they say. The network is sure of nearly all of these images:
with the labels given few of them decide, and {100 * record["falls"]:.0f}% of the rises are falls. With labels as the
dense network sees them, each class weighed by its own probability, none is; the curvature of that loss is the
Gauss-Newton matrix, so that it suits gate curvature and HAP more than criteria that use the labels given. The columns
for them were added after a first run, on half as many images, had only those for the labels given."""
    return f"{text}\n\n{table(head, lines)}"


def _pruned(runs: Sequence[Record]) -> str:
    found: dict[tuple[str, bool], dict[float, list[Record]]] = {}
    for row in (row for record in runs for row in record["rows"]):
        found.setdefault((row["criterion"], row["per_cost"]), {}).setdefault(row["flops"], []).append(row)
    sizes = sorted({row["flops"] for record in runs for row in record["rows"]}, reverse=True)
    lines = [
        [f"{NAMES[criterion]}{', per cost' if per_cost else ''}", *(_cell(at.get(size, [])) for size in sizes)]
        for (criterion, per_cost), at in found.items()
    ]
    head = ["", *(f"at {100 * size:g}% of the FLOPs" for size in sizes)]
    files = ", ".join(link(record["name"].rpartition("-")[2], record) for record in runs)
    text = f"""Test accuracy in per cent of networks that were pruned and not trained since, from {len(runs)} dense
ones (files {files}): as they are, and once their BatchNorms have seen the {runs[0]["scored_on"]} images of the scores
again; then the parameters left in per cent. Mean, and for the second the standard deviation. Scores are from
{runs[0]["scored_on"]} images, "per cost" as above. What is best here need not be best after fine-tuning."""
    return f"{text}\n\n{table(head, lines)}"


def _cell(rows: Sequence[Record]) -> str:
    if not rows:
        return ""
    plain, again, params = ([100 * row[key] for row in rows] for key in ("accuracy", "estimated_again", "params"))
    spread = f" ± {statistics.stdev(again):.1f}" if len(again) > 1 else ""
    return f"{statistics.fmean(plain):.1f}; {statistics.fmean(again):.1f}{spread}; {statistics.fmean(params):.0f}"

"""What the tables say of the claims, and where the paper's figures are not reached."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

from hap.models.pretrained import Entry
from hap_reproduction.cifar10.jobs import MANY_IMAGES
from hap_reproduction.pages.markdown import (
    NOT_RUN,
    budget,
    compared_with_paper,
    linked,
    number,
    paper_figures,
    share_left,
    table,
    to_paper,
    with_margin,
)
from hap_reproduction.pages.rows import Record, Row
from hap_reproduction.pages.untrained import by_stage
from hap_reproduction.pages.verdicts import HELD, NOISE, NOT_HELD, UNKNOWN, Comparison, compare

MANY_LOOKS = 20
"""So often must a run have looked at the test images to tell the best of its epochs from the last."""
RANKED = f"per cost, {MANY_IMAGES:,} images"
GATES = f"Gate curvature, {RANKED}"
NAMES = {"resnet56": "ResNet56", "vgg16_bn": "VGG16", "preresnet29": "PreResNet29", "wide_resnet32": "WideResNet32"}


@dataclass(frozen=True)
class Page:
    """Everything that sections read."""

    records: Mapping[str, Record]
    rows: Sequence[Row]
    manifest: Mapping[str, Entry]
    figures: Mapping[str, str]

    def of(self, target: str, model: str | None = None) -> list[Row]:
        return [r for r in self.rows if target in r.job.targets and (model is None or r.job.model == model)]


def claims(page: Page) -> str:
    """The paper's claims as comparisons at equal budgets."""
    ablation, meeting = page.of("ablation"), [*page.of("implants"), *page.of("head-to-head")]
    ranked = [*ablation, *page.of("rankings")]
    lines = []
    for below in ("Magnitude", "L1 norm", "Random", "Reversed HAP"):
        lines.append(_claim("ResNet56", "HAP", below, ablation))
    for above, below in (
        (f"HAP, {RANKED}", "HAP"),
        ("HAP, per cost", "HAP"),
        ("HAP, 3 probes", "Random"),
        (f"HAP + Implant, {RANKED}", "HAP + Implant"),
        (f"HAP, {RANKED}", "Magnitude, per cost"),
        (GATES, f"HAP, {RANKED}"),
        (GATES, "Magnitude, per cost"),
    ):
        lines.append(_claim("ResNet56", above, below, [*ranked, *meeting]))
    for below in ("HAP", "HAP + Implant, from zero", "Low rank"):
        lines.append(_claim("ResNet56", "HAP + Implant", below, meeting))
    for above in ("HAP", "HAP + Implant"):
        for below in dict.fromkeys(row.label for row in meeting if row.label.startswith("Torch-Pruning")):
            lines.append(_claim("ResNet56", above, below, meeting))
    for model, name in (("preresnet29", "PreResNet29"), ("wide_resnet32", "WideResNet32")):
        curves = page.of("curves", model)
        for above, below in (("HAP", "EigenDamage"), ("HAP", "Magnitude"), ("HAP + Implant", "HAP")):
            lines.append(_claim(name, above, below, curves))
    head = ["network", "claim, at equal FLOPs or parameters", "verdict", "differences in points of accuracy"]
    told = [line for line in lines if line[2] != NOT_RUN]
    waiting = "; ".join(f"{network}, {claim}" for network, claim, verdict, _ in lines if verdict == NOT_RUN)
    parts = ["## Claims", "What the tables below say of the paper's claims, and of some of ours."]
    parts += [table(head, told).replace("---:", "---")] if told else []
    parts += [f"{NOT_RUN.capitalize()}: {waiting}."] if waiting else []
    return "\n\n".join([*parts, _noise(page)])


def _noise(page: Page) -> str:
    """How verdicts come about, and how much seeds differ."""
    known = {row.protocol: row.noise for row in page.rows if row.job.prune is not None and row.noise is not None}
    if not known:
        return "No pruned network has run with several seeds yet, so how much of a difference is noise is not known."
    spreads = ", ".join(
        f"{noise.deviation:.2f} in protocol `{protocol}` ({noise.freedom} degrees of freedom)"
        for protocol, noise in known.items()
    )
    text = (
        "One seed's standard deviation in points, pooled over the pruned networks of a protocol that have run with "
        f"several seeds, is {spreads}; a protocol without any has that of all together. It is taken to be that of its "
        "other networks too, those with one seed included, which is not tested. By it a difference stands with half of "
        "its 95% interval by Student's t, and what lies within counts as noise. Each difference is judged by itself: "
        "of twenty without a cause, one would lie outside."
    )
    return fill(text, 120, break_on_hyphens=False)


def _claim(network: str, above: str, below: str, rows: Sequence[Row]) -> list[str]:
    found, common = compare(above, below, rows)
    words = [network, f"{above} above {below}"]
    if not found:
        return [*words, NOT_RUN, ""]
    count = Counter(c.verdict for c in found)
    parts = [f"held at {count[HELD]} of {len(found)} sizes"] if count[UNKNOWN] < len(found) else []
    parts += [f"{count[word]} {word}" for word in (NOISE, NOT_HELD) if count[word]]
    parts += [f"{count[UNKNOWN]} with no spread known"] if count[UNKNOWN] else []
    parts += [f"{common - len(found)} {NOT_RUN}"] if common > len(found) else []
    return [*words, ", ".join(parts), "; ".join(map(_difference, found))]


def _difference(c: Comparison) -> str:
    size = f"{c.percent:g}% {'FLOPs' if c.kind == 'flops' else 'params'}"
    margin = "" if c.margin is None else f" ± {c.margin:.2f}"
    return f"{size}: {c.difference:+.2f}{margin}, {c.seeds} ({c.verdict})"


def behind(page: Page) -> str:
    """Rows of the paper that are not reached, and what the results say of the reason."""
    rows = [*page.of("resnet56"), *page.of("implants"), *page.of("vgg16"), *page.of("preresnet29")]
    rows = [
        row
        for row in {row.name: row for row in rows if "rankings" not in row.job.targets}.values()
        if compared_with_paper(row).startswith("no")
    ]
    if not rows:
        return ""
    lines = []
    for row in rows:
        sizes = f"{share_left(row, 'params')}, {number(paper_figures(row, 'params'), 2) or 'not given'}"
        others = [_to_paper_by(page, row, how) for how in ("3 probes", "per cost", f"{MANY_IMAGES:,} images", RANKED)]
        name = linked(row, f"{NAMES[row.job.model]}, {row.label}, {budget(row)}")
        lines.append([name, _to_paper(row), sizes, *others])
    head = [
        "",
        "points to the paper",
        "params left %: ours, paper's",
        "ranked by 3 probes",
        "ranked per cost",
        f"ranked on {MANY_IMAGES:,} images",
        "both",
    ]
    text = """On ResNet56 exact sensitivity is lowest in late layers, where channels have many parameters and few FLOPs,
so at the paper's FLOPs far fewer parameters stay than in the paper. That is what differs; whether it is the reason, the
last columns tell: points to the paper when sensitivity is estimated by 3 probes, or weighed by what a channel costs;
and whether it is which channels go, when it is found on many images."""
    parts = [
        "## Where the paper's figure is not reached",
        text,
        table(head, lines),
        by_stage(page.records),
        _best_look(page),
        _dead_implants(page),
    ]
    return "\n\n".join(part for part in parts if part)


def _to_paper_by(page: Page, row: Row, words: str) -> str:
    """Points to the paper of the same row under another ranking, nothing else changed."""
    wanted = f"{row.label}, {words}"
    found = [other for other in page.of("rankings") if other.label == wanted and other.budget == row.budget]
    if not found:
        return ""
    return _to_paper(found[0])


def _to_paper(row: Row) -> str:
    points = to_paper(row)
    return NOT_RUN if points is None else with_margin(row, points)


def _best_look(page: Page) -> str:
    """What the best of all epochs would have reported more than the last, where a run looked often enough to tell."""
    curves = [
        [a for a in record["history"]["accuracy"] if a is not None]
        for row in page.rows
        if row.job.prune is not None
        for record in row.records
    ]
    curves = [curve for curve in curves if len(curve) >= MANY_LOOKS]
    said = "The paper's public code looks at the test images after every epoch and reports the best; ours are the last."
    if not curves:
        return said
    more = [100 * (max(curve) - curve[-1]) for curve in curves]
    looks = sorted({len(curve) for curve in curves})
    were, often = "was" if len(curves) == 1 else "were", " or ".join(map(str, looks))
    return f"""{said}
How much that is: {len(curves)} of the pruned networks here {were} looked at {often} times, and the best look is
{statistics.mean(more):.2f} points above the last on average, from {min(more):.2f} to {max(more):.2f}."""


def _dead_implants(page: Page) -> str:
    record = page.records.get("implants-from-zero")
    if record is None:
        return ""
    rows = [row for row in record["rows"] if row["init"] == "zero"]
    counts = ["{zero} of {implants} in {network} ({zero_and_negative_bias})".format(**row) for row in rows]
    others = [row for row in record["rows"] if row["init"] == "center"]
    zero, implants = (sum(row[key] for row in others) for key in ("zero", "implants"))
    return f"""Implants that start at zero, as in the public code, hardly train. After the last epoch these are still
exactly zero, in brackets those of them before a BatchNorm whose bias is negative in the dense network:
{"; ".join(counts)}.
BatchNorm makes its bias of zeros, a ReLU passes nothing of what is negative, and no gradient comes back. In all other
rows implants start at the centre of the kernel that they replace, and {zero} of {implants} are zero in the end.
`python benchmarks/implants_from_zero.py` counts."""

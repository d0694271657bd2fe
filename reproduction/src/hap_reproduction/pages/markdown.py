"""Pieces of the page of results: rows of networks as tables in Markdown, ours beside the paper's."""

import statistics
from collections.abc import Sequence

from hap_reproduction.pages.rows import Record, Row
from hap_reproduction.pages.verdicts import NOISE

NOT_RUN = "not run yet"
FILES = "../results/cifar10"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with text on the left of its first column and numbers on the right of the others."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def command(target: str) -> str:
    return f"`hap reproduce {target} --data data/cifar10`"


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def link(words: str, record: Record) -> str:
    """Words that lead to a result."""
    return f"[{words}]({FILES}/{record['name']}.json)"


def linked(row: Row, words: str | None = None) -> str:
    """The row's name, which leads to the result of its first seed, and the numbers of its other seeds to theirs."""
    first, *others = row.records
    return " ".join([link(words or row.label, first), *(link(r["name"].rpartition("-seed")[2], r) for r in others)])


def accuracy(row: Row) -> str:
    """Mean and standard deviation over the seeds that have run, and how many of how many those are."""
    if not row.records:
        return NOT_RUN
    values, wanted = row.accuracies, len(row.jobs)
    seeds = f"{len(values)} seeds" if len(values) > 1 else "1 seed"
    if len(values) < wanted:
        seeds = f"{len(values)} of {wanted} seeds"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{row.mean:.2f}{deviation} ({seeds})"


def share_left(row: Row, kind: str) -> str:
    return number(row.share(kind), 2) if row.records else ""


def paper_figures(row: Row, key: str) -> float | None:
    """A figure of the paper's row that this one is held against: flops, params or accuracy."""
    return (row.job.paper or {}).get(key)


def result_table(rows: Sequence[Row], with_paper: bool = True) -> str:
    """FLOPs, params and accuracy of what has run, ours and with `with_paper` the paper's beside them, and below it a
    list of what has not."""
    run, waiting = [row for row in rows if row.records], [row for row in rows if not row.records]
    if not run:
        return not_run_yet(rows)
    head = ["", "FLOPs left %", "params left %", "accuracy %", "its dense network %"]
    lines = [[linked(r), share_left(r, "macs"), share_left(r, "params"), accuracy(r), number(r.dense, 2)] for r in run]
    if with_paper:
        head += ["paper: FLOPs, params", "paper: accuracy", "as good"]
        for row, line in zip(run, lines, strict=True):
            sizes = [number(value, 2) for key in ("flops", "params") if (value := paper_figures(row, key)) is not None]
            line += [", ".join(sizes), number(paper_figures(row, "accuracy"), 2), compared_with_paper(row)]
    return table(head, lines) + (f"\n\n{not_run_yet(waiting)}" if waiting else "")


def not_run_yet(rows: Sequence[Row]) -> str:
    """What will be here: each method with its budgets."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        kind, percent = row.budget
        found.setdefault((row.label, kind), []).append(percent)
    parts = [
        f"{name} at {', '.join(f'{p:g}' for p in percents)}% of the {in_words(kind)}"
        for (name, kind), percents in found.items()
    ]
    return f"{NOT_RUN.capitalize()}: {'; '.join(parts)}."


def in_words(kind: str) -> str:
    return "FLOPs" if kind == "flops" else "parameters"


def budget(row: Row) -> str:
    kind, percent = row.budget
    return f"at {percent:g}% of the {in_words(kind)}"


def to_paper(row: Row) -> float | None:
    """Points of accuracy above the paper's row, to its two digits; None where there is nothing to hold against it."""
    wanted = paper_figures(row, "accuracy")
    return None if not row.records or wanted is None else round(round(row.mean, 2) - wanted, 2)


def judged(row: Row, reached: bool, points: float) -> str:
    """Whether a published figure is reached, by how many points, and half of the 95% interval over seeds: nobody can
    tell inside of that."""
    noise = row.noise is not None and abs(points) <= row.noise.margin(len(row.records))
    return f"{NOISE if noise else 'yes' if reached else 'no'} ({with_margin(row, points)})"


def with_margin(row: Row, points: float) -> str:
    """So many points above another figure, as far as the seeds of this row can tell."""
    spread = ", no spread known" if row.noise is None else f" ± {row.noise.margin(len(row.records)):.2f}"
    return f"{points:+.2f}{spread}"


def compared_with_paper(row: Row) -> str:
    """Whether a row of HAP is at least as accurate as the paper's and not larger."""
    above = to_paper(row)
    if above is None or not row.label.startswith("HAP"):
        return ""
    for kind, key in (("macs", "flops"), ("params", "params")):
        if row.share(kind) > (paper_figures(row, key) or 100) + 0.005:
            return "larger"
    return judged(row, above >= 0, above)

"""docs/results.md: tables and figures of the CIFAR-10 experiments, from result files and from nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hap.models.pretrained import Entry
from hap.utils.atomic_files import write_text
from hap_reproduction.cifar10.job import Folders, Job
from hap_reproduction.cifar10.jobs import BEST, DENSE, HAP_ROWS, MANY_IMAGES, jobs, short_name
from hap_reproduction.pages.claims import NAMES, Page, behind, claims
from hap_reproduction.pages.markdown import (
    NOT_RUN,
    accuracy,
    budget,
    command,
    judged,
    link,
    linked,
    not_run_yet,
    number,
    result_table,
    share_left,
    table,
)
from hap_reproduction.pages.rows import Record, Row, make_rows, read_records
from hap_reproduction.pages.untrained import before_training

PAPER_SECONDS = {"wide_resnet32": 120, "resnet56": 61, "preresnet29": 81}
"""The paper's seconds for 300 probes, on a Titan Xp."""
ABLATION_CHANNELS = {38.74: 50, 33.99: 45, 28.85: 40, 22.86: 31}
"""The paper's per cent of channels left in the rows of its ablation, by FLOPs."""


def write_results(
    folders: Folders, out: Path, manifest: Mapping[str, Entry], all_jobs: Sequence[Job] | None = None
) -> list[Path]:
    """Write the page and its figures; returns their paths."""
    records = read_records(folders.results)
    rows = make_rows(jobs() if all_jobs is None else all_jobs, records)
    figures = _figures(rows, records)
    images = out.parent / "images"
    paths = {name: images / f"results-{name}.svg" for name in figures}
    for name, path in paths.items():
        write_text(path, figures[name])
    shown = {name: f"images/{path.name}" for name, path in paths.items()}
    page = Page(records, rows, manifest, shown)
    text = "\n\n".join(part for section in SECTIONS if (part := section(page))) + "\n"
    write_text(out, text)
    return [out, *paths.values()]


def _figures(rows: Sequence[Row], records: Mapping[str, Record]) -> dict[str, str]:
    # Only here, so that the other commands start without loading a drawing library.
    from hap.report import charts as report_charts
    from hap_reproduction.pages import charts

    found = {}
    against_flops = [r for r in rows if r.records and {"resnet56", "ablation", "implants"} & set(r.job.targets)]
    if against_flops:
        found["resnet56"] = charts.against_flops(against_flops)
    curves = [r for r in rows if r.records and "curves" in r.job.targets]
    if curves:
        found["curves"] = charts.curves(curves, NAMES)
    if "sensitivity-layers" in records:
        found["sensitivity"] = report_charts.sensitivity(records["sensitivity-layers"])
    if "sensitivity-probes" in records:
        found["probes"] = report_charts.probes(records["sensitivity-probes"])
    return {name: charts.as_svg(figure) for name, figure in found.items()}


def _picture(page: Page, name: str, words: str) -> str:
    return f"![{words}]({page.figures[name]})" if name in page.figures else ""


# ---- sections -----------------------------------------------------------------------------------------------


def opening(page: Page) -> str:
    trained = [r for row in page.rows for r in row.records]
    wanted = sum(len(row.jobs) for row in page.rows)
    machines = ", ".join(sorted({str(r["hardware"]["gpu"] or r["hardware"]["cpu"]) for r in trained})) or "none yet"
    return f"""# Results on CIFAR-10

This page is written by `hap reproduce all --render` from the files in [results/cifar10](../results/cifar10), one per
run, with configuration, seed, curve, source revision, hardware and date. {len(trained)} of {wanted} runs are there,
made on {machines}; the others are named and have no figure. `hap reproduce all --status` lists them all. The name of
a row leads to the result of its first seed, the numbers behind it to those of its other seeds. The command above a
table makes what it lacks; with folders of its own (`--results`, `--networks`, `--work`) it makes all of it anew.
Networks to take away, below, are checked in a minute.

- Accuracy is on the 10,000 test images after the LAST epoch, in per cent; with several seeds mean ± standard deviation.
  The paper's public code reports the best of all epochs on the same images. Points above or below a published figure
  stand with half of the 95% interval of our mean over seeds (see Claims); what they report has a spread too, which is
  not known.
- "Dense network" is the one that a pruned network was made from: seed by seed the same for all methods of a table.
- FLOPs are multiply-adds of convolutions and linear layers. Rows of HAP and HAP + Implant are at no more FLOPs, and
  where the paper gives them at no more parameters, than the paper's.
- Protocol `paper` is the paper's fine-tuning (160 epochs, batch 64, learning rate 0.02, weight decay 4e-4, step decay),
  in bf16. Protocol `best` adds distillation from the dense network, cosine decay, averaged weights, least-squares
  implants, compensation and ranking by score per multiply-add saved, on {MANY_IMAGES:,} images instead of 512. They
  never share a table."""


def dense(page: Page) -> str:
    lines = []
    for row in sorted(page.of("dense"), key=lambda row: list(NAMES).index(row.job.model)):
        kind = "the public code's" if "-dense-paper" in row.name else "cosine, weight decay 5e-4"
        each = ", ".join(link(number(a, 2), r) for a, r in zip(row.accuracies, row.records, strict=True))
        params = f"{row.records[0]['params'] / 1e6:.2f}" if row.records else ""
        wanted = number(DENSE[row.job.model], 2) if "-dense-paper" in row.name else ""
        lines.append(
            [NAMES[row.job.model], f"{kind}, {row.job.recipe.epochs} epochs", params, accuracy(row), each, wanted]
        )
    head = ["network", "recipe", "million params", "accuracy %", "each seed", "paper"]
    return f"## Dense networks\n\n{command('dense')}\n\n{table(head, lines)}"


def resnet56(page: Page) -> str:
    rows = sorted(page.of("resnet56"), key=lambda row: (-row.budget[1], row.label))
    text = """Channels go in the order of their sensitivity, found exactly. It is lowest in late layers, where a channel
has many parameters and few FLOPs: at the paper's FLOPs, far fewer parameters are left than in the paper. "3 probes"
estimates it by as many probes as the public code takes unless told otherwise, which leaves shares nearer to the paper's
(see Sensitivity). "Per cost" ranks exact sensitivities by what a channel costs in parameters and in FLOPs, which
the paper does not. They are found on 512 training images unless a row says 10,000."""
    picture = _picture(page, "resnet56", "ResNet56: accuracy against FLOPs left")
    return "\n\n".join(
        part for part in ("## ResNet56, protocol paper", command("resnet56"), text, result_table(rows), picture) if part
    )


def ablation(page: Page) -> str:
    rows = [r for r in page.of("ablation") if r.budget[1] != 21.0]
    rows.sort(key=lambda row: (-row.budget[1], row.label != "HAP", row.label))
    text = """Which channels go, at the same FLOPs. The paper's controls stand at somewhat more FLOPs. Magnitude is the
mean square of a channel's weights, as the paper defines it; L1 norm, which it does not have, is the sum of their
absolute values, so that the channels of late layers, which have more weights, stay longer."""
    return f"## What ranks the channels\n\n{command('ablation')}\n\n{text}\n\n{result_table(rows)}"


def implants(page: Page) -> str:
    rows = sorted(page.of("implants"), key=lambda row: (-row.budget[1], row.label))
    text = """HAP + Implant against HAP and against plain low rank (1x1 in place of random channels) at the same FLOPs.
Implants and low rank start at the centre of the kernel that they replace; "from zero" as in the public code."""
    return f"## Implants\n\n{command('implants')}\n\n{text}\n\n{result_table(rows)}"


def vgg16(page: Page) -> str:
    return f"## VGG16, protocol paper\n\n{command('vgg16')}\n\n{result_table(page.of('vgg16'))}"


def preresnet29(page: Page) -> str:
    return f"## PreResNet29, protocol paper\n\n{command('preresnet29')}\n\n{result_table(page.of('preresnet29'))}"


def best(page: Page) -> str:
    if not any(row.records for row in page.of("best")):
        rows = [replace(r, label=f"{NAMES[r.job.model]} {r.label}") for r in page.of("best")]
        return f"## Protocol best\n\n{command('best')}\n\n{not_run_yet(rows)}"
    published = {(short_name(m), k, p): (a, who) for m, rows in BEST.items() for k, p, a, who in rows}
    lines = []
    for row in page.of("best"):
        figure, who = published[(short_name(row.job.model), *row.budget)]
        beaten = judged(row, row.mean > figure, row.mean - figure) if row.records else ""
        name = f"{NAMES[row.job.model]}, {row.label}, {budget(row)}"
        lines.append(
            [
                linked(row, name) if row.records else name,
                share_left(row, "macs"),
                share_left(row, "params"),
                accuracy(row),
                number(row.dense, 2) if row.records else "",
                f"{figure:.2f} ({who})",
                beaten,
            ]
        )
    head = ["", "FLOPs left %", "params left %", "accuracy %", "its dense network %", "best published there", "beaten"]
    return f"## Protocol best\n\n{command('best')}\n\n{table(head, lines)}"


def head_to_head(page: Page) -> str:
    rows = sorted(page.of("head-to-head"), key=lambda row: -row.budget[1])
    text = """The dense ResNet56 and the fine-tuning are the same (protocol `paper`). What Torch-Pruning removes was
written down by `python benchmarks/torch_pruning_plans.py --data data/cifar10` and checked to give its outputs. It
removes channels from all branches of a sum at once; "coupled" is HAP with the same restriction."""
    return f"## Beside Torch-Pruning\n\n{command('head-to-head')}\n\n{text}\n\n{result_table(rows, with_paper=False)}"


def curves(page: Page) -> str:
    parts = ["## Accuracy against size", command("curves")]
    epochs = sorted({row.job.recipe.epochs for row in page.of("curves")})
    parts.append(
        f"One dense network each, one seed, and for all methods the fine-tuning of protocol `paper` with {epochs[0]} "
        "epochs.\nBN scale on PreResNet29 is with coupled branches, since these have no BatchNorm of their own."
    )
    parts.append(_picture(page, "curves", "PreResNet29 and WideResNet32: accuracy against parameters left"))
    for model in ("preresnet29", "wide_resnet32"):
        rows = page.of("curves", model)
        if not any(row.records for row in rows):
            parts.append(f"{NAMES[model]}: {not_run_yet(rows)}")
            continue
        sizes = sorted({row.budget[1] for row in rows}, reverse=True)
        at = {(row.label, row.budget[1]): row for row in rows}
        names = list(dict.fromkeys(row.label for row in rows))
        cells = [[_point(at.get((name, size))) for size in sizes] for name in names]
        head = [NAMES[model], *(f"{size:g}% of the parameters" for size in sizes)]
        parts.append(table(head, [[name, *cell] for name, cell in zip(names, cells, strict=True)]))
    return "\n\n".join(part for part in parts if part)


def _point(row: Row | None) -> str:
    if row is None:
        return ""
    return link(f"{row.mean:.2f}", row.records[0]) if row.records else NOT_RUN


def sensitivity(page: Page) -> str:
    parts = ["## Sensitivity", command("sensitivity")]
    if "probes" in page.figures:
        record = page.records["sensitivity-probes"]
        parts.append(
            f"Hutchinson's estimate of the scores of four channels of ResNet56 over {record['probes']} "
            f"probes, on {record['images']} images, with the exact values."
        )
        parts.append(_picture(page, "probes", "Scores of four channels against the number of probes"))
    if "sensitivity" in page.figures:
        share = 100 * page.records["sensitivity-layers"]["flops"]
        parts.append(
            f"Scores of the channels of three layers, and what HAP + Implant does with each at {share:g}% FLOPs."
        )
        parts.append(_picture(page, "sensitivity", "Sensitivity per channel of three layers, kept channels marked"))
    if "sensitivity-shapes" in page.records:
        parts.append(_shapes(page.records["sensitivity-shapes"]))
    if "sensitivity-images" in page.records:
        parts.append(_images(page.records["sensitivity-images"]))
    lines = []
    for model, paper in PAPER_SECONDS.items():
        record = page.records.get(f"sensitivity-seconds-{model}", {})
        if record:
            made = [number(record["exact_seconds"], 2), f"{record['probe_seconds']:.2f} ({record['probes']} probes)"]
            machine = record["hardware"]["gpu"] if record["device"] == "cuda" else record["hardware"]["cpu"]
        else:
            made, machine = [NOT_RUN, NOT_RUN], ""
        lines.append([NAMES[model], *made, str(machine), f"{paper} (300 probes, Titan Xp)"])
    head = ["seconds for all scores, 512 images", "exact", "Hutchinson", "on", "paper"]
    return "\n\n".join([*parts, table(head, lines)])


def _shapes(record: Record) -> str:
    """FLOPs and parameters left at the paper's shares of channels."""
    lines = []
    for flops, params, _ in HAP_ROWS[:4]:
        share = ABLATION_CHANNELS[flops]
        line = [f"{share:g}% of the channels", f"{flops:.1f}, {params:.1f}"]
        for how in dict.fromkeys(row["how"] for row in record["rows"]):
            found = [row for row in record["rows"] if row["how"] == how and round(100 * row["channels"], 2) == share]
            line.append("; ".join(f"{100 * row['flops']:.1f}, {100 * row['params']:.1f}" for row in found))
        lines.append(line)
    how = dict.fromkeys(row["how"] for row in record["rows"])
    text = f"""Per cent of FLOPs and of parameters left at the paper's shares of channels, by how it is ranked on
{record["images"]} images; draws of probes one after another. The paper speaks of 300 probes. Its public code takes 3
unless told otherwise, and what that leaves is nearer to what the paper reports than what exact values leave, which is
more FLOPs. So is what a random order leaves."""
    return f"{text}\n\n{table(['', 'paper', *how], lines)}"


def _images(record: Record) -> str:
    lines = [
        [
            f"{row['images']:,}",
            *(number(row[key], 2) for key in ("rank_correlation", "kept_in_both")),
            number(100 * row["carried_by_a_twentieth"], 0),
        ]
        for row in record["rows"]
    ]
    text = """How far exact scores depend on the images: two draws of training images, the rank correlation of their
scores, and of the channels that either keeps at 38.74% of the FLOPs the part that both keep. A trained network is sure
of nearly all training images, so that few of them hold most of the loss's curvature."""
    head = ["training images", "rank correlation", "kept by both", "curvature in a twentieth of the images, %"]
    return f"{text}\n\n{table(head, lines)}"


def zoo(page: Page) -> str:
    lines = [
        [
            f"`{name}`",
            number(100 * e.accuracy, 2),
            number(100 * e.macs_left, 1),
            number(100 * e.params_left, 1),
            f"[{Path(e.result).stem}](../{e.result})",
        ]
        for name, e in page.manifest.items()
    ]
    text = """Seed 0 of the headline rows, never the best of several, in half precision in [zoo](../zoo):
`hap.zoo.load("NAME")`, or `hap eval zoo:NAME --data data/cifar10`."""
    return f"## Networks to take away\n\n{text}\n\n" + table(
        ["name", "accuracy %", "FLOPs left %", "params left %", "result"], lines
    )


SECTIONS: tuple[Callable[[Page], str], ...] = (
    opening,
    claims,
    behind,
    dense,
    resnet56,
    ablation,
    implants,
    vgg16,
    preresnet29,
    best,
    head_to_head,
    curves,
    sensitivity,
    lambda page: before_training(page.records),
    zoo,
)

"""The page: records -> charts and tables -> one HTML file."""

from pathlib import Path
from typing import Any

from hap.errors import HapError
from hap.report.summary import Row, summarise
from hap.utils.atomic_files import write_atomic, write_text
from hap.workflow.results import KIND, Result, read_records, read_results


def write_report(folder: str | Path, out: str | Path, png: str | Path | None = None) -> None:
    """Make one self-contained page from the result files in `folder`; with `png`, the main chart as a picture too."""
    results = read_results(folder)
    if not results:
        raise HapError(f"{folder} holds no result files; hap run or hap demo writes some")
    others = [record for record in read_records(folder) if record["kind"] != KIND]
    from hap.report import charts, style  # only here: the other commands start without loading a drawing library

    rows = summarise(results)
    write_text(out, _render(results, rows, charts.figures(results, rows, others), charts.palette(rows)))
    if png is not None:
        picture = style.to_png(charts.summary(rows))
        write_atomic(png, lambda path: path.write_bytes(picture))


def _render(results: list[Result], rows: list[Row], figures: dict[str, Any], palette: dict[str, str]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hap", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    first = results[0]
    return environment.get_template("page.html").render(
        rows=rows,
        results=results,
        first=first,
        figures=figures,
        facts=_facts(first),
        settings=_settings(results),
        seeds=max(len(row.accuracies) for row in rows),
        palette=palette,
    )


def _facts(result: Result) -> dict[str, str]:
    """What the numbers were made with and on."""
    found = result.hardware
    machine = found["gpu"] if found["device"] == "cuda" else found["cpu"]
    return {
        "Source": result.revision,
        "Hardware": f"{machine}, {found['threads']} thread{'s' if found['threads'] != 1 else ''}",
        "Software": f"torch {found['torch']}, Python {found['python']}",
        "Date": result.date.replace("T", " ").replace("+00:00", " UTC"),
    }


def _settings(results: list[Result]) -> list[tuple[str, dict[str, Any]]]:
    """The settings behind each row, once per method."""
    shown: dict[str, dict[str, Any]] = {}
    for result in results:
        shown.setdefault(result.name, _flat(result.config))
    common = {k: v for k, v in next(iter(shown.values())).items() if all(s.get(k) == v for s in shown.values())}
    rest = [(name, {k: v for k, v in s.items() if k not in common}) for name, s in shown.items()]
    return [("All", common), *((name, own) for name, own in rest if own)]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value not in (None, [], False) and key != "seed":
            flat[f"{prefix}{key}"] = value
    return flat

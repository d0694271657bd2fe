"""The report: made from records alone, whole in one file, and true to them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hap import HapError
from hap.report import write_report
from hap.report.summary import summarise
from hap.utils.atomic_files import write_json
from hap.workflow.results import Measured, Result, read_results

HARDWARE = {"device": "cpu", "cpu": "A <CPU>", "gpu": None, "threads": 2, "torch": "2.13", "python": "3.12"}


def side(accuracy: float, params: int, latency: float) -> Measured:
    return Measured(accuracy, params, 10 * params, latency, 0.1, 64)


def record(name: str, seed: int = 0, accuracy: float | None = None, params: int = 300, latency: float = 5.0) -> Result:
    pruned = None if accuracy is None else side(accuracy, params, latency)
    curve = {"loss": [1.0, 0.5], "accuracy": [None, 0.9], "lr": [0.1, 0.0], "seconds": [1.0, 1.0]}
    config = {"model": "net", "data": "digits", "prune": {"criterion": "hessian", "name": name}}
    return Result(
        name,
        seed,
        config,
        "hessian" if pruned else None,
        {"params": 0.3} if pruned else None,
        side(0.95, 1000, 10.0),
        pruned,
        0.4 if pruned else None,
        500,
        curve,
        2.0,
        "abc",
        HARDWARE,
        "2026-01-02T03:04:05+00:00",
    )


SENSITIVITY = {
    "kind": "hap-sensitivity",
    "format": 1,
    "name": "HAP",
    "criterion": "hessian",
    "layers": {
        f"layer{i}": {"scores": [0.0, 1e-3, 2e-3, 5e-3], "fate": ["removed", "removed", "implanted", "kept"]}
        for i in range(5)
    },
}
PROBES = {
    "kind": "hap-probes",
    "format": 1,
    "probes": 4,
    "images": 8,
    "channels": [
        {"layer": "layer1", "unit": 3, "exact": exact, "mean": [1.0, 2.0, 1.5, 1.6], "error": [None, 0.5, 0.4, 0.3]}
        for exact in (1.55, None)
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = [record("Dense"), record("HAP", 0, 0.93), record("HAP", 1, 0.94), record("L1", 0, 0.91, 290, 4.0)]
    for i, result in enumerate(records):
        write_json(tmp_path / f"{i}.json", result.to_dict())
    write_json(tmp_path / "sensitivity.json", SENSITIVITY)
    write_json(tmp_path / "probes.json", PROBES)
    return tmp_path


class Tags(HTMLParser):
    """Ids, links and text of a page; an unclosed or crossed element fails."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []
        self.links += [values[k] for k in ("href", "src", "xlink:href") if values.get(k)]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_results_survive_their_file(folder: Path) -> None:
    found = read_results(folder)
    assert found == [record("Dense"), record("HAP", 0, 0.93), record("HAP", 1, 0.94), record("L1", 0, 0.91, 290, 4.0)]


def test_rows_are_means_over_seeds_against_the_dense_network(folder: Path) -> None:
    dense, ours, other = summarise(read_results(folder))
    assert (dense.accuracy, dense.deviation, dense.speed) == (0.95, None, 1.0)
    assert ours.accuracy == pytest.approx(0.935)
    assert ours.deviation == pytest.approx(0.005 * 2**0.5)
    assert (ours.params_left, ours.macs_left, ours.speed) == (0.3, 0.3, 2.0)
    assert other.speed == 2.5


def test_latency_and_speed_never_disagree() -> None:
    """Each run has a load of its own; its ratio holds, and latencies are told against the pooled dense one."""
    runs = [record("HAP", i, 0.9, latency=2.0 * load) for i, load in enumerate((3.0, 1.0, 1.1))]
    loads = (30.0, 5.0, 5.5)
    runs = [replace(r, dense=replace(r.dense, latency=dense)) for r, dense in zip(runs, loads, strict=True)]
    dense, ours = summarise([record("Dense"), *runs])
    assert dense.latency == 7.75
    assert ours.speed == 2.5
    assert ours.latency == pytest.approx(dense.latency / ours.speed)


def test_the_page_is_whole_and_loads_nothing(folder: Path) -> None:
    write_report(folder, folder / "report.html", folder / "summary.png")
    page = (folder / "report.html").read_text()
    tags = Tags(page)
    assert len(tags.ids) == len(set(tags.ids))
    assert all(link.startswith("#") and link[1:] in tags.ids for link in tags.links)
    assert not re.search(r"<script|@import|url\((?!#)", page)
    assert page.count("<svg") == 4
    assert "93.50%" in page
    assert "290" in page
    assert "A &lt;CPU&gt;, 2 threads" in page
    assert ">abc<" in page
    assert "prefers-color-scheme: dark" in page
    assert (folder / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_charts_take_their_colours_from_the_page(folder: Path) -> None:
    write_report(folder, folder / "report.html")
    page = (folder / "report.html").read_text()
    charts = page[page.index("<svg") :]
    assert not re.search(r"(fill|stroke): #(?!000000|ffffff)[0-9a-f]{6}", charts)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", charts))
    assert used <= set(re.findall(r"(--[a-z0-9-]+):", page))


def test_a_page_from_one_result_has_no_empty_pictures(tmp_path: Path) -> None:
    write_json(tmp_path / "dense.json", record("Dense").to_dict())
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "Score against number of probes" not in page


def test_several_budgets_are_drawn_against_size(folder: Path) -> None:
    write_json(folder / "more.json", record("HAP 60%", 0, 0.945, 600).to_dict())
    write_report(folder, folder / "report.html")
    assert "Accuracy against size" in (folder / "report.html").read_text()


def test_only_the_listed_files_count_where_an_experiment_lists_them(folder: Path) -> None:
    write_json(folder / "experiment.json", {"kind": "hap-experiment", "format": 1, "files": ["0.json", "3.json"]})
    assert [r.name for r in read_results(folder)] == ["Dense", "L1"]


def test_folders_without_results_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HapError, match="no folder"):
        write_report(tmp_path / "missing", tmp_path / "r.html")
    with pytest.raises(HapError, match="holds no result files"):
        write_report(tmp_path, tmp_path / "r.html")
    values = record("HAP", 0, 0.9).to_dict()
    (tmp_path / "a.json").write_text(json.dumps({**values, "dense": {"accuracy": 1}}))
    with pytest.raises(HapError, match="not a result"):
        write_report(tmp_path, tmp_path / "r.html")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(HapError, match=r"a\.json cannot be read"):
        write_report(tmp_path, tmp_path / "r.html")

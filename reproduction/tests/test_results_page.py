"""The page of results: what has run, beside the paper, from result files alone; what has not run has no figure."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hap
from hap.cli import app
from hap.utils.atomic_files import write_json
from hap_reproduction.cifar10.job import Folders, Job
from hap_reproduction.cifar10.jobs import jobs as cifar10_jobs
from hap_reproduction.pages.charts import STYLES
from hap_reproduction.pages.results import write_results
from hap_reproduction.pages.rows import Noise, make_rows
from hap_reproduction.pages.verdicts import Comparison, compare, difference

ROOT = Path(__file__).parents[2]
JOBS = {job.name: job for job in cifar10_jobs()}
HARDWARE = {"gpu": "a GPU", "cpu": "a CPU"}


def result(job: Job, accuracy: float, **more: Any) -> dict[str, Any]:
    """A result file as the campaign writes it, with what the page reads."""
    step = job.prune
    left = {k: getattr(step, f, None) or 0.33 for k, f in (("macs_left", "flops"), ("params_left", "params"))}
    return {
        "kind": "hap-cifar10",
        "name": job.name,
        "accuracy": accuracy,
        "params": 100_000,
        "macs": 1,
        "dense_accuracy": 0.9385,
        "hardware": HARDWARE,
        "history": {"accuracy": [None, accuracy]},
        **left,
    } | more


def rendered(folder: Path, accuracies: dict[str, float], **more: Any) -> tuple[str, list[Path]]:
    folders = Folders(folder / "results", folder / "zoo", folder / "work")
    for name, accuracy in accuracies.items():
        write_json(folders.result(name), result(JOBS[name], accuracy, **more))
    paths = write_results(folders, folder / "docs" / "results.md", {})
    return paths[0].read_text(encoding="utf-8"), paths


def row_of(text: str, *words: str) -> list[str]:
    """The cells of the first table row that holds these words."""
    line = next(line for line in text.splitlines() if line.startswith("|") and all(word in line for word in words))
    return [cell.strip() for cell in line.strip("|").split("|")]


def seeds(name: str, accuracies: Sequence[float]) -> dict[str, float]:
    return {f"{name}-seed{i}": accuracy for i, accuracy in enumerate(accuracies)}


def test_without_results_there_is_no_accuracy_of_ours_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    text, paths = rendered(tmp_path, {})
    assert paths == [tmp_path / "docs" / "results.md"]
    assert f"0 of {len(JOBS)} runs are there" in text
    assert not re.search(r"\(\d seeds?\)|±", text.partition("## Claims")[2])
    assert row_of(text, "ResNet56", "public code")[3:] == ["not run yet", "", "93.88"]
    for target in (
        "dense",
        "resnet56",
        "ablation",
        "implants",
        "vgg16",
        "preresnet29",
        "best",
        "head-to-head",
        "curves",
    ):
        assert f"`hap reproduce {target} --data data/cifar10`" in text


def test_rows_show_mean_spread_and_seeds_beside_the_paper(tmp_path: Path) -> None:
    text, _ = rendered(
        tmp_path,
        seeds("resnet56-paper-hap-38.74", [0.934, 0.936, 0.935]) | seeds("resnet56-paper-implant-centre-40.7", [0.93]),
    )
    assert row_of(text, "HAP", "38.74, 41.53") == [
        "[HAP](../results/cifar10/resnet56-paper-hap-38.74-seed0.json) "
        "[1](../results/cifar10/resnet56-paper-hap-38.74-seed1.json) "
        "[2](../results/cifar10/resnet56-paper-hap-38.74-seed2.json)",
        "38.74",
        "41.53",
        "93.50 ± 0.10 (3 seeds)",
        "93.85",
        "38.74, 41.53",
        "93.38",
        "within the noise (+0.12 ± 0.25)",  # 4.303 standard errors of 0.1 / 3**0.5
    ]
    assert row_of(text, "[HAP + Implant]", "40.70")[3:] == [
        "93.00 (1 of 3 seeds)",
        "93.85",
        "40.70",
        "93.55",
        "no (-0.55 ± 0.43)",  # the spread is that of the row above
    ]
    assert re.search(r"^Not run yet: .*HAP at 33.99, 28.85, 22.86, 21% of the FLOPs", text, re.MULTILINE)


def test_rows_below_the_paper_stand_together_with_what_other_rankings_give(tmp_path: Path) -> None:
    base = "resnet56-paper"
    dead = {"network": "a", "init": "zero", "implants": 9, "zero": 7, "negative_bias": 8, "zero_and_negative_bias": 6}
    write_json(tmp_path / "results" / "implants-from-zero.json", {"rows": [dead, dead | {"init": "center"}]})
    text, _ = rendered(
        tmp_path,
        seeds(f"{base}-hap-38.74", [0.93])
        | seeds(f"{base}-hap-per-cost-38.74", [0.934])
        | seeds(f"{base}-implant-40.7", [0.92]),
    )
    found = text.partition("## Where the paper's figure is not reached")[2].partition("\n## ")[0]
    later = "not run yet"
    unknown = ", no spread known"
    points = [f"-0.38{unknown}", "41.53, 41.53", later, f"+0.02{unknown}", later, later]
    assert row_of(found, "HAP, at 38.74%")[1:] == points
    assert row_of(found, "from zero, at 40.7%")[1:] == [f"-1.55{unknown}", "33.00, not given", "", "", "", ""]
    assert "7 of 9 in a (6)." in found and "per cost, at 38.74%" not in found
    text, _ = rendered(tmp_path / "other", seeds(f"{base}-hap-38.74", [0.94]))
    assert "not reached" not in text


def test_counts_of_implants_stay_when_their_networks_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results" / "cifar10" / "implants-from-zero.json"
    rows = [
        {
            "network": f"resnet56-paper-implant-40.7-seed{s}",
            "init": "zero",
            "implants": 9,
            "zero": s,
            "negative_bias": 8,
            "zero_and_negative_bias": 6,
        }
        for s in range(2)
    ]
    write_json(out, {"rows": rows})
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "benchmarks" / "implants_from_zero.py"))["main"]()
    assert json.loads(out.read_text())["rows"] == rows


def test_the_best_of_many_looks_is_told_beside_the_last(tmp_path: Path) -> None:
    runs = seeds("resnet56-paper-hap-38.74", [0.93])
    text, _ = rendered(tmp_path / "few", runs)
    assert "and reports the best; ours are the last." in text and "best look" not in text
    looks = [None, 0.9, 0.932, *[0.931] * 18, None, 0.93]
    text, _ = rendered(tmp_path / "many", runs, history={"accuracy": looks})
    assert "1 of the pruned networks here was looked at 21 times" in " ".join(text.split())
    assert "the best look is 0.20 points above the last on average, from 0.20 to 0.20." in " ".join(text.split())


def test_a_larger_network_is_not_as_good(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results", tmp_path / "zoo", tmp_path / "work")
    job = JOBS["resnet56-paper-hap-38.74-seed0"]
    write_json(folders.result(job.name), result(job, 0.95, params_left=0.4154))
    text = write_results(folders, tmp_path / "results.md", {})[0].read_text(encoding="utf-8")
    assert row_of(text, "HAP", "38.74, 41.53")[-1] == "larger"


def test_claims_are_held_against_the_noise(tmp_path: Path) -> None:
    base, many = "resnet56-paper", "per-cost-10000-images"
    text, _ = rendered(
        tmp_path,
        seeds(f"{base}-hap-38.74", [0.934, 0.936, 0.935])
        | seeds(f"{base}-hap-{many}-38.74", [0.9445, 0.9450, 0.9455])
        | seeds(f"{base}-random-38.74", [0.90])
        | seeds(f"{base}-implant-40.7", [0.94, 0.941])
        | seeds(f"{base}-implant-centre-40.7", [0.93, 0.931, 0.932])
        | seeds(f"{base}-implant-centre-{many}-40.7", [0.9305, 0.9305, 0.932]),
    )
    # variances of 0.01, 0.0025, 0.005, 0.01 and 0.0075, weighted by 2, 2, 1, 2 and 2: 0.065 / 9, and 2.262 of its root
    assert row_of(text, "from zero", "3 and 2 seeds")[2:] == [
        "held at 0 of 1 sizes, 1 not held, 1 not run yet",
        "40.7% FLOPs: -0.95 ± 0.18, 3 and 2 seeds (not held)",
    ]
    assert row_of(text, "10,000 images above HAP + Implant")[2].startswith("held at 0 of 1 sizes, 1 within the noise, ")
    assert row_of(text, "per cost, 10,000 images above HAP |")[2:] == [
        "held at 1 of 1 sizes, 4 not run yet",
        "38.74% FLOPs: +1.00 ± 0.16, 3 seeds (held)",
    ]
    assert row_of(text, "HAP above Random")[2:] == [
        "held at 1 of 1 sizes, 3 not run yet",
        "38.74% FLOPs: +3.50 ± 0.22, 3 and 1 seeds (held)",
    ]
    said = " ".join(text.split())
    assert "0.08 in protocol `paper` (9 degrees of freedom)" in said
    assert "ResNet56, HAP + Implant above Low rank" in text.partition("Not run yet: ")[2].partition("\n")[0]


def test_differences_stand_with_the_margin_of_their_seeds() -> None:
    noise = Noise(0.2, 12)
    # of 12 degrees of freedom the table has 10
    wanted = (pytest.approx(1.0), pytest.approx(2.228 * 0.2 * (1 / 2 + 1 / 3) ** 0.5), "2 and 3 seeds")
    assert difference([94.0, 96.0], [93.0, 94.0, 95.0], noise) == wanted
    assert difference([94.0] * 3, [95.0] * 3, noise)[2] == "3 seeds"
    assert difference([95.0], [94.0], None) == (1.0, None, "1 seed")


def test_each_protocol_has_its_own_noise(tmp_path: Path) -> None:
    text, _ = rendered(
        tmp_path,
        seeds("resnet56-paper-hap-38.74", [0.934, 0.936])
        | seeds("resnet56-best-implant-53.0", [0.944, 0.943, 0.945])
        | seeds("preresnet29-short-hap-50.0", [0.93]),
    )
    said = " ".join(text.split())
    assert "0.14 in protocol `paper` (1 degrees of freedom), 0.10 in protocol `best` (2 degrees of freedom), " in said
    assert "0.12 in protocol `short` (3 degrees of freedom)" in said  # which has that of all together


def test_verdicts_are_given_outside_the_margin_alone() -> None:
    pairs = ((0.3, 0.2), (-0.3, 0.2), (0.2, 0.2), (-0.1, 0.2), (0.0, 0.0), (9.0, None))
    verdicts = [Comparison("flops", 50.0, points, margin, "").verdict for points, margin in pairs]
    assert verdicts == ["held", "not held", *["within the noise"] * 3, "no spread known"]
    rows = make_rows([JOBS["resnet56-paper-hap-50.0-seed0"]], {})
    assert compare("HAP", "HAP", rows) == ([], 1) and rows[0].noise is None


def test_dense_networks_lead_to_their_results(tmp_path: Path) -> None:
    text, _ = rendered(tmp_path, seeds("resnet56-dense-paper", [0.938, 0.939]))
    places = [f"../results/cifar10/resnet56-dense-paper-seed{s}.json" for s in range(2)]
    assert row_of(text, "ResNet56", "public code")[4] == f"[93.80]({places[0]}), [93.90]({places[1]})"


def test_the_best_protocol_stands_beside_what_is_published(tmp_path: Path) -> None:
    text, _ = rendered(tmp_path, seeds("resnet56-best-implant-53.0", [0.944, 0.943, 0.945]))
    assert row_of(text, "ResNet56, HAP + Implant, at 53%")[3:] == [
        "94.40 ± 0.10 (3 seeds)",
        "93.85",
        "94.22 (CORING)",
        "within the noise (+0.18 ± 0.25)",
    ]


def test_figures_are_drawn_from_what_has_run_and_do_not_change(tmp_path: Path) -> None:
    base = "preresnet29-short"
    accuracies = seeds("resnet56-paper-hap-38.74", [0.934, 0.936]) | seeds("resnet56-paper-random-38.74", [0.9])
    accuracies |= seeds(f"{base}-hap-50.0", [0.94]) | seeds(f"{base}-hap-20.0", [0.93])
    accuracies |= seeds(f"{base}-eigendamage-50.0", [0.935])
    text, paths = rendered(tmp_path, accuracies)
    pictures = {path.name: path.read_text() for path in paths[1:]}
    assert set(pictures) == {"results-resnet56.svg", "results-curves.svg"}
    assert all(f"(images/{name})" in text and len(picture) < 100_000 for name, picture in pictures.items())
    assert "EigenDamage" in pictures["results-curves.svg"] and "40 epochs" in pictures["results-curves.svg"]
    assert "Random" in pictures["results-resnet56.svg"]
    linked = f"[93.50](../results/cifar10/{base}-eigendamage-50.0-seed0.json)"
    assert row_of(text, "EigenDamage", "93.50")[1:] == [linked, "not run yet", "not run yet", ""]
    again, _ = rendered(tmp_path, {})
    assert again == text and pictures == {path.name: path.read_text() for path in paths[1:]}


def test_every_method_of_a_figure_has_a_look_of_its_own() -> None:
    for target in ("resnet56", "ablation", "implants", "rankings", "head-to-head", "curves"):
        rows = make_rows([job for job in JOBS.values() if target in job.targets], {})
        assert len({row.label for row in rows}) <= len(set(STYLES)), target
    everything = {row.label for row in make_rows(list(JOBS.values()), {})}
    assert len(set(STYLES)) == len(STYLES) >= len({label for label in everything if "Torch-Pruning" not in label})


def removal() -> dict[str, Any]:
    """A record of what the loss does without single channels of a stem and one stage."""

    def row(criterion: str, own: float, given: float) -> dict[str, Any]:
        ranks = {"own": {"all": own, "within_layers": own - 0.1}, "given": {"all": given, "within_layers": given - 0.1}}
        return {"criterion": criterion} | ranks

    rows = [
        row("gate-curvature", 0.55, 0.3) | {"predicted": {"conv1": 2, "layer1": 6}},
        row("hessian", 0.41, 0.2) | {"predicted": {"conv1": 1, "layer1": 1}},
        row("magnitude", 0.39, 0.4),
    ]
    measured = {"own": {"conv1": 4, "layer1": 8}, "given": {"conv1": 5, "layer1": 5}}
    return {
        "name": "sensitivity-removal",
        "units": 4,
        "images": 1024,
        "scored_on": 512,
        "rows": rows,
        "measured": measured,
        "falls": 0.25,
    }


def test_the_reason_names_what_equation_6_leaves_out(tmp_path: Path) -> None:
    write_json(tmp_path / "results" / "sensitivity-removal.json", removal())
    text, _ = rendered(tmp_path, seeds("resnet56-paper-hap-38.74", [0.92, 0.921]))
    reason = " ".join(text.partition("## Where the paper's figure is not reached")[2].partition("\n## ")[0].split())
    assert "equation 6 says 0.25, 0.12: it" in reason and "it says 0.50, 0.75: see" in reason


def test_looks_at_the_scores_are_shown(tmp_path: Path) -> None:
    layers = {f"layer{i}": {"scores": [1.0, 0.1, 0.01], "fate": ["kept", "implanted", "removed"]} for i in range(3)}
    channel = {"layer": "conv1", "unit": 0, "exact": 1.0, "mean": [1.2, 1.1], "error": [None, 0.1]}
    folder = tmp_path / "results"
    write_json(folder / "sensitivity-layers.json", {"criterion": "hessian", "layers": layers, "flops": 0.407})
    write_json(folder / "sensitivity-probes.json", {"probes": 2, "images": 512, "channels": [channel]})
    images = {"images": 512, "rank_correlation": 0.83, "kept_in_both": 0.61, "carried_by_a_twentieth": 0.77}
    write_json(folder / "sensitivity-images.json", {"rows": [images]})
    seconds = {"exact_seconds": 0.25, "probe_seconds": 9.0, "probes": 300, "device": "cuda", "hardware": HARDWARE}
    write_json(folder / "sensitivity-seconds-resnet56.json", seconds)
    write_json(folder / "sensitivity-removal.json", removal())
    for seed, again in enumerate((0.70, 0.80)):
        row = {"flops": 0.5, "params": 0.25, "accuracy": 0.3, "estimated_again": again}
        rows = [{"criterion": "hessian", "per_cost": per_cost} | row for per_cost in (False, True)]
        name = f"sensitivity-one-shot-{seed}"
        write_json(folder / f"{name}.json", {"name": name, "scored_on": 512, "rows": rows})
    text, paths = rendered(tmp_path, {})
    assert row_of(text, "Gate curvature", "0.55")[1:] == ["0.55", "0.45", "0.30", "0.20", "0.50", "0.75"]
    assert (
        row_of(text, "Magnitude", "0.39")[1:] == ["0.39", "0.29", "0.40", "0.30", "", ""] and "25% of the rises" in text
    )
    assert row_of(text, "HAP, per cost") == ["HAP, per cost", "30.0; 75.0 ± 7.1; 25"]
    assert {path.name for path in paths[1:]} == {"results-sensitivity.svg", "results-probes.svg"}
    assert row_of(text, "Titan Xp", "ResNet56", "61")[1:4] == ["0.25", "9.00 (300 probes)", "a GPU"]
    assert row_of(text, "Titan Xp", "WideResNet32")[1] == "not run yet"
    assert row_of(text, "0.83") == ["512", "0.83", "0.61", "77"]


def test_one_command_writes_page_and_manifest(tmp_path: Path) -> None:
    job = JOBS["resnet56-paper-implant-centre-40.7-seed0"]
    record = result(job, 0.9355, model="resnet56", accuracy_in_half_precision=0.9354)
    write_json(tmp_path / "results" / f"{job.name}.json", record)
    about = {"model": "resnet56", "classes": 10, "result": job.name}
    hap.save(tmp_path / "networks" / f"{job.name}.safetensors", hap.models.build("resnet56").half(), about=about)
    places = [f"--{what}={tmp_path / what}" for what in ("results", "networks", "work")]
    found = CliRunner().invoke(app, ["reproduce", "all", "--render", f"--page={tmp_path / 'page.md'}", *places])
    assert found.exit_code == 0, found.output
    assert hap.zoo.entries(tmp_path / "networks")["resnet56-cifar10-hap-implant-40"].accuracy == 0.9354
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert row_of(text, "`resnet56-cifar10-hap-implant-40`")[1] == "93.54"
    assert (tmp_path / "images" / "results-resnet56.svg").is_file()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("resnet56-paper-hap-38.74-seed0", "{", "cannot be read"),
        ("resnet56-paper-hap-38.74-seed0", "[]", "it holds list"),
        (
            "resnet56-paper-hap-38.74-seed0",
            "{}",
            "it has no name, accuracy, params, hardware, history, dense_accuracy;",
        ),
        ("sensitivity-shapes", "{}", "it has no images, rows;"),
        ("sensitivity-seconds-x", "\x00", "cannot be read"),
    ],
)
def test_a_damaged_result_file_is_named_with_what_to_do(tmp_path: Path, name: str, content: str, why: str) -> None:
    path = tmp_path / "results" / f"{name}.json"
    path.parent.mkdir()
    path.write_text(content)
    places = [f"--{what}={tmp_path / what}" for what in ("results", "networks", "work")]
    found = CliRunner().invoke(app, ["reproduce", "all", "--render", f"--page={tmp_path / 'page.md'}", *places])
    words = " ".join(found.output.split())
    assert found.exit_code == 2 and str(path) in words and why in words
    assert "get it again from the repository, or delete it and run hap reproduce again" in words
    assert list(tmp_path.iterdir()) == [path.parent], "nothing is written of a damaged folder"


def test_a_folder_without_results_empties_no_zoo(tmp_path: Path) -> None:
    places = [f"--{what}={tmp_path / what}" for what in ("results", "networks", "work")]
    found = CliRunner().invoke(app, ["reproduce", "all", "--render", f"--page={tmp_path / 'page.md'}", *places])
    assert found.exit_code == 2 and "there is no result file in" in " ".join(found.output.split())
    assert not list(tmp_path.iterdir())


def test_the_page_of_this_repository_is_what_its_result_files_say(tmp_path: Path) -> None:
    folders = Folders(ROOT / "results" / "cifar10", ROOT / "zoo", tmp_path)
    page = write_results(folders, tmp_path / "results.md", hap.zoo.entries())[0]
    assert page.read_text(encoding="utf-8") == (ROOT / "docs" / "results.md").read_text(encoding="utf-8"), (
        "results changed: run hap reproduce all --render"
    )


@pytest.mark.parametrize("name", [p.stem for p in sorted((ROOT / "results" / "cifar10").glob("*-seed?.json"))])
def test_every_result_file_of_this_repository_is_of_a_known_run(name: str) -> None:
    record = json.loads((ROOT / "results" / "cifar10" / f"{name}.json").read_text())
    job = JOBS[name]
    assert (record["model"], record["seed"]) == (job.model, job.recipe.seed)
    looks = {"eval_every": job.recipe.eval_every}  # how often the test images are looked at changes no training
    assert record["recipe"] | looks == job.recipe.to_dict()
    assert len(record["history"]["loss"]) == job.recipe.epochs
    assert record["accuracy"] == pytest.approx(
        record["history"]["accuracy"][-1], abs=5e-4
    )  # kernels differ by an image
    assert record["revision"] and record["hardware"] and record["date"]

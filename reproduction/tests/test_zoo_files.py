"""Networks by name: the manifest says what the files are, and nothing else is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hap
from hap.cli import app
from hap.utils.atomic_files import write_json
from hap_reproduction.cifar10.jobs import jobs
from hap_reproduction.pages.zoo_manifest import write_manifest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 15_000_000


@pytest.fixture(scope="module")
def digits() -> hap.data.Data:
    return hap.data.load("digits")


@pytest.fixture
def folder(tmp_path: Path, digits: hap.data.Data) -> Path:
    """A zoo of one small network in half precision, with the result it is to reach."""
    torch.manual_seed(0)
    model = hap.models.build("digits_resnet").eval()
    state = {n: t.half().to(t.dtype) if t.is_floating_point() else t for n, t in model.state_dict().items()}
    model.load_state_dict(state)
    about = {"model": "digits_resnet", "classes": 10, "data": "digits", "result": "run", "input": [1, 8, 8]}
    count = hap.cost(model, torch.zeros(1, 1, 8, 8))
    result = {
        "name": "run",
        "model": "digits_resnet",
        "params": count.params,
        "macs": count.macs,
        "accuracy_in_half_precision": hap.evaluate(model, digits).accuracy,
    }
    write_json(tmp_path / "results" / "cifar10" / "run.json", result)
    hap.save(tmp_path / "zoo" / "run.safetensors", model.half(), about=about)
    wanted = {"small": "run", "not-trained-yet": "other"}
    write_manifest(wanted, tmp_path / "zoo", tmp_path / "results" / "cifar10")
    return tmp_path / "zoo"


def test_a_network_is_loaded_by_name_and_does_what_the_manifest_says(folder: Path, digits: hap.data.Data) -> None:
    entry = hap.zoo.entries(folder)["small"]
    model = hap.zoo.load("small", folder=folder)
    assert hap.zoo.names(folder) == ["small"] and not model.training
    assert next(model.parameters()).dtype == torch.float32
    assert hap.evaluate(model, digits).accuracy == entry.accuracy
    assert hap.cost(model, torch.zeros(1, 1, 8, 8)).params == entry.params
    assert entry.result == "results/cifar10/run.json" and (folder.parent / entry.result).is_file()


def test_hap_eval_takes_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hap.zoo, "BESIDE", folder)
    found = CliRunner().invoke(app, ["eval", "zoo:small", "--data", "digits", "--device", "cpu"])
    assert found.exit_code == 0, found.output
    assert f"{100 * hap.zoo.entries()['small'].accuracy:.2f}%" in found.output
    unknown = CliRunner().invoke(app, ["eval", "zoo:large", "--data", "digits"])
    assert unknown.exit_code == 2 and "there is no network 'large' in the zoo; it has small" in unknown.output


def test_hap_info_takes_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hap.zoo, "BESIDE", folder)
    found = CliRunner().invoke(app, ["info", "zoo:small"])
    assert found.exit_code == 0, found.output
    assert "run.safetensors, format 1" in " ".join(found.output.split()) and "digits_resnet" in found.output


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b'{"networks": []}', b'{"networks": {"small": {}}}', None])
def test_a_damaged_manifest_is_named_with_what_to_do(folder: Path, content: bytes | None) -> None:
    path = folder / "manifest.json"
    if content is None:
        found = json.loads(path.read_text())
        found["networks"]["small"]["accuracy"] = "high"
        content = json.dumps(found).encode()
    path.write_bytes(content)
    with pytest.raises(hap.HapError, match=r"manifest\.json is no manifest of networks \(.*; get it again from the"):
        hap.zoo.load("small", folder=folder)


def test_a_damaged_result_is_named_where_a_manifest_is_made(folder: Path) -> None:
    results = folder.parent / "results" / "cifar10"
    bare = {"name": "run", "model": "digits_resnet", "params": 1, "macs": 1}
    for content, why in (({"name": "run"}, "it has no model, params, macs"), (bare, "has no accuracy_in_half")):
        write_json(results / "run.json", content)
        with pytest.raises(hap.HapError, match=rf"run\.json .*{why}.*; get it again from the repository, or delete it"):
            write_manifest({"small": "run"}, folder, results)


def test_another_file_under_the_name_is_refused(folder: Path) -> None:
    file = folder / "run.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(hap.HapError, match=r"run\.safetensors has sha256 .*damaged or another file"):
        hap.zoo.load("small", folder=folder)
    file.unlink()
    with pytest.raises(hap.HapError, match=r"lists .*run\.safetensors, but the file is not there"):
        hap.zoo.load("small", folder=folder)


def test_errors_say_what_there_is(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(hap.HapError, match="no network 'tiny' in the zoo; it has small"):
        hap.zoo.load("tiny", folder=folder)
    with pytest.raises(hap.HapError, match=r"there is no .*manifest\.json; pass folder="):
        hap.zoo.names(tmp_path / "nowhere")
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(hap.HapError, match="no manifest of networks"):
        hap.zoo.names(folder)


def test_a_file_that_belongs_to_another_run_is_not_listed(folder: Path) -> None:
    results = folder.parent / "results" / "cifar10"
    record = json.loads((results / "run.json").read_text())
    write_json(results / "run.json", record | {"name": "another"})
    with pytest.raises(hap.HapError, match=r"says that it is of 'run', not of 'another'"):
        write_manifest({"small": "run"}, folder, results)


# ---- the files of this repository ---------------------------------------------------------------------------


def test_the_repositorys_networks_are_small_and_each_is_listed_or_a_starting_point() -> None:
    files = list((ROOT / "zoo").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    listed = {entry.file for entry in hap.zoo.entries().values()}
    starts = {f"{job.dense}.safetensors" for job in jobs() if not (ROOT / f"results/cifar10/{job.name}.json").exists()}
    assert {file.name for file in files} <= listed | starts


def test_the_repositorys_manifest_agrees_with_its_files_and_results() -> None:
    for name, entry in hap.zoo.entries().items():
        result = json.loads((ROOT / entry.result).read_text())
        assert hap.zoo.path(name).name == entry.file
        assert (entry.params, entry.macs) == (result["params"], result["macs"])
        model = hap.zoo.load(name)
        assert sum(p.numel() for p in model.parameters()) == entry.params

"""What is installed from a wheel works without a checkout around it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hap.cli.app import how_to_install

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
WITHOUT_THE_REPRODUCTION = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **_: ()
sys.modules["hap_reproduction"] = None
import hap
from hap.cli import main
assert callable(hap.trace) and hap.__file__.startswith(sys.path[1]), hap.__file__
sys.argv = ["hap", *sys.argv[1:]]
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src" / "hap", folder / "src" / "hap", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, folder / "out"], cwd=folder, check=True, capture_output=True)
    return zipfile.ZipFile(next((folder / "out").glob("*.whl")))


def test_a_wheel_holds_all_that_the_package_needs(wheel: zipfile.ZipFile) -> None:
    files = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "hap").rglob("*") if p.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    held = {name for name in wheel.namelist() if not name.startswith("hessian_aware_pruning-")}
    assert held == wanted and {"hap/py.typed", "hap/report/page.html"} <= held


def test_a_command_of_the_reproduction_says_how_to_install_it(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_REPRODUCTION, "reproduce", "--status"],
        cwd=tmp_path / "empty",
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 2 and not ended.stdout, ended
    assert ended.stderr == f"error: {how_to_install('reproduce')}\n"
    assert all(f"hap {command} comes with" in how_to_install(command) for command in ("reproduce", "glue", "zoo"))

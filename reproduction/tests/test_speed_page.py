"""docs/speed.md is what the files of the benchmarks say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_its_result_files_say() -> None:
    made = runpy.run_path(str(ROOT / "benchmarks" / "page.py"))["page"]()
    assert made == (ROOT / "docs" / "speed.md").read_text(encoding="utf-8"), "run python benchmarks/page.py"
    assert made.count("\n| ") > 10

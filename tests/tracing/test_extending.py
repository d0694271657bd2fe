"""docs/extending.md holds: its blocks run as they stand, assertions and all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hap
from hap.implants import KINDS
from hap.scoring import CRITERIA

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def _tables() -> object:
    tables: list[dict] = [hap.rules.RULES, CRITERIA, KINDS]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.mark.usefixtures("_tables")
def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)


def test_a_rule_takes_less_than_ten_lines() -> None:
    body = re.search(r"def mix_rule.*?\n\n", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert body is not None and len(body[0].splitlines()) < 10

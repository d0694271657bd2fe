"""docs/extending.md holds: its blocks run as they stand, assertions and all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hap

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def _rules() -> object:
    before = dict(hap.rules.RULES)
    yield
    hap.rules.RULES.clear()
    hap.rules.RULES.update(before)


@pytest.mark.usefixtures("_rules")
def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)


def test_a_rule_takes_less_than_ten_lines() -> None:
    body = re.search(r"def mix_rule.*?\n\n", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert body is not None and len(body[0].splitlines()) < 10

"""Each operator is declared once, and whatever has a rule is declared."""

from __future__ import annotations

import pytest
import torch

import hap
from hap.graph.operator_families import OPERATORS, family
from hap.tracing.rules.registry import OF_FAMILIES, rule


def test_operators_with_a_rule_have_declared_traits() -> None:
    names = {name.removeprefix("aten::") for name in hap.rules.RULES if name.startswith("aten::") or "::" not in name}
    assert names <= OPERATORS.keys(), sorted(names - OPERATORS.keys())


def test_each_family_has_one_rule_and_each_operator_in_it_goes_by_that() -> None:
    assert {operator.family for operator in OPERATORS.values()} - {""} == OF_FAMILIES.keys()
    for name, operator in OPERATORS.items():
        key = name if name == "getitem" else f"aten::{name}"
        assert hap.rules.RULES.get(key) is OF_FAMILIES.get(operator.family), name


def test_a_rule_for_operators_that_nobody_declared_is_refused() -> None:
    with pytest.raises(ValueError, match="no operator is declared in the family 'undeclared'"):
        rule("undeclared")(lambda context, node: None)


@pytest.mark.parametrize("name", sorted({name for name in OPERATORS if not name.endswith("_")} - {"getitem"}))
def test_declared_operators_exist(name: str) -> None:
    assert hasattr(torch.ops.aten, name)


def test_hardswish_is_declared_in_one_place() -> None:
    assert "hardswish" in family("pointwise") and "hardswish_" in family("pointwise")
    assert hap.rules.RULES["aten::hardswish"] is hap.rules.pointwise

"""Copies that a trace makes of itself."""

from dataclasses import fields

import numpy as np
import torch
from torch import nn

import hap
from hap.groups.types import SizeAttribute


def two_layers() -> hap.groups.groups.Groups:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 2)).eval()
    return hap.trace(model, torch.randn(2, 4))


def test_kept_classes_are_gone_from_a_relabelled_copy() -> None:
    groups = two_layers()
    to = np.arange(groups.classes)
    to[groups["0"].classes] = 0
    copy = groups.relabelled(to)
    assert list(groups) == ["0", "2"] and list(copy) == ["2"]
    assert groups.traits.spanned and not copy.traits.spanned
    assert not copy.axes["0.weight", 0].any() and copy.axes["2.weight", 0].any()
    assert all(not np.isin(x.classes, groups["0"].classes).any() for x in copy.rewiring.size_attributes)
    assert hap.draft(copy, {"2": [1]}).cuts == hap.draft(groups, {"2": [1]}).cuts


def test_relabelling_with_the_same_classes_changes_nothing() -> None:
    groups = two_layers()
    copy = groups.relabelled(np.arange(groups.classes))
    for field in fields(groups):
        assert str(getattr(copy, field.name)) == str(getattr(groups, field.name))


def test_a_restricted_copy_has_nothing_of_these_modules() -> None:
    copy = two_layers().restricted(["0"])
    assert list(copy) == ["2"] and not any(name.startswith("0.") for name in copy.shapes)
    assert not any(name.startswith("0.") for name, _ in copy.axes)
    assert [x.weight for x in copy.costs.weight_macs] == ["2.weight", "3.weight"]


def test_more_to_rewire_comes_after_the_rest() -> None:
    groups, size = two_layers(), SizeAttribute("2", "width", np.array([1, 2]))
    assert groups.with_rewiring(size_attributes=[size]).rewiring.size_attributes[-1] is size

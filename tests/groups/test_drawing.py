"""The drawing of a trace: a row for each layer, a rail for each group, what stays and why."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import hap

SVG = "{http://www.w3.org/2000/svg}"


def _texts(drawing: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


@pytest.mark.parametrize("coupling", ["joint", "union"])
def test_every_layer_and_every_group_is_drawn(coupling: str) -> None:
    groups = hap.trace(hap.models.build("resnet20").eval(), torch.randn(1, 3, 32, 32), coupling=coupling)
    drawing = groups.to_svg()
    texts = _texts(drawing)
    assert f"{groups.units} units in {len(groups)} groups, {coupling} coupling" in texts
    assert {t.weight.removesuffix(".weight") for t in groups.costs.weight_macs} <= set(texts)
    titles = [t.text or "" for t in ElementTree.fromstring(drawing).iter(f"{SVG}title")]
    assert sorted(t.partition(":")[0] for t in titles) == sorted(groups)
    dots = sum(len({p.weight for p in g.producers}) for g in groups.values())
    assert len(re.findall(r'<circle cx="[^"]*" cy="[^"]*" r="5"', drawing)) == dots


def test_what_stays_is_a_square_with_its_reason(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    groups = hap.trace(net, torch.randn(1, 4))
    path = tmp_path / "deep" / "net.svg"
    groups.graph(path)
    drawing = path.read_text(encoding="utf-8")
    assert drawing == groups.to_svg()
    assert drawing.count('<rect class="frozen"') == 1
    assert "stays: an output of the model" in _texts(drawing)
    assert "6 units" in _texts(drawing)


def test_rails_in_one_lane_do_not_overlap() -> None:
    groups = hap.trace(hap.models.build("resnet20").eval(), torch.randn(1, 3, 32, 32))
    rails = re.findall(r'd="M([\d.]+) ([\d.]+)V([\d.]+)"', groups.to_svg())
    spans = sorted((float(x), float(top), float(bottom)) for x, top, bottom in rails)
    assert all(a[2] < b[1] for a, b in pairwise(spans) if a[0] == b[0])


def test_names_are_escaped() -> None:
    net = nn.ModuleDict({"a<b": nn.Linear(4, 6), "c": nn.Linear(6, 3)})
    net.forward = lambda x: net["c"](net["a<b"](x))  # type: ignore[method-assign]
    assert "a<b" in _texts(hap.trace(net.eval(), torch.randn(1, 4)).to_svg())


def test_a_model_without_groups_is_drawn() -> None:
    groups = hap.trace(nn.Linear(4, 3).eval(), torch.randn(1, 4))
    assert "0 units in 0 groups, joint coupling" in _texts(groups.to_svg())

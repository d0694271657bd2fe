"""rewrite: models whose forward fixes its sizes lose units in the graph that torch.export captures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hap
from cases import CASES
from checks import check_cost, gap, random_plan, run, traced


class Stubborn(nn.Module):
    """Attention that takes the width of its heads from that of its input: no attribute can tell it of fewer heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 3)
        self.fc1, self.fc2 = nn.Linear(16, 12), nn.Linear(6, 16)
        self.mix = nn.Conv1d(12, 12, 3, padding=1, groups=12)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        z = nn.functional.conv1d(self.fc1(x).transpose(1, 2), self.mix.weight, None, 1, 1, 1, 12).transpose(1, 2)
        return self.head(x + self.fc2(z[..., :6] * z[..., 6:]))


def stubborn() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stubborn().double().eval(), torch.randn(2, 5, 16, dtype=torch.float64)


def test_what_a_forward_counts_on_goes_from_its_graph() -> None:
    model, example = stubborn()
    in_place = hap.trace(model, example)
    assert list(in_place) == ["qkv"]
    assert in_place.traits.zero_padded == set(in_place["qkv"].classes.tolist())  # zeros stand in
    graph, groups = hap.rewrite(model, example)
    assert {n: len(g) for n, g in groups.items()} == {"qkv": 4, "fc1": 6}
    assert gap(run(graph, example), run(model, example)) <= 1e-12


@pytest.mark.parametrize(
    "units", [{"qkv": [0]}, {"qkv": [1, 2, 3]}, {"fc1": [0, 5]}, {"qkv": [0, 2], "fc1": [0, 1, 2]}]
)
def test_the_pruned_graph_is_the_model_with_zeros(units: dict[str, list[int]]) -> None:
    model, example = stubborn()
    graph, groups = hap.rewrite(model, example)
    plan = hap.draft(groups, units)
    hap.apply_(graph, plan, example)
    with torch.no_grad():
        for name, dim in (c for n in units for c in groups[n].consumers):
            dead = torch.from_numpy(~groups.alive(_kept(groups, units))[groups.axes[name, dim]])
            model.get_parameter(name).index_fill_(dim, dead.nonzero().flatten(), 0)
    assert gap(run(graph, example), run(model, example)) <= 1e-10
    check_cost(graph, plan.after, example)


def _kept(groups: hap.groups.types.Groups, units: dict[str, list[int]]) -> Any:
    kept = groups.all_kept()
    for name, gone in units.items():
        kept[groups[name].classes[gone]] = False
    return kept


@pytest.mark.parametrize(
    "name",
    [
        "hard_coded_view",
        "shuffle_unit",
        "attention_by_hand",
        "split_concat",
        "gated_unit",
        "grouped_many",
        "convnext_block",
        "multihead_attention",
    ],
)
def test_graphs_of_the_table_are_checked_as_they_are_pruned(name: str) -> None:
    model, example = CASES[name]()
    graph, groups = hap.rewrite(model, example, stream=True)
    assert set(traced(name, "joint")) <= set(groups) or name in ("shuffle_unit",)
    for seed in range(3):
        plan = random_plan(groups, seed, 0.4)
        pruned = hap.apply_(copy.deepcopy(graph), plan, example)
        check_cost(pruned, plan.after, example)

"""Random residual, concatenating and splitting networks: pruned = masked and planned = counted on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hap
from cases import images, randomise
from checks import check_pruned, check_tight, random_plan, random_scores, reachable

WIDTHS = st.integers(2, 6)
KERNELS = st.sampled_from([1, 2, 3])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("conv"), WIDTHS, KERNELS, st.booleans()),
        st.tuples(st.just("residual"), WIDTHS, KERNELS, st.booleans()),
        st.tuples(st.just("project"), WIDTHS, KERNELS, st.booleans()),
        st.tuples(st.just("concat"), WIDTHS, KERNELS, st.booleans()),
        st.tuples(st.just("gate"), WIDTHS, KERNELS, st.booleans()),
        st.tuples(st.just("split"), WIDTHS, KERNELS, st.booleans()),
        st.tuples(st.just("depthwise"), WIDTHS, KERNELS, st.booleans()),
        st.tuples(st.just("grouped"), WIDTHS, KERNELS, st.booleans()),
        st.tuples(st.just("excite"), WIDTHS, KERNELS, st.booleans()),
    ),
    min_size=1,
    max_size=4,
)


def layer(a: int, b: int, kernel: int, norm: bool, **options: Any) -> nn.Module:
    """A convolution that keeps the size of maps, with a norm or a bias behind it."""
    padding = nn.Identity() if kernel != 2 else nn.ReplicationPad2d((0, 1, 0, 1))
    conv = nn.Conv2d(a, b, kernel, padding=1 if kernel == 3 else 0, bias=not norm, **options)
    return nn.Sequential(padding, conv, nn.BatchNorm2d(b) if norm else nn.Identity())


class Step(nn.Module):
    """One production of the grammar: reads `width` channels, returns `self.width`."""

    def __init__(self, kind: str, width: int, out: int, kernel: int, norm: bool):
        super().__init__()
        self.kind, self.width = kind, width
        if kind in ("conv", "concat"):
            self.a = layer(width, out, kernel, norm)
            self.width = out if kind == "conv" else width + out
        elif kind == "residual":
            self.a, self.b = layer(width, out, kernel, norm), layer(out, width, 3, norm)
        elif kind == "project":
            self.a, self.b, self.width = layer(width, out, kernel, norm), layer(width, out, 1, not norm), out
        elif kind == "gate":
            self.a, self.width = layer(width, 2 * out, kernel, norm), out
        elif kind == "split":
            self.a, self.b, self.width = layer(width, 2 * out, kernel, norm), layer(out, out, 3, norm), 2 * out
        elif kind == "depthwise":
            self.a = layer(width, 2 * width, kernel, norm, groups=width)
            self.width = 2 * width
        elif kind == "grouped":
            self.a, self.b = layer(width, 2 * out, 1, norm), layer(2 * out, 4, kernel, norm, groups=2)
            self.width = 4
        else:
            self.a, self.b = nn.Conv2d(width, out, 1), nn.Conv2d(out, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("conv", "depthwise"):
            return F.relu(self.a(x))
        if self.kind == "concat":
            return torch.cat([x, F.relu(self.a(x))], 1)
        if self.kind == "residual":
            return F.relu(x + self.b(F.relu(self.a(x))))
        if self.kind == "project":
            return F.relu(self.a(x) + self.b(x))
        if self.kind == "gate":
            a, b = self.a(x).chunk(2, 1)
            return a * torch.sigmoid(b)
        if self.kind == "split":
            a, b = self.a(x).chunk(2, 1)
            return torch.cat([F.relu(a), self.b(b)], 1)
        if self.kind == "grouped":
            return F.relu(self.b(F.relu(self.a(x))))
        return x * torch.sigmoid(self.b(F.relu(self.a(x.mean((2, 3), keepdim=True)))))


def network(steps: list[tuple[str, int, int, bool]]) -> nn.Module:
    torch.manual_seed(len(steps))
    layers, width = [nn.Conv2d(3, 4, 3, padding=1)], 4
    for step in steps:
        kind, out, kernel, norm = step
        layers.append(Step(kind, width, out, kernel, norm))
        width = layers[-1].width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 3))
    return randomise(model.double()).eval()


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, coupling=st.sampled_from(["joint", "union"]), seed=st.integers(0, 99), share=st.floats(0.1, 0.9))
def test_random_plans_on_random_networks(steps: Any, coupling: str, seed: int, share: float) -> None:
    model, example = network(steps), images(2, 3, 6, 6)
    groups = hap.trace(model, example, coupling)
    assert groups.units >= 1
    for implant in (None, hap.Pointwise(init="center"), hap.DepthwiseSeparable(), hap.SpatialLowRank(rank=1)):
        plan = random_plan(groups, seed, share, implant)
        assert plan.exact
        check_pruned(model, groups, plan, example)


def planned(groups: Any, budget: hap.Budget, implant: hap.Implant | None) -> hap.Plan | None:
    """The plan, or None if the budget is out of reach."""
    try:
        return hap.plan(groups, random_scores(groups), budget, implant, hap.Limits(per_layer=1.0))
    except hap.HapError as error:
        if "cannot be reached" in str(error) or "nothing in this model" in str(error):
            return None
        raise


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    steps=STEPS,
    coupling=st.sampled_from(["joint", "union"]),
    kind=st.sampled_from(["params", "flops", "channels"]),
    fraction=st.floats(0.3, 0.98),
    ratio=st.sampled_from([None, 0.3, 1.0]),
)
def test_budgets_on_random_networks(steps: Any, coupling: str, kind: str, fraction: float, ratio: float | None) -> None:
    model, example = network(steps), images(2, 3, 6, 6)
    groups = hap.trace(model, example, coupling)
    budget = hap.Budget(**{kind: fraction})
    implant = None if ratio is None or kind == "channels" else hap.Pointwise(ratio, init="center")
    plan = planned(groups, budget, implant)
    if plan is None:
        assert implant is not None or not reachable(groups, kind, [fraction])
        return
    check_tight(groups, plan, budget)
    check_pruned(model, groups, plan, example)
    assert hap.Plan.from_json(plan.to_json()) == plan

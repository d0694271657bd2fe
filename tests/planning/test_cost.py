"""cost: parameters and multiply-adds against published sizes and sums done by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd

import hap
from cases import CASES
from checks import TRACES, assert_unchanged, check_cost, snapshot, traced


@pytest.mark.parametrize(
    ("name", "params", "millions", "digits"),
    [("resnet56", 855_770, 125.75, 2), ("wide_resnet32", 7_427_914, 1_100.68, 2), ("resnet50", 25_557_032, 4_090, -1)],
)
def test_published_sizes(name: str, params: int, millions: float, digits: int) -> None:
    model = hap.models.build(name)
    count = hap.cost(model, torch.randn(1, *hap.models.info(name).input_shape))
    assert count.params == params
    assert round(count.macs / 1e6, digits) == millions
    assert sum(v for n, v in count.by_module.items() if not list(model.get_submodule(n).children())) == count.macs


@pytest.mark.parametrize(("name", "coupling"), TRACES)
def test_the_dense_model_costs_what_the_plan_says(name: str, coupling: str) -> None:
    model, example = CASES[name]()
    check_cost(model, hap.draft(traced(name, coupling), {}).before, example)


def test_by_hand() -> None:
    """Each layer by its own formula, batch of two included."""
    layers = {
        nn.Conv2d(3, 6, 3, padding=1): (2, 3, 8, 8, 2 * 6 * 64 * 27),
        nn.Conv2d(4, 8, 3, stride=2, groups=2): (2, 4, 9, 9, 2 * 8 * 16 * 2 * 9),
        nn.Conv2d(4, 4, 3, groups=4, dilation=2): (1, 4, 9, 9, 4 * 25 * 9),
        nn.ConvTranspose2d(4, 6, 2, stride=2): (1, 4, 5, 5, 25 * 4 * 6 * 4),
        nn.ConvTranspose2d(4, 6, 3, groups=2): (1, 4, 5, 5, 25 * 4 * 3 * 9),
        nn.Conv1d(3, 5, 3): (2, 3, 10, 2 * 5 * 8 * 9),
        nn.Conv3d(2, 3, 2): (1, 2, 4, 4, 4, 3 * 27 * 16),
        nn.Linear(7, 5): (4, 3, 7, 12 * 35),
    }
    for layer, (*shape, macs) in layers.items():
        count = hap.cost(layer, torch.randn(shape))
        assert count.macs == macs, layer
        assert count.params == sum(p.numel() for p in layer.parameters())


def test_by_module_and_uncounted() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 5)))
    count = hap.cost(model, torch.randn(2, 4))
    assert count.by_module["0"] == 48 and count.by_module["2.0"] == count.by_module["2"] == 60
    assert count.macs == 108
    assert count.uncounted == {"aten::relu": 1}


def test_batch_norm_and_activations_are_listed_not_counted() -> None:
    model, example = CASES["squeeze_excite"]()
    count = hap.cost(model, example)
    assert {"aten::relu", "aten::sigmoid", "aten::add", "aten::mul"} <= {n.rstrip("_") for n in count.uncounted}
    assert any("batch_norm" in n for n in count.uncounted)
    assert not any("conv" in n or "addmm" in n for n in count.uncounted)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_is_counted() -> None:
    assert hap.cost(Attention(), torch.randn(2, 5, 8)).macs == 2 * 5 * 8 * 24 + 2 * (2 * 2 * 5 * 5 * 4)


@pytest.mark.parametrize("name", ["identity_and_dropout", "module_with_two_names", "tied_parameters"])
def test_counting_leaves_the_model(name: str) -> None:
    model, example = CASES[name]()
    model.train()
    before = snapshot(model)
    hap.cost(model, example)
    assert_unchanged(model, before)


@pytest.mark.parametrize("implant", [None, hap.DepthwiseSeparable(0.4), hap.SpatialLowRank(0.4), hap.Pointwise(0.4)])
@pytest.mark.parametrize("coupling", ["joint", "union"])
@pytest.mark.parametrize("name", ["residual", "inception", "bottleneck"])
def test_activations_are_what_the_layers_write(name: str, coupling: str, implant: hap.Implant | None) -> None:
    model, example = CASES[name]()
    groups = traced(name, coupling)
    scores = hap.score(model, groups, None, None, "random")
    plan = hap.plan(groups, scores, hap.Budget(activations=0.9, flops=0.7), implant)
    assert 0 < plan.after.activations <= 0.9 * plan.before.activations
    for cost, network in ((plan.before, model), (plan.after, hap.apply_(copy.deepcopy(model), plan, example))):
        assert _written(network, example) == cost.activations


def _written(model: nn.Module, example: torch.Tensor) -> int:
    """Values that layers write themselves, before hooks put branches in their place or implants beside them."""
    sizes = []
    for module in model.modules():
        if isinstance(module, nn.Linear | _ConvNd):
            module.register_forward_hook(lambda m, args, out: sizes.append(out.numel()), prepend=True)
    model(example)
    return sum(sizes)

"""Networks under masks take the same steps in the smaller shape that they share."""

from __future__ import annotations

import copy

import pytest
import torch
from test_masking import steps
from torch import Tensor, nn

import hap
from cases import CASES
from checks import gap, random_plan, run, traced
from hap.data import Data, Split
from hap.planning.plan import Plan
from hap_reproduction.cifar10.masking import dense_form, pruned_form
from hap_reproduction.cifar10.stacking import train_stacked
from hap_reproduction.cifar10.training import train_many
from hap_reproduction.cifar10.trimming import MULTIPLE, Trimmed, common_widths, trim

CLASSES = 5


class Wide(nn.Module):
    """Two residual blocks and a chain, wide enough that a width which is a multiple of eight saves something."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.inner = nn.ModuleList(nn.Conv2d(16, 40, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(40) for _ in range(2))
        self.outer = nn.ModuleList(nn.Conv2d(40, 16, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(16, 24, 3)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inner, norm, outer in zip(self.inner, self.norms, self.outer, strict=True):
            x = (x + outer(norm(inner(x)).relu())).relu()
        return self.head(self.last(x).relu().mean((2, 3)))


def example() -> Tensor:
    return torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def wide(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Wide().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def pruned_ones(count: int, implant: hap.Implant | None = None) -> list[tuple[nn.Module, Plan, nn.Module]]:
    """Networks pruned at random from dense ones of their own: pruned, plan, dense."""
    found = []
    for seed in range(count):
        dense = wide(seed)
        plan = random_plan(hap.trace(dense, example(), "union"), seed, 0.6, implant=implant)
        found.append((hap.apply_(copy.deepcopy(dense), plan, example()), plan, dense))
    return found


def trimmed_ones(made: list[tuple[nn.Module, Plan, nn.Module]]) -> list[Trimmed]:
    groups = hap.trace(wide(0), example(), "union")
    forms = [dense_form(*one) for one in made]
    widths = common_widths(groups, [masks for _, masks in forms])
    assert {"inner.0", "inner.1"} <= set(widths) <= {"inner.0", "inner.1", "last"}
    assert all(width % MULTIPLE == 0 for width in widths.values())
    return [trim(model, masks, groups, widths, example()) for model, masks in forms]


@pytest.mark.parametrize("implant", [None, hap.Pointwise(ratio=0.5, init="center")], ids=["removed", "implanted"])
def test_all_have_one_shape_and_take_the_steps_of_the_pruned(implant: hap.Implant | None) -> None:
    made = pruned_ones(3, implant)
    found = trimmed_ones(made)
    shapes = [{n: p.shape for n, p in one.model.named_parameters()} for one in found]
    assert shapes[0] == shapes[1] == shapes[2] and shapes[0]["inner.0.weight"][0] < 40
    batches = [torch.randn(4, 3, 8, 8, dtype=torch.float64) for _ in range(5)]
    for (pruned, plan, dense), one in zip(made, found, strict=True):
        assert gap(run(one.model, example()), run(pruned, example())) <= 1e-12
        before = copy.deepcopy(pruned.state_dict())
        steps(pruned, batches, {})
        steps(one.model, batches, one.masks)
        again = pruned_form(one.restored(dense), plan, example())
        assert gap(run(again, example()), run(pruned, example())) <= 1e-8
        for key, value in pruned.state_dict().items():
            torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=1e-8)
        assert max(float((v - before[k]).abs().max()) for k, v in pruned.state_dict().items()) > 1e-3


def test_they_train_as_one_network() -> None:
    generator = torch.Generator().manual_seed(0)
    split = Split(torch.randint(0, 256, (32, 3, 8, 8), dtype=torch.uint8, generator=generator), torch.arange(32) % 5)
    data = Data(split, split, CLASSES, (0.5,) * 3, (0.25,) * 3, "noise", 1, True)
    found = [Trimmed(one.model.float(), one.masks, one.plan) for one in trimmed_ones(pruned_ones(2))]
    alone = [copy.deepcopy(one.model) for one in found]
    recipes = [hap.Recipe(2, batch=16, lr=0.02, seed=seed) for seed in range(2)]
    masks = [one.masks for one in found]
    together = train_stacked([one.model for one in found], data, recipes, masks=masks, stack=2)
    assert [history.stack for history in together] == [2, 2]
    for model, recipe, mask, history in zip(alone, recipes, masks, together, strict=True):
        [expected] = train_many([model], data, [recipe], masks=[mask])
        assert history.loss == pytest.approx(expected.loss, rel=1e-4)


@pytest.mark.parametrize("name", ["residual", "preactivation", "bottleneck", "dense_block", "bias_without_norm"])
def test_what_is_not_wide_enough_or_not_plain_stays_whole(name: str) -> None:
    """Small networks: nothing is trimmed to a width that is no multiple, and what is trimmed computes the same."""
    dense, x = CASES[name]()
    groups = traced(name, "union")
    plan = random_plan(groups, 1, 0.6)
    whole, masks = dense_form(hap.apply_(copy.deepcopy(dense), plan, x), plan, dense)
    widths = common_widths(groups, [masks])
    found = trim(whole, masks, groups, widths, x)
    assert all(width % MULTIPLE == 0 for width in widths.values())
    assert gap(run(found.model, x), run(whole, x)) <= 1e-12
    assert gap(run(found.restored(dense), x), run(whole, x)) <= 1e-12

"""A pruned network trained in its dense shape under masks takes the steps of the pruned network itself."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hap
from cases import CASES
from checks import gap, random_plan, run, traced
from hap.data import Data, Split
from hap_reproduction.cifar10.masking import dense_form, pruned_form, trains_alike
from hap_reproduction.cifar10.training import train_many


def steps(model: nn.Module, batches: list[Tensor], masks: dict[str, Tensor]) -> None:
    """SGD with momentum and weight decay on the mean square of all outputs' distance from 1, in train mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    model.train()
    for x in batches:
        optimizer.zero_grad()
        sum((out - 1).square().mean() for out in pytree.tree_leaves(model(x))).backward()
        optimizer.step()
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)
    model.eval()


@pytest.mark.parametrize("coupling", ["union", "joint"])
@pytest.mark.parametrize("init", ["zero", "center", None])
@pytest.mark.parametrize("name", ["residual", "preactivation", "bottleneck", "bias_without_norm", "dense_block"])
def test_both_forms_take_the_same_steps(name: str, init: str | None, coupling: str) -> None:
    dense, example = CASES[name]()
    groups = traced(name, coupling)
    plan = random_plan(groups, 1, 0.6, implant=hap.Pointwise(ratio=1.0, init=init) if init else None)
    assert trains_alike(plan) and plan.cuts and (init is None or plan.grafts)
    pruned = hap.apply_(copy.deepcopy(dense), plan, example)
    masked, masks = dense_form(pruned, plan, dense)
    assert gap(run(masked, example), run(pruned, example)) <= 1e-12
    batches = [torch.randn(4, *example.shape[1:], dtype=torch.float64) for _ in range(6)]
    before = copy.deepcopy(pruned.state_dict())
    steps(pruned, batches, {})
    steps(masked, batches, masks)
    for parameter, mask in masks.items():
        assert not masked.get_parameter(parameter)[mask == 0].any()
    again = pruned_form(masked, plan, example)
    assert gap(run(again, example), run(pruned, example)) <= 1e-8
    for key, value in pruned.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=1e-8)
    moved = [(value - before[key]).abs().max() for key, value in pruned.state_dict().items() if "weight" in key]
    assert torch.stack(moved).median() > 1e-3


def test_the_least_squares_start_of_implants_is_kept() -> None:
    dense, example = CASES["residual"]()
    plan = random_plan(traced("residual", "union"), 2, 0.6, implant=hap.Pointwise(ratio=1.0))
    pruned = hap.apply_(copy.deepcopy(dense), plan, example, batches=[(example, example)])
    masked, masks = dense_form(pruned, plan, dense)
    graft = plan.grafts[0]
    rows = masked.get_parameter(graft.weight)[list(graft.rows)]
    assert rows[..., 1, 1].any() and masks[graft.weight][list(graft.rows)].sum((2, 3)).max() == 1
    assert gap(run(masked, example), run(pruned, example)) <= 1e-12
    assert gap(run(pruned_form(masked, plan, example), example), run(pruned, example)) <= 1e-12


def test_what_does_not_train_alike_is_refused() -> None:
    dense, example = CASES["residual"]()
    for implant in (hap.SpatialLowRank(ratio=1.0), hap.DepthwiseSeparable(ratio=1.0)):
        plan = random_plan(traced("residual", "union"), 1, 0.6, implant=implant)
        pruned = hap.apply_(copy.deepcopy(dense), plan, example)
        with pytest.raises(hap.HapError, match=f"implants are {type(implant).__name__}.*Train the pruned network"):
            dense_form(pruned, plan, dense)
    assert not trains_alike(dataclasses.replace(plan, implant=None, exact=False))


def test_a_network_that_was_not_held_at_zero_is_refused() -> None:
    dense, example = CASES["residual"]()
    plan = random_plan(traced("residual", "union"), 1, 0.6)
    with pytest.raises(hap.HapError, match="is not zero everywhere the plan removes it"):
        pruned_form(dense, plan, example)


# ---- the training loop --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8, generator=generator)
    split = Split(images, torch.arange(48) % 5)
    return Data(split, split, 5, (0.5,) * 3, (0.25,) * 3, "noise", 1, True)


def small_pair() -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """A pruned network with implants in float32, and the same in its dense shape with its masks."""
    dense, _ = CASES["residual"]()
    plan = random_plan(traced("residual", "union"), 1, 0.6, implant=hap.Pointwise(ratio=1.0, init="zero"))
    pruned = hap.apply_(copy.deepcopy(dense).float(), plan, torch.randn(2, 3, 8, 8))
    return pruned, *dense_form(pruned, plan, dense.float())


def test_train_many_holds_masks_and_resumes(data: Data, tmp_path: Path) -> None:
    recipe = hap.Recipe(3, batch=16, lr=0.02, ema=0.9, nesterov=True)
    pruned, masked, masks = small_pair()
    histories = train_many([pruned, masked], data, [recipe, recipe], masks=[None, masks])
    assert histories[1].loss == pytest.approx(histories[0].loss, rel=1e-4)
    assert all(not masked.get_parameter(name)[mask == 0].any() for name, mask in masks.items())
    _, other, _ = small_pair()
    for _ in range(recipe.epochs):
        again = train_many([other], data, [recipe], masks=[masks], checkpoint_dir=tmp_path, seconds=0.0)
    assert again[0].loss == histories[1].loss
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), masked.parameters(), strict=True))
    for wrong in (None, {name: torch.ones_like(mask) for name, mask in masks.items()}):
        with pytest.raises(hap.HapError, match="networks pruned in another way"):
            train_many([other], data, [recipe], masks=[wrong], checkpoint_dir=tmp_path)


def test_masks_that_do_not_fit_are_refused(data: Data) -> None:
    _, masked, masks = small_pair()
    recipe = hap.Recipe(1, batch=16)
    with pytest.raises(hap.HapError, match="1 models and 2 masks"):
        train_many([masked], data, [recipe], masks=[masks, None])
    with pytest.raises(hap.HapError, match=r"mask of head\.weight has shape \(2,\): expected \(5, 8\)"):
        train_many([masked], data, [recipe], masks=[{"head.weight": torch.ones(2)}])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_steps_hold_masks_on_cuda(data: Data, precision: str) -> None:
    recipe = hap.Recipe(4, batch=8, lr=0.02, ema=0.9, precision=precision)
    pruned, masked, masks = small_pair()
    histories = train_many([pruned.cuda(), masked.cuda()], data, [recipe, recipe], masks=[None, masks])
    assert histories[1].loss == pytest.approx(histories[0].loss, rel=0.05)
    assert all(not masked.get_parameter(name)[mask.cuda() == 0].any() for name, mask in masks.items())

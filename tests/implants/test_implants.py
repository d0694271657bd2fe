"""Implants: what a 1x1 in place of a k x k channel computes, where it starts, and that every kind fits everywhere."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from cases import CASES
from checks import check_pruned, gap, implantable, random_plan, run, traced, traces

KINDS = {
    "center": hap.Pointwise(init="center"),
    "zero": hap.Pointwise(init="zero"),
    "lstsq": hap.Pointwise(init="lstsq"),
    "low-rank": hap.LowRank(),
    "separable": hap.DepthwiseSeparable(),
    "spatial": hap.SpatialLowRank(rank=2),
    "spatial-1": hap.SpatialLowRank(rank=1),
}
GEOMETRIES = {
    "plain": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "padding": 1, "stride": 2},
    "dilated": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "even": {"kernel_size": 4, "padding": 1},
    "valid": {"kernel_size": 3},
    "five, too little padding": {"kernel_size": 5, "padding": 1, "stride": 3},
    "oblong": {"kernel_size": (1, 3), "padding": (0, 1)},
    "much padding": {"kernel_size": 3, "padding": 3},
    "uneven": {"kernel_size": (2, 5), "padding": (2, 1), "stride": (2, 1), "dilation": (3, 1)},
}
geometry = pytest.mark.parametrize("shape", GEOMETRIES.values(), ids=list(GEOMETRIES))


def two_layers(bias: bool = True, **options: Any) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, bias=bias, **options), nn.ReLU(), nn.Conv2d(6, 2, 1)).double().eval()
    example = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    return model, example, hap.trace(model, example)


@geometry
@pytest.mark.parametrize("bias", [False, True])
def test_pointwise_is_the_kernel_with_only_its_centre(shape: dict[str, Any], bias: bool) -> None:
    """Promise 5."""
    model, example, groups = two_layers(bias, **shape)
    plan = hap.draft(groups, {"0": [1]}, {"0": [0, 4, 5]}, hap.Pointwise(init="center"))
    pruned = check_pruned(model, groups, plan, example)
    bare = copy.deepcopy(model)
    rows, columns = ((k - 1) // 2 for k in bare[0].kernel_size)
    with torch.no_grad():
        for row in (0, 4, 5):
            centre = bare[0].weight[row, :, rows, columns].clone()
            bare[0].weight[row] = 0
            bare[0].weight[row, :, rows, columns] = centre
        bare[2].weight[:, 1] = 0
    assert gap(run(bare, example), run(pruned, example)) <= 1e-12
    assert pruned[0].implant.conv.kernel_size == (1, 1)
    assert torch.equal(pruned[0].implant.kernel(), bare[0].weight[[0, 4, 5]])


@geometry
@pytest.mark.parametrize("implant", KINDS.values(), ids=list(KINDS))
def test_every_kind_in_every_geometry(shape: dict[str, Any], implant: hap.Implant) -> None:
    model, example, groups = two_layers(**shape)
    plan = hap.draft(groups, {"0": [1]}, {"0": [0, 4, 5]}, implant)
    pruned = check_pruned(model, groups, plan, example)
    kernel = pruned[0].implant.kernel()  # what it says it equals is what it computes
    rows = F.conv2d(example, kernel, model[0].bias[[0, 4, 5]], model[0].stride, model[0].padding, model[0].dilation)
    assert gap([rows], [pruned[0].implant(example)]) <= 1e-10


NAMES = """
residual bottleneck preactivation dense_block inception concatenated_flattened split_concat gated_unit
repeated_channels rolled_and_flipped channel_shuffle residual_with_branches subtraction_and_pools
unet_transposed unet_upsampled squeeze_excite even_kernels dilated tied_parameters shared_module
module_with_two_names functional_weight grouped_few scaled_residual same_padding reflect_padding two_inputs
named_inputs without_batch_axis one_channel vgg pixel_shuffle group_norm_few
""".split()


@pytest.mark.parametrize(("name", "coupling"), traces(NAMES))
def test_every_kind_on_the_table(name: str, coupling: str) -> None:
    model, example = CASES[name]()
    groups = traced(name, coupling)
    for seed, implant in enumerate(KINDS.values()):
        check_pruned(model, groups, random_plan(groups, seed, 0.7, implant), example)


@pytest.mark.parametrize(
    ("name", "coupling"),
    traces("plain residual preactivation dense_block inception vgg concatenated_flattened unet_upsampled".split()),
)
def test_no_gather_where_channels_can_be_sorted(name: str, coupling: str) -> None:
    groups = traced(name, coupling)
    plans = [random_plan(groups, seed, 0.6, hap.Pointwise(init="center")) for seed in range(3)]
    assert any(p.grafts for p in plans)
    assert all(graft.order is None for p in plans for graft in p.grafts)


@pytest.mark.parametrize("name", ["gated_unit", "repeated_channels"])
def test_gather_where_channels_cannot_be_sorted(name: str) -> None:
    model, example = CASES[name]()
    groups = traced(name, "joint")
    plan = hap.draft(groups, {}, {"a": [0, 2]}, hap.Pointwise(init="center"))
    assert [g.module for g in plan.grafts] == ["a"] and plan.grafts[0].order is not None
    assert sorted(plan.grafts[0].order) == list(range(model.a.out_channels))
    check_pruned(model, groups, plan, example)


def test_modules_keep_their_classes_and_say_what_they_have() -> None:
    model, example, groups = two_layers(kernel_size=3, padding=1)
    hap.apply_(model, hap.draft(groups, {"0": [1]}, {"0": [0, 4]}, hap.Pointwise(init="center")), example=example)
    assert type(model[0]) is nn.Conv2d and model[0].out_channels == 3
    assert model[0].implant.conv.out_channels == 2 and model[2].in_channels == 5
    assert "0.implant.conv.weight" in model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == 3 * 28 + 2 * 4 + 2 * 5 + 2


# ---- start values -------------------------------------------------------------------------------------------


def test_zero_starts_at_zero() -> None:
    model, example, groups = two_layers(bias=False, kernel_size=3)
    pruned = hap.apply_(copy.deepcopy(model), hap.draft(groups, {}, {"0": [2, 3]}, KINDS["zero"]), example=example)
    assert torch.equal(pruned[0].implant(example), torch.zeros(2, 2, 7, 7, dtype=torch.float64))
    model, example = CASES["plain"]()
    pruned = hap.apply_(model, hap.draft(traced("plain", "joint"), {}, {"0.0": [2, 3]}, KINDS["zero"]), example=example)
    pruned(example).square().sum().backward()  # behind a norm with shifts, zeros can learn
    assert float(pruned[0][0].implant.conv.weight.grad.abs().max()) > 0


def rows_after(model: nn.Module, groups: Any, plan: hap.Plan, batches: Any, x: Tensor) -> Tensor:
    pruned = hap.apply_(copy.deepcopy(model), plan, example=x, batches=batches)
    return pruned[0].implant(x).detach()


@geometry
def test_least_squares_is_the_best_pointwise_kernel(shape: dict[str, Any]) -> None:
    """Not worse than the centre on the calibration inputs, and the same as a solver finds from scratch."""
    model, _, groups = two_layers(bias=False, **shape)
    x = torch.randn(8, 3, 9, 9, dtype=torch.float64)
    x = x + x.roll(1, 3) + x.roll(2, 2)  # neighbours that tell of each other
    batches = [(x[:3], torch.zeros(3)), (x[3:], torch.zeros(5))]
    wanted = F.conv2d(x, model[0].weight[[1, 5]], None, model[0].stride, model[0].padding, model[0].dilation).detach()
    errors, outs = {}, {}
    for init in ("center", "lstsq"):
        plan = hap.draft(groups, {}, {"0": [1, 5]}, hap.Pointwise(init=init))
        outs[init] = rows_after(model, groups, plan, batches, x)
        errors[init] = float((outs[init] - wanted).square().sum())
    assert errors["lstsq"] <= errors["center"] * (1 + 1e-9)
    tap = (model[0].kernel_size[0] - 1) // 2, (model[0].kernel_size[1] - 1) // 2
    picked = torch.zeros(3, 3, *model[0].kernel_size, dtype=torch.float64)
    picked[range(3), range(3), tap[0], tap[1]] = 1
    seen = F.conv2d(x, picked, None, model[0].stride, model[0].padding, model[0].dilation).movedim(1, -1).reshape(-1, 3)
    best = seen @ torch.linalg.lstsq(seen, wanted.movedim(1, -1).reshape(-1, 2)).solution
    assert errors["lstsq"] <= float((best - wanted.movedim(1, -1).reshape(-1, 2)).square().sum()) * (1 + 1e-6)


def test_least_squares_uses_only_the_inputs_that_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Conv2d(5, 2, 1)).double().eval()
    x = torch.randn(6, 3, 9, 9, dtype=torch.float64)
    groups = hap.trace(model, x)
    plan = hap.draft(groups, {"0": [0, 3]}, {"2": [1, 2]}, hap.Pointwise(init="lstsq"))
    pruned = hap.apply_(copy.deepcopy(model), plan, example=x, batches=[(x, None)])
    inner = model[:2](x).detach()
    seen = inner[:, [1, 2, 4, 5], 1:-1, 1:-1].movedim(1, -1).reshape(-1, 4)
    wanted = model[2](inner)[:, [1, 2]].detach() - model[2].bias.detach()[[1, 2], None, None]
    fit = torch.linalg.lstsq(seen, wanted.movedim(1, -1).reshape(-1, 2)).solution.t()
    assert torch.allclose(pruned[2].implant.conv.weight[:, :, 0, 0], fit, rtol=1e-3, atol=1e-5)


def test_calibration_batches_matter_and_without_them_implants_start_at_the_centre() -> None:
    model, example, groups = two_layers(kernel_size=3, padding=1)
    plan = hap.draft(groups, {}, {"0": [1, 5]}, hap.Pointwise(init="lstsq"))
    made = [
        hap.apply_(copy.deepcopy(model), plan, example=example, batches=b)[0].implant.conv.weight
        for b in (None, [(example, None)], [(example.flip(0).square(), None)])
    ]
    assert torch.equal(made[0][:, :, 0, 0], model[0].weight[[1, 5], :, 1, 1])
    assert not torch.allclose(made[1], made[2]) and not torch.allclose(made[0], made[1])
    with pytest.raises(hap.HapError, match="batches yields nothing"):
        hap.apply_(copy.deepcopy(model), plan, example=example, batches=[])


def test_separable_and_low_rank_are_exact_where_the_kernel_is() -> None:
    """Kernels that have the implant's own form are reproduced."""
    model, example, groups = two_layers(kernel_size=3, padding=1)
    with torch.no_grad():
        spatial, mix = torch.randn(3, 3, 3).double(), torch.randn(6, 3).double()
        model[0].weight.copy_(mix[:, :, None, None] * spatial)
    plan = hap.draft(groups, {}, {"0": [1, 2, 5]}, hap.DepthwiseSeparable())
    assert gap(run(model, example), run(hap.apply_(copy.deepcopy(model), plan, example=example), example)) <= 1e-10
    with torch.no_grad():
        up, across = torch.randn(2, 3, 3).double(), torch.randn(6, 2, 3).double()
        model[0].weight.copy_(torch.einsum("rik,orl->oikl", up, across))
    plan = hap.draft(groups, {}, {"0": [1, 2, 5]}, hap.SpatialLowRank(rank=2))
    assert gap(run(model, example), run(hap.apply_(copy.deepcopy(model), plan, example=example), example)) <= 1e-10


def test_start_values_carry_into_training() -> None:
    model, example = CASES["residual"]()
    groups = traced("residual", "union")
    assert sum(map(len, implantable(groups).values())) > 10
    pruned = hap.apply_(model, random_plan(groups, 0, 0.6, hap.Pointwise(init="lstsq")), example=example).train()
    implants = [m.implant for m in pruned.modules() if hasattr(m, "implant")]
    assert (implants and all(i.training for i in implants) is False) or implants
    optimiser = torch.optim.SGD(pruned.parameters(), 0.1)
    before = [i.conv.weight.detach().clone() for i in implants]
    pruned(example).square().sum().backward()
    optimiser.step()
    assert any(not torch.equal(i.conv.weight, b) for i, b in zip(implants, before, strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hap.Pointwise(ratio=0), "ratio is 0"),
        (lambda: hap.Pointwise(ratio=1.2), "ratio is 1.2"),
        (lambda: hap.Pointwise(init="magic"), "'magic'.*'lstsq', 'center', 'zero'"),
        (lambda: hap.DepthwiseSeparable(init="zero"), "'zero'.*'svd'"),
        (lambda: hap.SpatialLowRank(rank=0), "rank is 0"),
        (lambda: hap.plan(traced("plain", "joint"), {}, hap.Budget(flops=0.5), implant="Nothing"), "kind is 'Nothing'"),
        (lambda: hap.plan(traced("plain", "joint"), {}, hap.Budget(flops=0.5), implant=[1]), r"implant is \[1\]"),
    ],
)
def test_bad_settings_are_refused(make: Any, words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        make()

"""compensate_: what stays takes over the work of what goes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from cases import CASES
from checks import gap, random_plan, run, snapshot, traced


def calibration(example: Tensor, count: int = 3) -> list[Any]:
    torch.manual_seed(5)
    return [(torch.randn(8, *example.shape[1:], dtype=torch.float64), None) for _ in range(count)]


def squared_error(model: nn.Module, batches: list[Any], wanted: list[Tensor]) -> float:
    pairs = zip(batches, wanted, strict=True)
    return sum(float((run(model, x)[0] - y).square().sum()) for (x, _), y in pairs)


@pytest.mark.parametrize("kind", ["convolution", "linear", "flattened"])
def test_combinations_of_what_stays_are_recovered(kind: str) -> None:
    """Channels 3 and 4 are sums of others, and nothing bends in between: the output does not change."""
    torch.manual_seed(0)
    first: Any = nn.Linear(4, 6) if kind == "linear" else nn.Conv2d(3, 6, 3)
    last: list[nn.Module] = {
        "convolution": [nn.Conv2d(6, 4, 3, stride=2, padding=1)],
        "linear": [nn.Linear(6, 4)],
        "flattened": [nn.Flatten(), nn.Linear(6 * 16, 4)],
    }[kind]
    model = nn.Sequential(first, *last).double().eval()
    example = torch.randn(2, 4).double() if kind == "linear" else torch.randn(2, 3, 6, 6).double()
    with torch.no_grad():
        for tensor in (first.weight, first.bias):
            tensor[3] = 0.5 * tensor[0] - 2 * tensor[1]
            tensor[4] = tensor[5] + tensor[2]
    plan = hap.draft(hap.trace(model, example), {"0": [3, 4]})
    wanted = run(model, example)
    broken = hap.apply_(copy.deepcopy(model), plan, example=example)
    batches = calibration(example, 40)
    assert hap.compensate_(model, plan, batches) is model
    mended = hap.apply_(model, plan, example=example)
    assert gap(wanted, run(broken, example)) > 0.05
    assert gap(wanted, run(mended, example)) < 1e-3


@pytest.mark.parametrize(
    "name", ["plain", "vgg", "mlp", "bias_without_norm", "concatenated_flattened", "strided_and_pooled"]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_output_error_shrinks_on_the_calibration_inputs(name: str, seed: int) -> None:
    model, example = CASES[name]()
    groups = traced(name, "joint")
    last = list(groups)[-1]  # one layer's inputs: the least-squares optimum is an optimum of the whole
    draw = torch.Generator().manual_seed(seed)
    plan = hap.draft(groups, {last: torch.randperm(len(groups[last]), generator=draw)[:2].tolist()})
    batches = calibration(example)
    wanted = [run(model, x)[0] for x, _ in batches]
    errors = []
    for mend in (False, True):
        pruned = copy.deepcopy(model)
        if mend:
            hap.compensate_(pruned, plan, iter(batches))
        hap.apply_(pruned, plan, example=example)
        errors.append(
            sum(float((run(pruned, x)[0] - y).square().sum()) for (x, _), y in zip(batches, wanted, strict=True))
        )
    assert errors[1] <= errors[0] * (1 + 1e-9)
    assert errors[1] < errors[0] or errors[0] == 0


def test_inputs_that_never_fire() -> None:
    """A layer whose remaining inputs are zero on all calibration inputs keeps finite weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        model[0].bias[:2] = -100.0
    example = torch.randn(4, 3, dtype=torch.float64)
    plan = hap.draft(hap.trace(model, example), {"0": [2, 3]})
    old = model[2].weight.detach().clone()
    hap.compensate_(model, plan, [(example, None)])
    assert torch.allclose(model[2].weight[:, :2], old[:, :2])
    with torch.no_grad():
        model[0].bias[2] = -100.0
    hap.compensate_(model, hap.draft(hap.trace(model, example), {"0": [0]}), [(example, None)])
    assert torch.isfinite(model[2].weight).all()


def test_it_is_equation_ten() -> None:
    """w_l + w_p G_pl G_ll^-1 with G the second moments of the inputs, by a solver of its own."""
    model, example = CASES["mlp_with_norm"]()
    groups = traced("mlp_with_norm", "joint")
    plan = hap.draft(groups, {"0": [0, 4]})
    batches = calibration(example, 30)
    x = torch.cat([x for x, _ in batches])
    inner = model[:3](x).detach()
    stay = [1, 2, 3, 5, 6, 7, 8]
    alive = [i for i in stay if float(inner[:, i].abs().max()) > 0]
    wanted = inner @ model[3].weight.detach().t()
    fit = inner[:, alive] @ torch.linalg.lstsq(inner[:, alive], wanted).solution
    hap.compensate_(model, plan, batches)
    seen = inner @ model[3].weight.detach().t()
    assert torch.equal(model[3].weight[:, [0, 4]], torch.zeros(4, 2, dtype=torch.float64))
    assert float((seen - wanted).square().sum()) <= float((fit - wanted).square().sum()) * (1 + 1e-4)


def test_only_readers_change() -> None:
    model, example = CASES["residual"]()
    groups = traced("residual", "union")
    plan = hap.draft(groups, {"b1.0.0": [0, 2]})
    before = snapshot(model)
    hap.compensate_(model, plan, calibration(example))
    after = snapshot(model)
    changed = {n for n in before["tensors"] if not torch.equal(before["tensors"][n][2], after["tensors"][n][2])}
    assert changed == {"b1.1.0.weight"}
    for key in ("hooks", "modes", "requires"):
        assert after[key] == before[key]


@pytest.mark.parametrize(
    "name", ["residual", "inception", "grouped_few", "unet_transposed", "squeeze_excite", "conv1d"]
)
@pytest.mark.parametrize("coupling", ["joint", "union"])
def test_with_implants_on_other_networks(name: str, coupling: str) -> None:
    """Compensated, then applied and verified; layers that it cannot solve for are left as they are."""
    model, example = CASES[name]()
    plan = random_plan(traced(name, coupling), 0, 0.4, hap.Pointwise(init="center"))
    grouped = {n for n, m in model.named_modules() if getattr(m, "groups", 1) > 1}
    before = {n: model.get_submodule(n).weight.detach().clone() for n in grouped}
    hap.compensate_(model, plan, calibration(example))
    assert all(torch.equal(model.get_submodule(n).weight, w) for n, w in before.items())
    pruned = hap.apply_(model, plan, example=example)
    assert all(torch.isfinite(x).all() for x in run(pruned, example))


def test_a_pruned_model_is_refused() -> None:
    model, example = CASES["plain"]()
    plan = random_plan(traced("plain", "joint"), 0)
    hap.apply_(model, plan, example=example)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hap.HapError, match=r"works on the dense model, before apply_"):
        hap.compensate_(model, plan, calibration(example))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_batches_are_needed() -> None:
    model, example = CASES["plain"]()
    plan = random_plan(traced("plain", "joint"), 0)
    with pytest.raises(hap.HapError, match="batches yields nothing"):
        hap.compensate_(model, plan, [])
    with pytest.raises(hap.HapError, match="expected a pair"):
        hap.compensate_(model, plan, [example])
    with pytest.raises(hap.HapError, match="compensate=True needs batches"):
        hap.prune_(model, example, criterion="magnitude", flops=0.5, compensate=True)


def test_prune_with_compensation() -> None:
    model, example = CASES["plain"]()
    batches = [(x, torch.randint(0, 5, (8,))) for x, _ in calibration(example)]
    wanted = [run(model, x)[0] for x, _ in batches]
    errors = []
    for compensate in (False, True):
        pruned = copy.deepcopy(model)
        plan = hap.prune_(pruned, example, batches, F.cross_entropy, flops=0.6, compensate=compensate)
        assert plan.after.macs <= 0.6 * plan.before.macs
        errors.append(
            sum(float((run(pruned, x)[0] - y).square().sum()) for (x, _), y in zip(batches, wanted, strict=True))
        )
    assert errors[1] < errors[0]

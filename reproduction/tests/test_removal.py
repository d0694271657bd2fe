"""What scores are worth before fine-tuning: losses without single units, and pruned networks."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_gate_curvature import NAMES
from test_score import batches_for
from torch import Tensor, nn

import hap
from cases import CASES, Net
from checks import traced
from hap.data import Data, Split
from hap.models.cifar_resnet import CifarResNet
from hap_reproduction.cifar10 import removal
from hap_reproduction.cifar10.removal import loss_rises, one_shot_record, removal_record


def before_and_after() -> tuple[nn.Module, Tensor]:
    """What `c` computes is read before it joins the sum, and after."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.c(x)
        return m.fc(F.relu(x + m.n(y)).mean((2, 3))) + m.fc2(y.mean((2, 3)))

    torch.manual_seed(0)
    layers = {"stem": nn.Conv2d(3, 4, 3), "c": nn.Conv2d(4, 4, 3, padding=1), "n": nn.BatchNorm2d(4)}
    net = Net(run, **layers, fc=nn.Linear(4, 5), fc2=nn.Linear(4, 5))
    return net.double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)


def added_to_later() -> tuple[nn.Module, Tensor]:
    """What a module of the chain returns is written to."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y += m.b(x)
        return m.fc(F.relu(m.c(F.relu(y))).mean((2, 3)))

    torch.manual_seed(0)
    net = Net(run, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3), c=nn.Conv2d(4, 4, 3), fc=nn.Linear(4, 5))
    return net.double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)


OWN = {"before_and_after": before_and_after, "added_to_later": added_to_later}
ALSO = ["squeeze_excite", "scaled_residual", "spatial_parameters", "zero_padded_shortcut", "residual_with_branches"]
NO_GATE = {(name, "union") for name in ALSO if name != "spatial_parameters"}
"""There units are the stream themselves, so that none of them goes alone."""


@pytest.mark.parametrize("coupling", ["joint", "union"])
@pytest.mark.parametrize("name", [*NAMES, *ALSO, *OWN])
def test_rises_are_those_of_networks_without_the_unit(name: str, coupling: str) -> None:
    """So gates are where all that a unit hands on passes."""
    model, example = (OWN | CASES)[name]()
    groups = hap.trace(model, example, coupling) if name in OWN else traced(name, coupling)
    batches = batches_for(example, model(example).shape[1])
    if (name, coupling) in NO_GATE:
        with pytest.raises(hap.HapError, match="is a sum that other groups join, so it has no gate of its own"):
            loss_rises(model, groups, batches)
        return
    given, own = loss_rises(model, groups, batches)
    count = sum(len(y) for _, y in batches)

    @torch.no_grad()
    def loss(network: nn.Module) -> float:
        return sum(float(F.cross_entropy(network(x), y, reduction="sum")) for x, y in batches) / count

    @torch.no_grad()
    def divergence(network: nn.Module) -> float:
        outputs = [(network(x).log_softmax(1), model(x).log_softmax(1)) for x, _ in batches]
        return sum(float(F.kl_div(a, b, reduction="sum", log_target=True)) for a, b in outputs) / count

    checked = 0
    for group, values in given.items():
        for unit in {0, len(values) - 1} if len(values) > 1 else ():
            plan = hap.draft(groups, {group: [unit]})
            if tuple(plan.removed[group]) != (unit,) or sum(map(len, plan.removed.values())) != 1:
                continue
            pruned = hap.apply_(copy.deepcopy(model), plan, example)
            assert float(values[unit]) == pytest.approx(loss(pruned) - loss(model), rel=1e-8, abs=1e-12)
            assert float(own[group][unit]) == pytest.approx(divergence(pruned), rel=1e-8, abs=1e-12)
            checked += 1
    assert checked


def test_what_runs_before_a_unit_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = hap.models.build("resnet20").double().eval()
    x, y = torch.randn(3, 3, 8, 8, dtype=torch.float64), torch.arange(3)
    groups = hap.only(hap.trace(model, x, "union"), ("layer3.2.conv1",))
    calls = {"layer1.0.conv1": 0, "layer3.2.conv1": 0}
    for name in calls:

        def count(module: nn.Module, args: object, name: str = name) -> None:
            calls[name] += 1

        dict(model.named_modules())[name].register_forward_pre_hook(count)
    short, _ = loss_rises(model, groups, [(x, y)])
    assert calls == {"layer1.0.conv1": 1, "layer3.2.conv1": 65}
    assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(removal, "_chain", lambda model: {})
    long, _ = loss_rises(model, groups, [(x, y)])
    assert torch.allclose(long["layer3.2.conv1"], short["layer3.2.conv1"], rtol=1e-10, atol=1e-14)
    assert calls == {"layer1.0.conv1": 66, "layer3.2.conv1": 130}


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8, generator=generator)
    some, labels = images[:20], torch.arange(48) % 10
    return Data(Split(images, labels), Split(some, labels[:20]), 10, (0.5,) * 3, (0.25,) * 3, "fake", 1, True)


def small() -> nn.Module:
    torch.manual_seed(0)
    return CifarResNet((1, 2, 1), (8, 16, 32)).eval()


def test_records_hold_every_criterion_and_plan(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "FLOPS", removal.FLOPS[1:])
    record = removal_record(small(), data, 16)
    rows = {row["criterion"]: row for row in record["rows"]}
    assert set(rows) == set(removal.CRITERIA) and (record["scored_on"], record["images"]) == (48, 16)
    assert all(
        -1 <= row[key][at] <= 1 for row in rows.values() for key in ("own", "given") for at in ("all", "within_layers")
    )
    assert (
        set(record["measured"]["own"]) == set(rows["hessian"]["predicted"]) == {"conv1", "layer1", "layer2", "layer3"}
    )
    assert sum(map(len, record["rises"]["own"].values())) == record["units"]
    pruned = one_shot_record(small(), data)["rows"]
    assert len(pruned) == len(removal.PRUNED_BY) * 2 * len(removal.FLOPS)
    assert all(0 <= row[key] <= 1 for row in pruned for key in ("accuracy", "estimated_again", "params"))


def test_norms_that_are_estimated_again_have_the_statistics_of_the_images() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.BatchNorm2d(3)).eval(), torch.randn(256, 3, 4, 4) * 3 + 1
    removal._estimate_again_(model, [(x, torch.zeros(256))])
    assert torch.allclose(model[0].running_mean, x.mean((0, 2, 3)), atol=1e-5)
    halves = torch.stack([part.var((0, 2, 3)) for part in x.split(128)])
    assert torch.allclose(model[0].running_var, halves.mean(0), atol=1e-4)
    assert model[0].momentum == 0.1 and not model.training

"""EigenDamage: the factors are the curvature where Kronecker factors are exact, and budgets are met by what remains."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap_reproduction.cifar10.eigendamage import _filled, eigendamage_, factors, rebuild_, rotate


class Small(nn.Module):
    """A stem, a strided k x k with bias, a 1x1 and a classifier."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.wide = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.point = nn.Conv2d(2 * width, width, 1, bias=False)
        self.fc = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.wide(F.relu(self.stem(x))))
        return self.fc(F.relu(self.point(x)).mean((2, 3)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().double().eval()


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 3, 8, 8, generator=generator, dtype=torch.float64), torch.zeros(6, dtype=torch.int64))]


def test_the_factors_are_the_hessian_of_one_sample_at_one_position() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(4, 5)).double()
    x, target = torch.randn(1, 3, 1, 1, dtype=torch.float64), torch.tensor([2])
    a, s = factors(model, [(x, target)])["0"]
    weight = model[0].weight.detach()

    def loss(w: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, {"0.weight": w}, (x,)), target)

    block = torch.func.hessian(loss)(weight).reshape(12, 12)
    torch.testing.assert_close(torch.kron(s, a), block, rtol=0, atol=1e-12)


def test_importances_are_the_loss_expected_to_rise_by_each_direction(model: nn.Module, batches: list) -> None:
    a, s = factors(model, batches)["point"]
    found = rotate(model, batches)["point"]
    w = model.get_submodule("point").weight.detach()[:, :, 0, 0]
    direction = found.outputs[:, -1:] @ found.outputs[:, -1:].t() @ w  # the weight's part along one output direction
    rise = 0.5 * (direction * (s @ direction @ a)).sum()
    torch.testing.assert_close(found.rows[-1], rise)


@pytest.mark.parametrize("name", ["stem", "wide", "point"])
@pytest.mark.parametrize("drop", ["inputs", "outputs", "both"])
def test_a_bottleneck_computes_the_projected_convolution(model: nn.Module, batches: list, name: str, drop: str) -> None:
    conv, found = model.get_submodule(name), rotate(model, batches)[name]
    i, o = torch.arange(conv.in_channels), torch.arange(conv.out_channels)
    i, o = i[len(i) // 2 + 1 if drop != "outputs" else 0 :], o[1 if drop != "inputs" else 0 :]
    into, back = found.inputs[:, i] @ found.inputs[:, i].t(), found.outputs[:, o] @ found.outputs[:, o].t()
    projected = torch.einsum("ps,sjkl,ji->pikl", back, conv.weight.detach(), into)
    x = torch.randn(2, conv.in_channels, 9, 9, dtype=torch.float64)
    wanted = F.conv2d(x, projected, conv.bias, conv.stride, conv.padding)
    torch.testing.assert_close(_filled(conv, found, i, o)(x), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("budget", [{"params": 0.5}, {"flops": 0.4}])
def test_the_budget_is_met_and_the_shape_can_be_rebuilt(model: nn.Module, batches: list, budget: dict) -> None:
    x = batches[0][0][:1]
    before = hap.cost(model, x)
    ranks = eigendamage_(model, x, batches, **budget)
    after = hap.cost(model, x)
    left = after.params / before.params if "params" in budget else after.macs / before.macs
    assert ranks and next(iter(budget.values())) * 0.8 < left <= next(iter(budget.values()))
    again = rebuild_(Small().double(), ranks)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x), model(x))


def test_residual_networks_keep_their_classes_names_and_modes(batches: list) -> None:
    torch.manual_seed(0)
    model = hap.models.build("resnet20").eval()
    images = [(x.float().repeat(1, 1, 2, 2), y) for x, y in batches]
    eigendamage_(model, images[0][0][:1], images, params=0.4)
    assert isinstance(model.layer2[0].bn1, nn.BatchNorm2d) and not any(m.training for m in model.modules())
    assert hap.cost(model, images[0][0][:1]).params <= 0.4 * hap.cost(hap.models.build("resnet20"), images[0][0]).params
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_reached_is_said(model: nn.Module, batches: list) -> None:
    with pytest.raises(hap.HapError, match=r"params=0\.001 cannot be reached"):
        eigendamage_(model, batches[0][0][:1], batches, params=0.001)
    with pytest.raises(hap.HapError, match="one or several of"):
        eigendamage_(model, batches[0][0][:1], batches)
    with pytest.raises(hap.HapError, match="params and flops; EigenDamage takes either"):
        eigendamage_(model, batches[0][0][:1], batches, params=0.5, flops=0.5)
    with pytest.raises(hap.HapError, match="fc is a Linear"):
        rebuild_(model, {"fc": (1, 1)})

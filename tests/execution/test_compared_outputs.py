"""The executed check sees what it should: differences, NaN, integers, and forwards that write to what they read."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import hap
from hap.execution.model_outputs import difference

ONES, NAN = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
LABELS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("wanted", "seen", "exact", "words"),
    [
        ([ONES], [ONES, ONES], True, "returns 2 values instead of 1"),
        ([ONES], [torch.ones(2)], True, r"shape \(2,\) instead of \(3,\)"),
        ([ONES], [ONES * 1.1], True, "off by 0.1"),
        ([ONES], [ONES * 1.1], False, None),
        ([ONES], [NAN], False, "not finite in other places"),
        ([NAN], [ONES], True, "not finite in other places"),
        ([NAN], [ONES], False, None),
        ([LABELS], [LABELS.flip(0)], True, "differs in 2 places"),
        ([LABELS], [LABELS.flip(0)], False, None),
        ([NAN[1:2]], [NAN[1:2]], True, "nothing can be compared"),
        ([NAN[1:2], LABELS], [NAN[1:2], LABELS], True, None),
        ([ONES[:0], "x"], [ONES[:0], "y"], True, None),
    ],
)
def test_differences_in_words(wanted: list[Tensor], seen: list[Tensor], exact: bool, words: str | None) -> None:
    found = difference(wanted, seen, exact)
    if words is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=words):
            raise ValueError(found)


class Shrinking(nn.Linear):
    """Divides its own weight by how many inputs it has, at every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.div_(self.in_features / 100)
        return super().forward(x)


@pytest.mark.parametrize("width", [64, 160])
def test_a_forward_that_writes_to_its_weight_is_seen_at_any_size(width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), Shrinking(width, width), nn.Linear(width, 3)).eval()
    example = torch.randn(2, 8)
    groups = hap.trace(nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3)), example)
    plan = hap.draft(groups, {"0": list(range(width // 2))})
    with pytest.raises(hap.HapError, match=r"does not do what the plan says.*off by"):
        hap.apply_(model, plan, example)


class Scaling(nn.Module):
    """Multiplies by its width, then by a classifier that begins with zeros and hides that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)) * self.a.out_features)


def test_the_check_sees_through_a_classifier_of_zeros() -> None:
    model, example = Scaling().eval(), torch.randn(2, 4)
    same = nn.Sequential(OrderedDict(a=nn.Linear(4, 16), relu=nn.ReLU(), b=nn.Linear(16, 3))).eval()
    nn.init.zeros_(same.b.weight)
    plan = hap.draft(hap.trace(same, example), {"a": range(4)})
    with pytest.raises(hap.HapError, match="the value of output 0 is off"):
        hap.apply_(model, plan, example)
    assert model.a.weight.shape == (16, 4) and not model.b.weight.any()
    assert not hap.apply_(same, plan, example).b.weight.any() and same.a.weight.shape == (12, 4)


class Counting(nn.Module):
    """Notes in a buffer what it has seen, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.seen.add_(x.detach().abs().amax(0))
        return self.b(torch.relu(x * (self.seen >= 0)))


def test_the_check_leaves_no_trace_in_buffers() -> None:
    model, example = Counting().eval(), torch.randn(2, 4)
    plan = hap.draft(hap.trace(model, example), {"a": [0, 1]})
    found = [hap.apply_(copy.deepcopy(model), plan, example, verify=verify).seen for verify in (False, True)]
    assert torch.equal(*found) and found[0].shape == (6,)


class Averaging(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.kind in ("std", "var"):
            return self.b(x / (getattr(x, self.kind)(1, keepdim=True) + 1e-3))
        x = x * torch.sigmoid(x.mean(1, keepdim=True))
        if self.kind == "reshaped":
            x = x.view(len(x), 8, -1).softmax(2).view(len(x), -1, *x.shape[2:])
        return self.b(x)


@pytest.mark.parametrize("kind", ["std", "var", "reshaped"])
def test_averages_that_no_run_could_judge_are_frozen(kind: str) -> None:
    assert not len(hap.trace(Averaging(kind).eval(), torch.randn(2, 3, 4, 4)))


def test_a_plain_average_may_be_over_fewer() -> None:
    model, example = Averaging("mean").eval(), torch.randn(2, 3, 4, 4)
    plan = hap.draft(hap.trace(model, example), {"a": [0, 1, 2]})
    assert not plan.exact
    assert hap.apply_(model, plan, example)(example).isfinite().all()


class Chaotic(nn.Module):
    """What it returns depends much on its last digits. It does not run in float64."""

    def __init__(self, by_size: bool) -> None:
        super().__init__()
        self.a, self.b, self.by_size = nn.Linear(8, 160), nn.Linear(160, 100), by_size

    def forward(self, x: Tensor) -> Tensor:
        h = torch.eye(len(x)) @ self.a(x)
        z = self.b(h.relu()).sigmoid() / (h.shape[1] if self.by_size else 1)
        for _ in range(8):
            z = 3.9 * z * (1 - z)
        return z


@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_measured_where_float64_cannot_tell(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Chaotic(by_size=False).eval(), torch.randn(64, 8)
    with pytest.raises(RuntimeError, match="dtype"):
        copy.deepcopy(model).double()(x.double())
    assert list(hap.trace(model, x)) == ["a"]
    hap.prune_(model, x, criterion="magnitude", params=0.5)
    assert len(model.a.weight) < 160
    assert not hap.trace(Chaotic(by_size=True).eval(), x)

"""Branches that run in training alone are cut with what they read, or what they read stays."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hap
from hap.groups.groups import Groups
from hap.tracing.training_branches import _misfits

LOSS = functional.cross_entropy


class Auxiliary(nn.Module):
    """Two branches side by side, and a classifier of what they return that runs in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 12, 1), nn.BatchNorm2d(20)
        self.body, self.head = nn.Conv2d(20, 16, 3, padding=1), nn.Linear(16, 3)
        self.aux = nn.Sequential(nn.Conv2d(20, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.norm(torch.cat([self.left(x), self.right(x)], 1)).relu()
        y = self.head(self.body(h).relu().mean((2, 3)))
        return (y, self.auxiliary(h)) if self.training else y

    def auxiliary(self, h: Tensor) -> Tensor:
        return self.aux(functional.dropout(functional.adaptive_avg_pool2d(h, 2), 0.3))


class Choosing(Auxiliary):
    """No graph can have what runs in training."""

    def auxiliary(self, h: Tensor) -> Tensor:
        return super().auxiliary(h if h.sum() > 0 else -h)


class Counting(Auxiliary):
    """A graph can, but it holds the number of channels."""

    def auxiliary(self, h: Tensor) -> Tensor:
        return super().auxiliary(h.view(-1, 20, 64).view_as(h))


class Averaging(Auxiliary):
    """A copy of a layer, kept in step by the forward in training."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.aux.weight.data.lerp_(self.left.weight.data, 0.1)
        h = self.norm(torch.cat([self.left(x), self.right(x)], 1)).relu()
        return self.head(self.body(h).relu().mean((2, 3)))


class Scaled(Auxiliary):
    """A weight of the stream that is there in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Parameter(torch.ones(20, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.left(x), self.right(x)], 1)
        return self.head(self.body(h * self.aux if self.training else h).relu().mean((2, 3)))


class Residual(Auxiliary):
    """Branches add up before the one that runs in training."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 20, 3, padding=1), nn.Conv2d(3, 20, 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.left(x) + self.right(x)
        y = self.head(self.body(h).relu().mean((2, 3)))
        return (y, self.auxiliary(h)) if self.training else y


class Unused(Auxiliary):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(torch.cat([self.left(x), self.right(x)], 1)).relu().mean((2, 3)))


def reasons(groups: Groups) -> dict[str, str]:
    return {f.what: f.why for f in groups.frozen}


@pytest.mark.parametrize("coupling", ["joint", "union"])
@pytest.mark.parametrize("kind", [Auxiliary, Scaled, Residual])
def test_what_runs_in_training_alone_is_cut_with_what_it_reads(kind: type[Auxiliary], coupling: str) -> None:
    model, example = kind().eval(), torch.randn(1, 3, 8, 8)  # a batch of one, which norms would not train on
    state, drawn = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    groups = hap.trace(model, example, coupling)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert set(groups) == {"left", "right", "body"} - ({"right"} if kind is Residual and coupling == "joint" else set())
    plan = hap.plan(groups, hap.score(model, groups, None, None, "magnitude"), hap.Budget(channels=0.5))
    hap.apply_(model, plan, example)
    assert plan.after.params == sum(p.numel() for p in model.parameters())
    model.train()(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("criterion", ["hessian", "joint"])
def test_such_branches_neither_count_nor_are_compensated(criterion: str) -> None:
    model, x = Auxiliary().eval(), torch.randn(4, 3, 8, 8)
    macs = hap.cost(model, x).macs
    plan = hap.prune_(
        model, x, [(x, torch.zeros(4, dtype=torch.long))], LOSS, criterion=criterion, flops=0.5, compensate=True
    )
    assert plan.before.macs == macs
    assert hap.cost(model, x).macs == plan.after.macs
    assert "it runs in training alone" in reasons(hap.trace(model, x))["aux"]
    model.train()(x)


@pytest.mark.parametrize("kind", [Choosing, Counting, Averaging])
def test_what_training_does_not_do_without_stays(kind: type[Auxiliary]) -> None:
    model, x = kind().eval(), torch.randn(2, 3, 8, 8)
    groups = hap.trace(model, x)
    assert "body" in groups and "left" not in groups
    assert "does not run in training without some of it: RuntimeError" in reasons(groups)["left"]
    hap.prune_(model, x, criterion="magnitude", channels=0.5)
    model.train()(x)


def test_parameters_that_nothing_reads_are_left_alone() -> None:
    model, x = Unused().eval(), torch.randn(2, 3, 8, 8)
    groups = hap.trace(model, x)
    assert set(groups) == {"left", "right", "body"} and set(reasons(groups)) == {"head"}
    hap.prune_(model, x, criterion="magnitude", channels=0.5)
    assert model.aux[0].weight.shape[1] == 20
    model.train()(x)


class Labelled(Auxiliary):
    """Returns a loss in training, and so wants labels there."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.norm(torch.cat([self.left(x), self.right(x)], 1)).relu()
        y = self.head(self.body(h).relu().mean((2, 3)))
        return LOSS(y, labels) + LOSS(self.auxiliary(h), labels) if self.training else y


def test_a_model_that_does_not_train_on_the_example_is_warned_of() -> None:
    x, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    words = r"^aux does not run in evaluation.* train on the example \(TypeError: [^\n]*\); give one that it trains on"
    with pytest.warns(UserWarning, match=words) as found:
        hap.trace(Labelled().eval(), x)
    assert [w.filename for w in found] == [__file__] and "\n" not in str(found[0].message)
    model = Labelled().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        hap.prune_(model, (x, labels), criterion="magnitude", channels=0.5)
    with pytest.warns(
        UserWarning, match=r"^the example does not run aux, which is not cut with what it reads"
    ) as found:
        hap.trace(Unused().eval(), x)
    assert [w.filename for w in found] == [__file__]
    assert model.aux[0].weight.shape[1] < 20
    model.train()(x, labels).backward()


def test_a_model_of_which_there_is_no_copy() -> None:
    class Single(Unused):
        def __deepcopy__(self, memo: object) -> "Single":
            return self

    groups = hap.trace(Single().eval(), torch.randn(2, 3, 8, 8))
    assert not groups and "no copy of the model can be tried" in reasons(groups)["left"]


@pytest.mark.parametrize("bad", [{3}, {0, 1, 2, 3}, {2, 3}, {0, 5}, set(range(8)), set()])
def test_no_question_is_asked_twice(bad: set[int]) -> None:
    asked: list[tuple[str, ...]] = []

    def problem(names: Sequence[str]) -> str | None:
        asked.append(tuple(names))
        return "no" if bad & set(map(int, names)) else None

    assert set(_misfits([str(n) for n in range(8)], problem)) == set(map(str, bad))
    assert () not in asked and len(set(asked)) == len(asked)


def test_what_goes_alone_but_not_together_stays() -> None:
    asked: list[tuple[str, ...]] = []

    def problem(names: Sequence[str]) -> str | None:
        asked.append(tuple(names))
        return "no" if {"1", "2"} <= set(names) else None

    assert set(_misfits(list("0123"), problem)) == set("0123")
    assert asked == [tuple("0123"), tuple("01"), tuple("23")]


def test_a_model_all_of_which_is_read_does_not_run_in_training() -> None:
    seen: list[bool] = []

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.training)
            return super().forward(x)

    hap.trace(Net(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4))
    assert seen and not any(seen)

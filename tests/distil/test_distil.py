"""distil_: a pruned model learns what the dense one returns, without labels, and is never worse than before."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hap
from checks import assert_unchanged, snapshot
from hap.distil.descent import FACTOR, FIRST_RATE, TRIED, Descent, next_number
from hap.distil.hints import Hints
from hap.distil.samples import Samples, Wanted


def pair(inputs: int = 512) -> tuple[nn.Module, nn.Module, list[Any]]:
    """A dense network, what pruning and a refit leave of it, and inputs."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)]
    dense = nn.Sequential(*layers)
    x = torch.randn(inputs, 6)
    dense(x)
    dense.eval()
    pruned = copy.deepcopy(dense)
    hap.prune_(pruned, x[:2], [(x, None)], criterion="magnitude", flops=0.5, repair="refit")
    return dense, pruned, [(x, None)]


def error(model: nn.Module, dense: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - dense(x)).square().mean())


def assert_same_values(model: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("objective", ["error", "divergence"])
def test_fresh_inputs_are_answered_more_like_the_dense_model_does(objective: str) -> None:
    dense, pruned, inputs = pair()
    fresh, unchanged = torch.randn(256, 6), snapshot(dense)
    old = error(pruned, dense, fresh)
    report = hap.distil_(pruned, dense, inputs, steps=120, batch=64, objective=objective)
    assert report.after < 0.8 * report.before
    assert report.steps == 120 and report.rate in report.tried and not report.undone
    assert error(pruned, dense, fresh) < (0.8 if objective == "error" else 1.0) * old
    assert_unchanged(dense, unchanged)
    assert f"{objective} on what is held out {report.before:.4f} -> {report.after:.4f}" in str(report)


def test_targets_are_not_looked_at() -> None:
    dense, pruned, inputs = pair()
    found = []
    for target in (None, object(), torch.zeros(0)):
        model = copy.deepcopy(pruned)
        found.append(hap.distil_(model, dense, [(x, target) for x, _ in inputs], steps=10).after)
    assert len(set(found)) == 1


def test_steps_determine_the_result() -> None:
    dense, pruned, inputs = pair()
    found = []
    for seed in (0, 0, 1):
        model = copy.deepcopy(pruned)
        report = hap.distil_(model, dense, inputs, steps=30, batch=32, seed=seed, augment=noisy)
        found.append((report.after, report.tried, report.history))
        torch.rand(3), np.random.rand(), random.random()
    assert found[0] == found[1] != found[2]


def noisy(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x) + 0.01 * np.random.rand() + 0.01 * random.random()


def test_what_is_around_the_weights_stays() -> None:
    """Modes, gradients, flags, random numbers, and the statistics of normalisations."""
    dense, pruned, inputs = pair()
    dense.train()
    pruned[3].train()
    pruned[0].bias.requires_grad_(False)
    pruned[0].weight.grad = torch.ones_like(pruned[0].weight)
    modes = [m.training for m in (*pruned.modules(), *dense.modules())]
    frozen, statistics = pruned[0].bias.clone(), pruned[1].running_mean.clone()
    grads = [None if p.grad is None else p.grad.clone() for p in pruned.parameters()]
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    report = hap.distil_(pruned, dense, inputs, steps=30, augment=noisy)
    assert not report.undone
    assert [m.training for m in (*pruned.modules(), *dense.modules())] == modes
    assert torch.equal(pruned[0].bias, frozen) and not pruned[0].bias.requires_grad
    assert torch.equal(pruned[1].running_mean, statistics)
    for parameter, grad in zip(pruned.parameters(), grads, strict=True):
        assert parameter.grad is grad is None or torch.equal(parameter.grad, grad)
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1] and np.random.get_state()[2] == draws[2]


def test_a_model_that_is_not_getting_better_is_left_as_it_was() -> None:
    dense, _, inputs = pair()
    model = copy.deepcopy(dense)
    report = hap.distil_(model, dense, inputs, steps=10)
    assert report.undone and report.after == report.before == 0.0 and "all undone" in str(report)
    assert_same_values(model, dense)


def test_the_end_comes_early_where_nothing_improves() -> None:
    dense, _, inputs = pair()
    assert hap.distil_(copy.deepcopy(dense), dense, inputs, steps=100).steps < 70


def test_a_loss_that_is_not_finite_is_an_error_and_all_is_as_before() -> None:
    dense, pruned, inputs = pair()
    before = copy.deepcopy(pruned)
    with pytest.raises(hap.HapError, match="the error on what is held out is nan before the first step"):
        hap.distil_(pruned, dense, [(torch.full((8, 6), torch.nan), None)], steps=10)
    with pytest.raises(hap.HapError, match=r"not finite at any of the learning rates tried, 0\.0003, "):
        hap.distil_(pruned, dense, inputs, steps=10, augment=lambda x: x / 0)
    calls: list[int] = []

    def later(x: Tensor) -> Tensor:
        calls.append(1)
        return x / 0 if len(calls) > 30 else x

    with pytest.raises(hap.HapError, match="is not finite after 31 steps, at a learning rate of"):
        hap.distil_(pruned, dense, inputs, steps=60, augment=later)
    assert_same_values(pruned, before)


@pytest.mark.parametrize(("kind", "kept"), [(KeyboardInterrupt, True), (RuntimeError, False)])
def test_only_an_interruption_leaves_the_best_so_far(kind: type[BaseException], kept: bool) -> None:
    dense, pruned, inputs = pair()
    before, calls = copy.deepcopy(pruned.state_dict()), list[int]()

    def stopping(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 50:
            raise kind
        return x

    old = error(pruned, dense, inputs[0][0])
    with pytest.raises(kind):
        hap.distil_(pruned, dense, inputs, steps=60, augment=stopping)
    assert all(torch.equal(t, before[n]) for n, t in pruned.state_dict().items()) is not kept
    assert (error(pruned, dense, inputs[0][0]) < old) is kept


class Named(nn.Module):
    """A model as Hugging Face builds them: named inputs, named outputs, some of which are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(24, 4)

    def forward(self, ids: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        seen = self.words(ids) if mask is None else self.words(ids) * mask[..., None]
        return {"logits": self.head(self.hidden(seen).relu()) * scale, "cache": object(), "ids": ids, "none": None}


def batches_of(kind: str) -> Iterator[tuple[Any, None]]:
    for number in range(16):
        ids = torch.randint(0, 20, (8, 5 + (number % 2 if kind == "two lengths" else 0)))
        mask = torch.ones((1, ids.shape[1]) if kind == "samples unknown" else ids.shape)
        yield {"ids": ids, "mask": mask, "scale": 2.0}, None


@pytest.mark.parametrize("kind", ["one length", "two lengths", "samples unknown"])
def test_named_inputs_of_several_shapes(kind: str) -> None:
    torch.manual_seed(0)
    dense = Named().eval()
    inputs = list(batches_of(kind))
    pruned = copy.deepcopy(dense)
    hap.prune_(pruned, inputs[0][0], criterion="magnitude", flops=0.6)
    for objective in ("error", "divergence"):
        report = hap.distil_(copy.deepcopy(pruned), dense, inputs, steps=40, batch=32, objective=objective)
        assert report.after < 0.9 * report.before


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_few_samples_are_no_reason_to_fail(count: int) -> None:
    dense, pruned, inputs = pair()
    report = hap.distil_(pruned, dense, [(inputs[0][0][:count], None)], steps=10)
    assert report.after <= report.before


def test_minutes_are_a_limit() -> None:
    dense, pruned, inputs = pair()
    report = hap.distil_(pruned, dense, inputs, 0.005)
    assert 0.1 < report.seconds < 3 and report.steps > 5


def test_rates_are_tried_beside_the_best_one() -> None:
    def tried(value: Any) -> list[int]:
        values: dict[int, float] = {}
        while (number := next_number(values)) is not None:
            values[number] = value(number)
        return list(values)

    assert tried(lambda n: abs(n - 9)) == [0, 1, 2, 3]
    assert tried(abs) == [0, 1, -1]
    assert tried(lambda n: abs(n - 1)) == [0, 1, 2]
    assert tried(lambda n: abs(n + 9)) == [0, 1, -1, -2]
    assert tried(lambda n: torch.inf if n > -3 else 1.0) == [0, -1, -2, -3]
    assert len(tried(lambda n: torch.inf)) == TRIED


def test_what_cannot_be_done_is_said() -> None:
    dense, pruned, inputs = pair()
    for how, words in (
        ({"minutes": 1, "steps": 5}, "minutes is 1 and steps is 5; give one"),
        ({"minutes": 0}, "minutes is 0; expected a number above 0"),
        ({"steps": 0}, "steps=0; expected at least 1"),
        ({"batch": 0}, "batch=0; expected at least 1"),
        ({"objective": "likeness"}, "objective is 'likeness'; expected one of 'error', 'divergence'"),
    ):
        with pytest.raises(hap.HapError, match=words):
            hap.distil_(pruned, dense, inputs, **how)
    with pytest.raises(hap.HapError, match=r"0.weight of the dense model is shared"):
        hap.distil_(pruned, pruned, inputs, steps=5)
    with pytest.raises(hap.HapError, match="no parameter of the pruned model requires a gradient"):
        hap.distil_(copy.deepcopy(pruned).requires_grad_(False), dense, inputs, steps=5)
    with pytest.raises(hap.HapError, match="no tensor of real numbers of one shape"):
        hap.distil_(pruned, nn.Linear(6, 7), inputs, steps=5)
    with pytest.raises(hap.HapError, match="batches yields nothing"):
        hap.distil_(pruned, dense, [], steps=5)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, pruned, inputs = pair()
    monkeypatch.setattr("hap.utils.distributed.processes", lambda: 2)
    with pytest.raises(hap.HapError, match="distil_ runs in one process"):
        hap.distil_(pruned, dense, inputs, steps=5)


def test_weights_can_be_trained_inside_of_no_grad_and_inference_mode() -> None:
    dense, pruned, inputs = pair()
    for mode in (torch.no_grad(), torch.inference_mode()):
        model = copy.deepcopy(pruned)
        with mode:
            assert not hap.distil_(model, dense, inputs, steps=30).undone


def test_the_dense_model_is_asked_once_for_each_sample_where_nothing_is_augmented() -> None:
    dense, pruned, inputs = pair()
    asked: list[int] = []
    handle = dense.register_forward_hook(lambda m, args, out: asked.append(len(args[0])))
    hap.distil_(pruned, dense, inputs, steps=40, batch=64)
    assert sum(asked) < 2 * len(inputs[0][0])
    asked.clear()
    hap.distil_(pruned, dense, inputs, steps=40, batch=64, augment=noisy)
    assert sum(asked) > 40 * 60
    handle.remove()


def test_a_shared_weight_stays_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.a, self.b = nn.Linear(5, 20), nn.Linear(20, 20), nn.Linear(20, 20)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.inner(x).relu()).relu())

    dense, x = Tied().eval(), torch.randn(256, 5)
    pruned = copy.deepcopy(dense)
    with torch.no_grad():
        pruned.a.weight += 0.05 * torch.randn(20, 20)
    report = hap.distil_(pruned, dense, [(x, None)], steps=40)
    assert report.after < report.before and pruned.a.weight is pruned.b.weight


def test_the_rate_rises_and_falls_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    step = Descent._step

    def watched(self: Descent, optimizer: torch.optim.Optimizer) -> bool:
        seen.append(optimizer.param_groups[0]["lr"])
        return step(self, optimizer)

    monkeypatch.setattr(Descent, "_step", watched)
    dense, pruned, inputs = pair()
    report = hap.distil_(pruned, dense, inputs, steps=200)
    last = seen[-100:]
    assert report.rate == pytest.approx(FIRST_RATE * FACTOR ** round(np.log(report.rate / FIRST_RATE) / np.log(FACTOR)))
    assert max(last) < report.rate and last == sorted(last, reverse=True) and last[-1] < 0.01 * report.rate


class Blocks(nn.Module):
    """Residual blocks, the second of which is called twice; one module returns what another one does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))
        self.twice = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))
        self.around = nn.Sequential(nn.Sequential(nn.Linear(6, 32), nn.ReLU()))
        self.last = nn.Linear(32, 3)
        self.extra = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        for _ in range(2 + self.extra):
            x = x + self.twice(x)
        y: Tensor = self.last(self.around(x))
        return y


def pruned_blocks() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    dense, x = Blocks().eval(), torch.randn(256, 6)
    pruned = copy.deepcopy(dense)
    hap.prune_(pruned, x[:2], [(x, None)], criterion="magnitude", flops=0.5, repair="refit")
    return dense, pruned, x


def hints_of(pruned: nn.Module, dense: nn.Module, x: Tensor) -> Hints:
    return Hints((pruned, dense), lambda model, x: [model(x)], (x, x[:-1]))


def test_hints_are_modules_called_once_that_return_one_shape() -> None:
    dense, pruned, x = pruned_blocks()
    wide = hints_of(copy.deepcopy(dense), dense, x)
    assert wide.names == ["first", "around"]  # around.0 returns the same tensor
    hints = hints_of(pruned, dense, x)
    assert hints.names == ["first"]  # fewer neurons are left in the other
    found, wanted = (hints.after(model, lambda model: [model(x)]) for model in (pruned, dense))
    with torch.no_grad():
        assert torch.equal(wanted[1], dense.first(x)) and torch.equal(found[1], pruned.first(x))
    error = (found[1] - wanted[1]).square().mean() / wanted[1].var(correction=0)
    assert torch.allclose(hints.error(found, wanted), error)
    assert hints.outputs(found) == found[:1]


def test_hints_bring_what_is_inside_nearer_to_the_dense_model() -> None:
    dense, pruned, x = pruned_blocks()
    inside = []
    for hints in (False, True):
        model = copy.deepcopy(pruned)
        report = hap.distil_(model, dense, [(x, None)], steps=60, hints=hints)
        assert report.after < report.before
        with torch.no_grad():
            inside.append(float((model.first(x) - dense.first(x)).square().mean()))
    assert inside[1] < inside[0]


def test_a_module_that_is_called_more_often_on_other_inputs_says_nothing_there() -> None:
    dense, pruned, x = pruned_blocks()
    hints = hints_of(dense, dense, x)
    hints.names = ["first", "twice"]
    found, wanted = (hints.after(model, lambda model: [model(x)]) for model in (pruned, dense))
    assert len(found) == len(wanted) == 3 and found[2].numel() == wanted[2].numel() == 0
    error = (found[1] - wanted[1]).square().mean() / wanted[1].var(correction=0)
    assert torch.allclose(hints.error(found, wanted), error)


class Inside(nn.Module):
    """A block whose values a function may change on the way out, in front of a layer that makes them plain again."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.block, self.change, self.last = nn.Sequential(nn.Linear(6, 6)), change, nn.Linear(6, 2)
        self.block.register_forward_hook(lambda module, args, output: change(output))

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = self.block(x).nan_to_num(neginf=0.0)
        y: Tensor = self.last(inside.mean(0, keepdim=True).expand(len(x), 6) if len(inside) != len(x) else inside)
        return y


@pytest.mark.parametrize(
    "change", [lambda t: t.t().contiguous().t()[:4], lambda t: t.log()], ids=["rows", "not finite"]
)
def test_no_hint_is_taken_from_what_is_not_of_the_samples_or_not_finite(change: Any) -> None:
    dense, x = Inside(change), torch.randn(8, 6)
    assert hints_of(dense, dense, x).names == []
    assert hints_of(Inside(lambda t: t), Inside(lambda t: t), x).names == ["block"]


def test_outputs_are_no_hints() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 2))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x)
            return y

    net = Around()
    assert hints_of(net, net, torch.randn(8, 6)).names == []


class TokensFirst(nn.Module):
    """Returns values whose first axis is as long as a batch and is none of samples: the second one is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


@pytest.mark.parametrize("tokens", [8, 5])
def test_what_is_kept_of_the_dense_model_is_what_it_returns(tokens: int) -> None:
    for model in (TokensFirst(), nn.Identity()):
        samples = Samples([torch.randn(32, tokens, 3)], 8)
        wanted = Wanted(lambda x, model=model: [model(x)], samples, [torch.arange(32)])
        batches = samples.fitted_batches()
        for _ in range(12):
            batch = next(batches)
            assert torch.equal(wanted.of(batch)[0], model(batch.input))
        assert bool(wanted.kept[0]) == isinstance(model, nn.Identity)

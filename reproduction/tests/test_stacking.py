"""Several networks trained as one stack: each as it would be alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hap import models
from hap.data import Data, Split
from hap.errors import HapError
from hap.training.recipes import Recipe
from hap_reproduction.cifar10 import stacking
from hap_reproduction.cifar10.stacking import stack, train_stacked
from hap_reproduction.cifar10.training import Together, train_many

RECIPE = Recipe(3, batch=16, lr=0.02, warmup=0.1, eval_every=3)
RECIPES = [RECIPE, replace(RECIPE, seed=1)]


@pytest.fixture(scope="module")
def noise() -> Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=generator)
    split = Split(images, torch.arange(40) % 5)
    return Data(split, split, 5, (0.5,) * 3, (0.25,) * 3, "noise", 1, True)


class Small(nn.Module):
    """Convolutions plain and in groups, a shortcut, a norm without affine, a head. It may `shuffle` its channels,
    "always" or in "training", or `view` features with their number fixed."""

    def __init__(self, seed: int, shuffle: str = "never", view: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shuffle, self.view = shuffle, view
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.plain = nn.BatchNorm2d(8, affine=False)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.0)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x)))
        x = self.act(x + self.plain(self.grouped(x)))
        x = x.flip(1) if self.shuffle == "always" or (self.shuffle == "training" and self.training) else x
        x = nn.functional.adaptive_avg_pool2d(x, 2)
        return self.head(self.drop(x.view(-1, 32) if self.view else x.flatten(1)))


def masks_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"first.weight": torch.randint(0, 2, (8, 3, 3, 3), generator=generator).float()}


@pytest.mark.parametrize("name", ["resnet20", "preresnet29", "wide_resnet32", "vgg16_bn"])
def test_a_stack_computes_what_its_models_do(name: str) -> None:
    networks = [models.build(name).double().eval() for _ in range(2)]
    x = torch.randn(2, 6, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.cat([network(part) for network, part in zip(networks, x.chunk(2, 1), strict=True)], 1)
        found = stack(networks)(x)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("most", [2, 3])
def test_stacked_training_is_the_same_as_alone(noise: Data, most: int) -> None:
    recipes = [replace(RECIPE, seed=seed, ema=0.9, distill=0.5) for seed in (3, 4, 5)]
    teachers = [Small(9), Small(9), Small(8)]
    masks = [masks_of(0), None, masks_of(1)]
    alone, stacked = ([Small(seed) for seed in range(3)] for _ in range(2))
    expected = train_many(alone, noise, recipes, teachers=teachers, masks=masks)
    found = train_stacked(stacked, noise, recipes, teachers=teachers, masks=masks, stack=most)
    for one, other, history, same in zip(alone, stacked, expected, found, strict=True):
        assert same.loss == pytest.approx(history.loss, rel=1e-4)
        assert same.accuracy == pytest.approx(history.accuracy, abs=0.03)
        for name, tensor in other.state_dict().items():
            torch.testing.assert_close(tensor, one.state_dict()[name], rtol=1e-3, atol=1e-4)
    assert not stacked[0].first.weight[masks_of(0)["first.weight"] == 0].any()


def test_models_have_tensors_of_their_own_after_training(noise: Data) -> None:
    networks = [Small(seed) for seed in range(2)]
    train_stacked(networks, noise, [RECIPE, replace(RECIPE, seed=1)], stack=2)
    before = {name: t.clone() for name, t in networks[1].state_dict().items()}
    storages = [t.untyped_storage() for network in networks for t in network.state_dict().values()]
    assert len({s.data_ptr() for s in storages}) == len(storages)
    assert all(s.nbytes() == t.nbytes for s, t in zip(storages[len(before) :], before.values(), strict=True))
    with torch.no_grad():
        for tensor in networks[0].state_dict().values():
            tensor.zero_()
    assert all(torch.equal(t, before[name]) for name, t in networks[1].state_dict().items())


def test_a_stack_resumes_where_it_stopped(noise: Data, tmp_path: Path) -> None:
    recipes = [replace(RECIPE, seed=seed, ema=0.9) for seed in range(2)]
    whole, parts = ([Small(seed) for seed in range(2)] for _ in range(2))
    masks = [masks_of(0), masks_of(1)]
    complete = train_stacked(whole, noise, recipes, masks=masks, stack=2)
    for epochs in (1, 2, 3):
        found = train_stacked(parts, noise, recipes, masks=masks, stack=2, checkpoint_dir=tmp_path, seconds=0.0)
        assert [history.epochs for history in found] == [epochs, epochs]
    assert [h.loss for h in found] == [h.loss for h in complete]
    for one, other in zip(whole, parts, strict=True):
        assert all(torch.equal(t, one.state_dict()[name]) for name, t in other.state_dict().items())


def pair(change: Callable[[list[Small]], object] | None = None, **how: object) -> list[Small]:
    """Two networks after a change to one or both."""
    networks = [Small(seed, **how) for seed in range(2)]
    if change is not None:
        change(networks)
    return networks


def stacked(networks: list[nn.Module], data: Data, most: int = 2) -> list[Together]:
    return train_stacked(networks, data, RECIPES, stack=most)


def run_steps(network: nn.Module, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        network.train()(torch.randn(4, 3, 16, 16, generator=generator))


def assert_the_same(found: list[Small], expected: list[Small], tolerance: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, other.state_dict()[name], rtol=tolerance, atol=tolerance)


def test_what_differs_is_not_stacked(noise: Data) -> None:
    prelu = [nn.Sequential(nn.Conv2d(3, 5, 3), nn.PReLU(5), nn.AdaptiveAvgPool2d(1), nn.Flatten()) for _ in range(2)]
    networks = [*prelu, Small(0), Small(1), Small(2)]
    recipes = [RECIPE] * 4 + [replace(RECIPE, lr=0.01)]
    histories = train_stacked(networks, noise, recipes, stack=8)
    assert [history.stack for history in histories] == [1, 1, 2, 2, 1]
    assert all(history.epochs == 3 for history in histories)


def double(module: nn.Module, inputs: object, out: Tensor) -> Tensor:
    return 2 * out


APART: dict[str, Callable[[list[Small]], object]] = {
    "dropout": lambda n: setattr(n[1].drop, "p", 0.5),
    "momentum of statistics": lambda n: setattr(n[1].norm, "momentum", 0.9),
    "cumulative statistics": lambda n: [(setattr(m.norm, "momentum", None), run_steps(n[1], 5)) for m in n],
    "first one frozen": lambda n: n[0].first.requires_grad_(False),
    "second one frozen": lambda n: n[1].first.requires_grad_(False),
    "tied tensors": lambda n: [setattr(m.norm, "bias", m.first.bias) for m in n],
    "one storage": lambda n: [setattr(m.norm.bias, "data", m.first.bias.data) for m in n],
    "a layer under two names": lambda n: [setattr(m, "again", m.head) for m in n],
    "activation": lambda n: setattr(n[1], "act", nn.Tanh()),
    "flag": lambda n: setattr(n[1], "shuffle", "always"),
    "hooks": lambda n: [m.norm.register_forward_hook(double) for m in n],
    "hooks of tensors": lambda n: n[1].first.weight.register_hook(lambda grad: 0 * grad),
}


@pytest.mark.parametrize("change", APART.values(), ids=APART.keys())
def test_models_that_a_stack_cannot_stand_for_run_as_they_are(
    noise: Data, change: Callable[[list[Small]], object]
) -> None:
    alone, found = pair(change), pair(change)
    stacked(alone, noise, most=1)
    assert [history.stack for history in stacked(found, noise)] == [1, 1]
    assert_the_same(found, alone)


ALIKE: dict[str, Callable[[list[Small]], object]] = {
    "frozen alike": lambda n: [m.first.requires_grad_(False) for m in n],
    "counters that differ": lambda n: run_steps(n[1], 5),
    "one activation under two names": lambda n: [setattr(m, "again", m.act) for m in n],
    "not affine": lambda n: [setattr(m, "norm", nn.BatchNorm2d(8, affine=False)) for m in n],
}


@pytest.mark.parametrize("change", ALIKE.values(), ids=ALIKE.keys())
def test_models_that_differ_in_their_tensors_alone_are_stacked(
    noise: Data, change: Callable[[list[Small]], object]
) -> None:
    alone, found = pair(change), pair(change)
    stacked(alone, noise, most=1)
    assert [history.stack for history in stacked(found, noise)] == [2, 2]
    assert_the_same(found, alone, 1e-4)


def test_models_with_dropout_are_stacked(noise: Data) -> None:
    networks = pair(lambda n: [setattr(m.drop, "p", 0.5) for m in n])
    assert [history.stack for history in stacked(networks, noise)] == [2, 2]
    assert [m.drop.p for m in networks] == [0.5, 0.5]


@pytest.mark.parametrize("most", [0, -1])
def test_a_stack_of_less_than_one_is_refused(noise: Data, most: int) -> None:
    with pytest.raises(HapError, match=rf"stack is {most}; expected .* 1 for none"):
        stacked(pair(), noise, most)


def clear_heads(networks: list[Small]) -> None:
    for network in networks:
        nn.init.zeros_(network.head.weight)
        nn.init.zeros_(network.head.bias)


@pytest.mark.parametrize("shuffle", ["always", "training"])
@pytest.mark.parametrize("change", [None, clear_heads])
def test_a_network_that_mixes_channels_by_itself_is_refused(
    noise: Data, shuffle: str, change: Callable[[list[Small]], object] | None
) -> None:
    with pytest.raises(HapError, match=r"Small does not compute the same when 2 of it are stacked.*stack=1"):
        stacked(pair(change, shuffle=shuffle), noise)


def test_a_network_that_cannot_run_in_a_stack_is_refused(noise: Data) -> None:
    with pytest.raises(HapError, match=r"Small cannot be stacked \(.*\): train with stack=1"):
        stacked(pair(view=True), noise)


@pytest.mark.parametrize("most", [1, 2])
def test_weights_that_are_not_finite_are_named(noise: Data, most: int) -> None:
    networks = pair(lambda n: n[1].head.weight.data.fill_(float("nan")))
    with pytest.raises(HapError, match=r"head.weight of model 1 is not finite before training"):
        stacked(networks, noise, most)


def assert_own_tensors(networks: list[Small]) -> None:
    tensors = [t for network in networks for t in network.state_dict().values()]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == len(tensors)


def test_models_have_tensors_of_their_own_when_another_stack_is_refused(noise: Data) -> None:
    networks = [*pair(), *pair(shuffle="always")]
    with pytest.raises(HapError, match="does not compute the same"):
        train_stacked(networks, noise, RECIPES * 2, stack=2)
    assert_own_tensors(networks)


def test_models_have_tensors_of_their_own_when_sharing_fails(noise: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    share = stacking.Stack._share

    def failing(self: stacking.Stack, index: int, run: stacking.Run) -> None:
        share(self, index, run)
        if index:
            raise MemoryError

    monkeypatch.setattr(stacking.Stack, "_share", failing)
    networks = pair()
    with pytest.raises(MemoryError):
        stacked(networks, noise)
    assert_own_tensors(networks)


@pytest.mark.parametrize("most", [1, 2])
def test_gradients_from_before_are_no_part_of_training(noise: Data, most: int) -> None:
    fresh, used = pair(), pair()
    for parameter in (p for network in used for p in network.parameters()):
        parameter.grad = torch.ones_like(parameter)
    stacked(fresh, noise, most)
    stacked(used, noise, most)
    assert_the_same(used, fresh)
    assert all(p.grad is None for network in used for p in network.parameters())


def test_histories_tell_what_was_stacked_and_compiled(noise: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "_compiled", lambda network: network)
    networks = [Small(seed) for seed in range(5)]
    found = train_stacked(networks, noise, [RECIPE] * 5, stack=2, compiled=True)
    assert [(h.stack, h.compiled) for h in found] == [(2, True)] * 4 + [(1, False)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_stacks_agree_with_plain_steps_on_cuda(noise: Data, compiled: bool) -> None:
    recipes = [replace(RECIPE, seed=seed) for seed in range(2)]
    plain, stacked = ([Small(seed).cuda() for seed in range(2)] for _ in range(2))
    expected = train_many(plain, noise, recipes, graphs=False)
    found = train_stacked(stacked, noise, recipes, stack=2, compiled=compiled)
    for history, same in zip(expected, found, strict=True):
        assert same.loss == pytest.approx(history.loss, rel=1e-2)

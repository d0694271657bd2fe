"""Several networks trained as one stack: each as it would be alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hap import models
from hap.data import Data, Split
from hap.errors import HapError
from hap.recipes import Recipe
from hap.training import train_many
from hap.training.stacking import stack

RECIPE = Recipe(3, batch=16, lr=0.02, warmup=0.1, eval_every=3)


@pytest.fixture(scope="module")
def noise() -> Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=generator)
    split = Split(images, torch.arange(40) % 5)
    return Data(split, split, 5, (0.5,) * 3, (0.25,) * 3, "noise", 1, True)


class Small(nn.Module):
    """Convolutions plain and in groups, a shortcut, a norm without affine, a head."""

    def __init__(self, seed: int, shuffle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shuffle = shuffle
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.plain = nn.BatchNorm2d(8, affine=False)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.plain(self.grouped(x)))
        x = x.flip(1) if self.shuffle else x
        return self.head(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))


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
    expected = train_many(alone, noise, recipes, teachers=teachers, masks=masks, progress=False)
    found = train_many(stacked, noise, recipes, teachers=teachers, masks=masks, stack=most, progress=False)
    for one, other, history, same in zip(alone, stacked, expected, found, strict=True):
        assert same.loss == pytest.approx(history.loss, rel=1e-4)
        assert same.accuracy == pytest.approx(history.accuracy, abs=0.03)
        for name, tensor in other.state_dict().items():
            torch.testing.assert_close(tensor, one.state_dict()[name], rtol=1e-3, atol=1e-4)
    assert not stacked[0].first.weight[masks_of(0)["first.weight"] == 0].any()


def test_models_have_tensors_of_their_own_after_training(noise: Data) -> None:
    networks = [Small(seed) for seed in range(2)]
    train_many(networks, noise, [RECIPE, replace(RECIPE, seed=1)], stack=2, progress=False)
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
    complete = train_many(whole, noise, recipes, masks=masks, stack=2, progress=False)
    for epochs in (1, 2, 3):
        found = train_many(
            parts, noise, recipes, masks=masks, stack=2, checkpoint_dir=tmp_path, seconds=0.0, progress=False
        )
        assert [history.epochs for history in found] == [epochs, epochs]
    assert [h.loss for h in found] == [h.loss for h in complete]
    for one, other in zip(whole, parts, strict=True):
        assert all(torch.equal(t, one.state_dict()[name]) for name, t in other.state_dict().items())


def test_what_differs_is_not_stacked(noise: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    plain = stack.__globals__["Stack"].__init__

    def noted(self: object, runs: list[object], compiled: bool) -> None:
        widths.append(len(runs))
        plain(self, runs, compiled)

    monkeypatch.setattr(stack.__globals__["Stack"], "__init__", noted)
    prelu = [nn.Sequential(nn.Conv2d(3, 5, 3), nn.PReLU(5), nn.AdaptiveAvgPool2d(1), nn.Flatten()) for _ in range(2)]
    networks = [*prelu, Small(0), Small(1), Small(2)]
    recipes = [RECIPE] * 4 + [replace(RECIPE, lr=0.01)]
    histories = train_many(networks, noise, recipes, stack=8, progress=False)
    assert widths == [2]
    assert all(history.epochs == 3 for history in histories)


def test_a_network_that_mixes_channels_by_itself_is_refused(noise: Data) -> None:
    networks = [Small(seed, shuffle=True) for seed in range(2)]
    with pytest.raises(HapError, match=r"Small does not compute the same when 2 of it are stacked.*stack=1"):
        train_many(networks, noise, [RECIPE, RECIPE], stack=2, progress=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_stacks_agree_with_plain_steps_on_cuda(noise: Data, compiled: bool) -> None:
    recipes = [replace(RECIPE, seed=seed) for seed in range(2)]
    plain, stacked = ([Small(seed).cuda() for seed in range(2)] for _ in range(2))
    expected = train_many(plain, noise, recipes, graphs=False, progress=False)
    found = train_many(stacked, noise, recipes, stack=2, compiled=compiled, progress=False)
    for history, same in zip(expected, found, strict=True):
        assert same.loss == pytest.approx(history.loss, rel=1e-2)

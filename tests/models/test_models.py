"""The zoo against published sizes and sums done by hand."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from hap import models
from hap.errors import HapError

torch.set_num_threads(1)


def macs_of(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Multiply-adds of convolutions and linear layers for one image."""
    total = 0

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        total += output.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(count)
    model.eval()(torch.empty(1, *input_shape, device="meta"))
    return total


def size_of(name: str, **options: object) -> tuple[int, int]:
    with torch.device("meta"):
        model = models.build(name, **options)
    return sum(p.numel() for p in model.parameters()), macs_of(model, models.info(name).input_shape)


@pytest.mark.parametrize(
    ("name", "parameters", "million_macs"),
    [
        ("resnet20", 272_474, 40.81),
        ("resnet56", 855_770, 125.75),
        ("wide_resnet32", 7_427_914, 1_100.68),
        ("vgg16_bn", 14_724_042, 313.20),
        ("resnet18", 11_689_512, 1_814.07),
        ("resnet34", 21_797_672, 3_663.76),
        ("resnet50", 25_557_032, 4_089.18),
    ],
)
def test_published_sizes(name: str, parameters: int, million_macs: float) -> None:
    counted, macs = size_of(name)
    assert counted == parameters
    assert macs / 1e6 == pytest.approx(million_macs, abs=0.005)


def test_preresnet29_by_hand() -> None:
    # A block from a to b channels: 1x1 (a b), 3x3 (9 b b), 1x1 (b b), BatchNorms over a, b and b channels.
    same = [10 * w * w + w * w + 2 * 3 * w for w in (64, 128, 256)]
    grow = [a * b + 10 * b * b + 2 * (a + 2 * b) + a * b for a, b in ((64, 128), (128, 256))]
    stem, end = 3 * 64 * 9, 2 * 256 + 256 * 10 + 10
    parameters = stem + 3 * same[0] + grow[0] + 2 * same[1] + grow[1] + 2 * same[2] + end
    # Pixels: 32x32, 16x16, 8x8. The first 1x1 of a growing block still sees the larger image.
    first = 1024 * (stem + 3 * 11 * 64**2)
    second = 1024 * 64 * 128 + 256 * (64 * 128 + 10 * 128**2 + 2 * 11 * 128**2)
    third = 256 * 128 * 256 + 64 * (128 * 256 + 10 * 256**2 + 2 * 11 * 256**2)
    assert size_of("preresnet29") == (parameters, first + second + third + 2560)


def test_preresnet29_starts_batchnorm_at_half() -> None:
    model = models.build("preresnet29")
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 28
    assert all((m.weight == 0.5).all() and (m.bias == 0).all() for m in norms)


def test_digits_resnet_is_small() -> None:
    parameters, _ = size_of("digits_resnet")
    assert 50_000 < parameters < 100_000


@pytest.mark.parametrize("name", models.names())
def test_forward_gives_logits(name: str) -> None:
    info = models.info(name)
    with torch.device("meta"):
        logits = models.build(name, classes=7)(torch.empty(2, *info.input_shape))
    assert logits.shape == (2, 7)


def test_names_follow_the_usual_weight_files() -> None:
    cifar = models.build("resnet20").state_dict()
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight"} <= set(cifar)
    assert {"layer2.0.shortcut.0.weight", "layer2.0.shortcut.1.bias", "layer3.2.bn2.weight", "fc.weight"} <= set(cifar)
    assert not any(name.startswith("layer1.0.shortcut") for name in cifar)
    with torch.device("meta"):
        imagenet = models.build("resnet50").state_dict()
    assert {"layer1.0.downsample.0.weight", "layer4.2.conv3.weight", "fc.bias"} <= set(imagenet)
    assert len(imagenet) == 320


def test_resnet50_options() -> None:
    with torch.device("meta"):
        model = models.build("resnet50", stride_in_1x1=True, bn_eps=1e-3)
    block = model.layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1))
    assert {m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-3}
    assert size_of("resnet50", stride_in_1x1=True)[1] < size_of("resnet50")[1]


def test_shortcut_is_used() -> None:
    torch.manual_seed(0)
    block = models.build("resnet20").layer1[0].eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(1, 16, 8, 8)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: models.build("resnet57"), ["'resnet57'", "resnet56", "digits_resnet"]),
        (lambda: models.build("resnet20", classes=0), ["classes is 0", "at least 1"]),
        (lambda: models.build("resnet20", bn_eps=1.0), ["'bn_eps'", "channels"]),
        (lambda: models.build("vgg16_bn", depth=3), ["'depth'", "no options"]),
        (lambda: models.resolve("no_such_package.net:make"), ["no_such_package.net", "PYTHONPATH"]),
        (lambda: models.resolve("torch.nn:NoLayer"), ["'torch.nn'", "'NoLayer'"]),
        (lambda: models.resolve("math:pi"), ["'pi'", "float", "function or class"]),
        (lambda: models.resolve("builtins:dict"), ["dict", "torch.nn.Module"]),
        (lambda: models.resolve("builtins:dict", classes=3), ["dict", "torch.nn.Module"]),
        (lambda: models.resolve("torch.nn:"), ["package.module:factory"]),
        (lambda: models.resolve(".nn:Linear"), ["package.module:factory"]),
        (lambda: models.resolve("torch.nn:Linear"), ["in_features", "without arguments"]),
    ],
)
def test_errors_say_what_to_do(call: object, words: list[str]) -> None:
    with pytest.raises(HapError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_resolve_passes_classes_where_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_networks")
    module.sized = lambda classes=3: nn.Linear(2, classes)
    module.fixed = lambda: nn.Linear(2, 4)
    monkeypatch.setitem(sys.modules, "my_networks", module)
    assert models.resolve("my_networks:sized", classes=5).out_features == 5
    assert models.resolve("my_networks:sized").out_features == 3
    assert models.resolve("my_networks:fixed", classes=5).out_features == 4
    assert models.resolve("resnet20", classes=5).fc.out_features == 5
    assert models.resolve("torch.nn:Identity", classes=5)(1) == 1

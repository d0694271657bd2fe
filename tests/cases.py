"""The table of small networks that every promise is held against.

Each case makes (model, example): float64, eval mode, random normalisation statistics and affine values, so that no
term of any identity is trivially zero. `FROZEN` names the cases in which something may not be cut, and what the
trace must say of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Case = Callable[[], tuple[nn.Module, Any]]
CASES: dict[str, Case] = {}


class Net(nn.Module):
    """A network from named modules and one function of (network, inputs)."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module | Tensor):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            if isinstance(module, Tensor) and not isinstance(module, nn.Parameter):
                self.register_buffer(name, module)
            else:
                setattr(self, name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def randomise(model: nn.Module) -> nn.Module:
    """Statistics, scales and shifts that matter."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | nn.PReLU):
                for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                    if name in ("weight", "running_var"):
                        tensor.uniform_(0.4, 1.6)
                    elif tensor.is_floating_point():
                        tensor.normal_(0, 0.4)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 8, 8)), dtype=torch.float64)


def case(function: Callable[[], tuple[nn.Module, Any]]) -> Case:
    def make() -> tuple[nn.Module, Any]:
        with torch.random.fork_rng():
            torch.manual_seed(zlib.crc32(function.__name__.encode()))
            model, example = function()
            return randomise(model.double()).eval(), example

    CASES[function.__name__] = make
    return make


def conv(a: int, b: int, k: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(a, b, k, padding=options.pop("padding", k // 2), bias=options.pop("bias", False), **options)


def conv_bn(a: int, b: int, k: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(conv(a, b, k, **options), nn.BatchNorm2d(b))


def conv_bn_relu(a: int, b: int, k: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(*conv_bn(a, b, k, **options), nn.ReLU())


def pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3))


# ---- chains -------------------------------------------------------------------------------------------------


@case
def plain() -> Any:
    return net_chain(conv_bn_relu(3, 8), conv_bn_relu(8, 6), width=6), images()


def net_chain(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


@case
def bias_without_norm() -> Any:
    return net_chain(conv(3, 7, bias=True), nn.ReLU(), conv(7, 6, bias=True), nn.ReLU(), width=6), images()


@case
def vgg() -> Any:
    return (
        nn.Sequential(
            conv_bn_relu(3, 6),
            nn.MaxPool2d(2),
            conv_bn_relu(6, 8),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 4, 10),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(10, 5),
        ),
        images(),
    )


@case
def dilated() -> Any:
    return net_chain(conv(3, 6, dilation=2, padding=2), nn.ReLU(), conv(6, 6, dilation=3, padding=1), width=6), images()


@case
def even_kernels() -> Any:
    return net_chain(conv(3, 6, 2, padding=1), nn.ReLU(), conv(6, 8, 4, padding=1, stride=2), width=8), images()


@case
def valid_padding() -> Any:
    return net_chain(conv(3, 6, padding=0), nn.ReLU(), conv(6, 8, padding=0, bias=True), nn.ReLU(), width=8), images()


@case
def same_padding() -> Any:
    return net_chain(conv(3, 6, padding="same"), nn.ReLU(), conv(6, 8, 5, padding="same"), width=8), images()


@case
def strided_and_pooled() -> Any:
    return net_chain(conv_bn_relu(3, 6, stride=2), nn.MaxPool2d(2), conv_bn_relu(6, 7), width=7), images()


@case
def reflect_padding() -> Any:
    return net_chain(
        conv(3, 6, padding_mode="reflect"), nn.ReLU(), conv(6, 5, padding_mode="circular"), width=5
    ), images()


@case
def zero_padded_by_hand() -> Any:
    return net_chain(conv(3, 6), nn.ReLU(), nn.ZeroPad2d((0, 1, 0, 1)), conv(6, 7, padding=0), width=7), images()


@case
def conv1d() -> Any:
    layers = nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 8, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 5)), images(2, 3, 12)


@case
def conv3d() -> Any:
    layers = nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 5, 2), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(5, 4)), images(2, 2, 4, 4, 4)


@case
def mlp() -> Any:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4)), images(3, 6)


@case
def mlp_with_norm() -> Any:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4)), images(3, 6)


@case
def smooth() -> Any:
    return net_chain(conv_bn(3, 6), nn.GELU(), conv(6, 7, bias=True), nn.Sigmoid(), width=7), images()


@case
def prelu() -> Any:
    return net_chain(conv(3, 6), nn.PReLU(6), conv(6, 7), nn.PReLU(), width=7), images()


@case
def identity_and_dropout() -> Any:
    return net_chain(conv(3, 6), nn.Identity(), nn.Dropout2d(0.5), conv_bn_relu(6, 7), nn.Dropout(), width=7), images()


@case
def inplace_functional() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.a(x), inplace=True)
        y = y + F.relu_(m.b(y))
        y += 1
        return m.head(pooled(F.hardtanh(y, inplace=True)))

    return Net(run, a=conv_bn(3, 6), b=conv_bn(6, 6), head=nn.Linear(6, 5)), images()


@case
def one_channel() -> Any:
    return net_chain(conv(3, 1), nn.ReLU(), conv(1, 6), nn.ReLU(), width=6), images()


# ---- residual sums ------------------------------------------------------------------------------------------


@case
def residual() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = F.relu(m.b1(x) + x)
        x = F.relu(m.b2(x) + m.shortcut(x))
        return m.head(pooled(x))

    return (
        Net(
            run,
            stem=conv_bn_relu(3, 6),
            b1=nn.Sequential(conv_bn_relu(6, 5), conv_bn(5, 6)),
            b2=nn.Sequential(conv_bn_relu(6, 8, stride=2), conv_bn(8, 8)),
            shortcut=conv_bn(6, 8, 1, stride=2),
            head=nn.Linear(8, 5),
        ),
        images(),
    )


@case
def preactivation() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.b1(x)
        y = m.enter(x)
        x = m.shortcut(y) + m.b2(y)
        return m.head(pooled(F.relu(m.last(x))))

    def block(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(conv(a, b, 1), nn.BatchNorm2d(b), nn.ReLU(), conv(b, b))

    return (
        Net(
            run,
            stem=conv(3, 6),
            b1=nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), block(6, 6)),
            enter=nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()),
            shortcut=conv(6, 7, 1),
            b2=block(6, 7),
            last=nn.BatchNorm2d(7),
            head=nn.Linear(7, 5),
        ),
        images(),
    )


@case
def bottleneck() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = F.relu(m.b1(x) + m.shortcut(x))
        x = F.relu(m.b2(x) + x)
        return m.head(pooled(x))

    def block(a: int, b: int, c: int) -> nn.Sequential:
        return nn.Sequential(conv_bn_relu(a, b, 1), conv_bn_relu(b, b), conv_bn(b, c, 1))

    return (
        Net(
            run,
            stem=conv_bn_relu(3, 5),
            b1=block(5, 4, 9),
            shortcut=conv_bn(5, 9, 1),
            b2=block(9, 4, 9),
            head=nn.Linear(9, 5),
        ),
        images(),
    )


@case
def residual_on_input() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(pooled(F.relu(m.b(F.relu(m.a(x))) + x)))

    return Net(run, a=conv(3, 6), b=conv_bn(6, 3), head=nn.Linear(3, 5)), images()


@case
def subtraction_and_pools() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.a(x))
        z = F.max_pool2d(F.relu(m.b(y)), 2) - F.avg_pool2d(m.c(y), 2)
        return m.head(pooled(z))

    return Net(run, a=conv_bn(3, 6), b=conv_bn(6, 7), c=conv(6, 7, 1, bias=True), head=nn.Linear(7, 5)), images()


@case
def zero_padded_shortcut() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return m.head(pooled(F.relu(m.b(x) + y)))

    block = nn.Sequential(conv_bn_relu(4, 6, stride=2), conv_bn(6, 8))
    return Net(run, stem=conv_bn_relu(3, 4), b=block, head=nn.Linear(8, 5)), images()


@case
def grouped_branch_on_sum() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(pooled(F.relu(m.a(x) + m.b(x))))

    return Net(run, stem=conv_bn_relu(3, 8), a=conv_bn(8, 8), b=conv_bn(8, 8, groups=2), head=nn.Linear(8, 5)), images()


@case
def two_grouped_branches_on_sum() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(pooled(F.relu(m.a(x) + m.b(x))))

    return (
        Net(
            run,
            stem=conv_bn_relu(3, 8),
            a=conv_bn(8, 12, groups=4),
            b=conv_bn(8, 12, 1, groups=4),
            head=nn.Linear(12, 5),
        ),
        images(),
    )


@case
def one_producer_two_sums() -> Any:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = m.stem(x)
        y = m.a(x)
        return m.h1(pooled(F.relu(m.n1(y) + m.b(x)))), m.h2(pooled(F.relu(m.n2(y) + m.c(x))))

    return (
        Net(
            run,
            stem=conv_bn_relu(3, 6),
            a=conv(6, 7),
            n1=nn.BatchNorm2d(7),
            n2=nn.BatchNorm2d(7),
            b=conv_bn(6, 7),
            c=conv_bn(6, 7, 1),
            h1=nn.Linear(7, 5),
            h2=nn.Linear(7, 4),
        ),
        images(),
    )


@case
def depthwise_of_input_on_sum() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(pooled(F.relu(m.a(x) + m.b(x))))

    return Net(run, a=conv_bn(3, 3), b=conv_bn(3, 3, groups=3), head=nn.Linear(3, 5)), images()


@case
def residual_with_branches() -> Any:
    """Units of one group with different costs: half of the sum's channels have a 3x3 partner, half a 1x1 one."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.c(x) + torch.cat([m.a(x), m.b(x)], 1)
        return m.head(pooled(F.relu(y)))

    return (
        Net(run, stem=conv_bn_relu(3, 6), c=conv(6, 8, 1), a=conv(6, 4, 5), b=conv(6, 4, 1), head=nn.Linear(8, 5)),
        images(),
    )


@case
def scaled_residual() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.b(x) * m.scale.view(1, -1, 1, 1)
        return m.head(pooled(F.relu(x)) + m.shift)

    return (
        Net(
            run,
            stem=conv_bn_relu(3, 6),
            b=conv_bn(6, 6),
            scale=nn.Parameter(torch.randn(6)),
            shift=nn.Parameter(torch.randn(1, 6)),
            head=nn.Linear(6, 5),
        ),
        images(),
    )


# ---- concatenation and splitting ----------------------------------------------------------------------------


@case
def dense_block() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.cat([x, m.a(F.relu(m.na(x)))], 1)
        x = torch.cat([x, m.b(F.relu(m.nb(x)))], 1)
        return m.head(pooled(F.relu(m.last(x))))

    return (
        Net(
            run,
            stem=conv(3, 6),
            na=nn.BatchNorm2d(6),
            a=conv(6, 4),
            nb=nn.BatchNorm2d(10),
            b=conv(10, 4),
            last=nn.BatchNorm2d(14),
            head=nn.Linear(14, 5),
        ),
        images(),
    )


@case
def inception() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.cat([m.a(x), m.b(x), m.c(x), m.d(F.avg_pool2d(x, 3, 1, 1))], 1)
        return m.head(pooled(m.mix(x)))

    return (
        Net(
            run,
            stem=conv_bn_relu(3, 6),
            a=conv_bn_relu(6, 4, 1),
            c=conv_bn_relu(6, 4, 5),
            d=conv_bn_relu(6, 3, 1),
            b=nn.Sequential(conv_bn_relu(6, 3, 1), conv_bn_relu(3, 5)),
            mix=conv_bn_relu(16, 7),
            head=nn.Linear(7, 5),
        ),
        images(),
    )


@case
def concatenated_flattened() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([m.a(x), m.b(x)], 1)
        return m.head(F.relu(F.max_pool2d(y, 4).flatten(1)))

    return Net(run, a=conv(3, 4), b=conv(3, 5, 1), head=nn.Linear(9 * 4, 5)), images()


@case
def same_tensor_concatenated() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.a(x))
        return m.head(pooled(m.b(x) + m.norm(torch.cat([y, y], 1))))

    return Net(run, a=conv(3, 4), b=conv(3, 8), norm=nn.BatchNorm2d(8), head=nn.Linear(8, 5)), images()


@case
def split_concat() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        a, b = torch.split(m.stem(x), [4, 4], 1)
        y = torch.cat([m.a(a), b], 1)
        return m.head(pooled(F.relu(m.mix(y))))

    return Net(run, stem=conv_bn_relu(3, 8), a=conv_bn_relu(4, 6), mix=conv_bn(10, 6), head=nn.Linear(6, 5)), images()


@case
def concatenated_then_chunked() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([m.a(x), m.b(x)], 1)
        a, b = F.relu(y).chunk(2, 1)
        return m.head(pooled(torch.cat([m.c(a), m.d(b)], 1)))

    return Net(run, a=conv(3, 6), b=conv(3, 6), c=conv(6, 4), d=conv(6, 4), head=nn.Linear(8, 5)), images()


@case
def gated_unit() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        a, b = m.a(x).chunk(2, 1)
        return m.head(pooled(F.glu(m.b(a * torch.sigmoid(b)), 1)))

    return Net(run, a=conv(3, 12), b=conv(6, 10), head=nn.Linear(5, 5)), images()


@case
def first_channels_only() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(pooled(F.relu(m.b(F.relu(m.a(x))[:, :4]))))

    return Net(run, a=conv(3, 8), b=conv(4, 6), head=nn.Linear(6, 5)), images()


@case
def one_channel_picked() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.head(pooled(F.relu(m.b(y)))) + y[:, 0].mean((1, 2)).unsqueeze(1)

    return Net(run, a=conv(3, 8), b=conv(8, 6), head=nn.Linear(6, 5)), images()


@case
def channel_written_over() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).clone()
        y[:, 0] = 1.0
        return m.head(pooled(F.relu(m.b(y))))

    return Net(run, a=conv(3, 8), b=conv(8, 6), head=nn.Linear(6, 5)), images()


@case
def rolled_and_flipped() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.b(m.a(x).flip(1))).roll(2, 3)
        return m.head(pooled(F.relu(m.c(y.roll(1, 1)))))

    return Net(run, a=conv(3, 6), b=conv(6, 8), c=conv(8, 5), head=nn.Linear(5, 5)), images()


@case
def padded_with_ones() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.pad(F.relu(m.a(x)), (0, 0, 0, 0, 0, 2), value=1.0)
        return m.head(pooled(F.relu(m.b(y))))

    return Net(run, a=conv(3, 6), b=conv(8, 6), head=nn.Linear(6, 5)), images()


@case
def repeated_channels() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([m.a(x).repeat(1, 2, 1, 1), m.c(x).repeat_interleave(2, 1)], 1)
        return m.head(pooled(F.relu(m.b(F.relu(y)))))

    return Net(run, a=conv(3, 4), c=conv(3, 4), b=conv(16, 6), head=nn.Linear(6, 5)), images()


# ---- grouped, depthwise, shuffled ---------------------------------------------------------------------------


@case
def grouped_many() -> Any:
    """More groups than channels in each: whole groups go."""
    return net_chain(conv_bn_relu(3, 8), conv_bn_relu(8, 12, groups=4), conv_bn_relu(12, 6), width=6), images()


@case
def grouped_few() -> Any:
    """Fewer groups than channels in each: the same channels of every group go."""
    return net_chain(conv_bn_relu(3, 8), conv_bn_relu(8, 10, groups=2), conv_bn_relu(10, 6), width=6), images()


@case
def depthwise() -> Any:
    return (
        net_chain(
            conv_bn_relu(3, 7), conv_bn_relu(7, 7, groups=7), conv_bn_relu(7, 6, 1), conv(6, 12, groups=6), width=12
        ),
        images(),
    )


@case
def inverted_residual() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.b(x)
        return m.head(pooled(x))

    block = nn.Sequential(conv_bn(4, 9, 1), nn.ReLU6(), conv_bn(9, 9, groups=9), nn.ReLU6(), conv_bn(9, 4, 1))
    return Net(run, stem=conv_bn_relu(3, 4), b=block, head=nn.Linear(4, 5)), images()


@case
def channel_shuffle() -> Any:
    def shuffled(x: Tensor, groups: int) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.b(F.relu(shuffled(m.a(x), 2)))
        return m.head(pooled(F.relu(m.last(x))))

    return (
        Net(
            run,
            stem=conv_bn_relu(3, 6),
            a=conv_bn(6, 8, 1, groups=2),
            b=conv_bn(8, 6, groups=2),
            last=conv(6, 6),
            head=nn.Linear(6, 5),
        ),
        images(),
    )


@case
def shuffle_unit() -> Any:
    """ShuffleNet's second version: split, work on one half, join, shuffle."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        a, b = x.chunk(2, 1)
        y = F.channel_shuffle(torch.cat([a, m.b(b)], 1), 2)
        return m.head(pooled(F.relu(m.last(y))))

    block = nn.Sequential(conv_bn_relu(4, 5, 1), conv_bn(5, 5, groups=5), conv_bn_relu(5, 4, 1))
    return Net(run, stem=conv_bn_relu(3, 8), b=block, last=conv(8, 6), head=nn.Linear(6, 5)), images()


class FunctionalGrouped(nn.Module):
    def __init__(self, a: int, b: int, groups: int):
        super().__init__()
        self.weight, self.number = nn.Parameter(torch.randn(b, a // groups, 3, 3) / 3), groups

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, padding=1, groups=self.number)


@case
def functional_grouped() -> Any:
    return net_chain(conv_bn_relu(3, 8), FunctionalGrouped(8, 8, 4), nn.ReLU(), conv(8, 6), width=6), images()


@case
def blur_filter() -> Any:
    """A fixed depthwise filter kept as a buffer."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.conv2d(F.relu(m.a(x)), m.kernel, padding=1, stride=2, groups=6)
        return m.head(pooled(F.relu(m.b(y))))

    return Net(run, a=conv(3, 6), kernel=torch.rand(6, 1, 3, 3) / 9, b=conv(6, 5), head=nn.Linear(5, 5)), images()


# ---- attention over channels and space ----------------------------------------------------------------------


@case
def squeeze_excite() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.b(x)
        gate = torch.sigmoid(m.up(F.relu(m.down(F.adaptive_avg_pool2d(y, 1)))))
        return m.head(pooled(F.relu(y * gate + x)))

    return (
        Net(
            run,
            stem=conv_bn_relu(3, 6),
            b=conv_bn(6, 6),
            down=conv(6, 3, 1, bias=True),
            up=conv(3, 6, 1, bias=True),
            head=nn.Linear(6, 5),
        ),
        images(),
    )


@case
def squeeze_excite_linear() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.silu(m.a(x))
        n, c, _, _ = y.shape
        gate = F.hardsigmoid(m.up(F.relu(m.down(y.mean((2, 3)))))).view(n, c, 1, 1)
        return m.head(pooled(m.b(y * gate.expand_as(y))))

    return (
        Net(run, a=conv_bn(3, 6), down=nn.Linear(6, 4), up=nn.Linear(4, 6), b=conv(6, 5), head=nn.Linear(5, 5)),
        images(),
    )


@case
def efficient_channel_attention() -> Any:
    """A convolution that runs along the channel axis: those channels may not be cut."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.b(m.a(x)))
        gate = torch.sigmoid(m.mix(pooled(y).unsqueeze(1))).squeeze(1)[:, :, None, None]
        return m.head(pooled(y * gate))

    return (
        Net(run, a=conv_bn_relu(3, 7), b=conv(7, 6), mix=nn.Conv1d(1, 1, 3, padding=1), head=nn.Linear(6, 5)),
        images(),
    )


@case
def summed_over_channels() -> Any:
    """A sum over channels is another one with fewer: those may not be cut, the ones before and after may."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.b(m.a(x)))
        return m.head(pooled(F.relu(m.c(y * torch.sigmoid(y.sum(1, keepdim=True))))))

    return Net(run, a=conv_bn_relu(3, 7), b=conv(7, 6), c=conv(6, 8), head=nn.Linear(8, 5)), images()


@case
def decomposed_positions() -> Any:
    """Heads with a position table that meets the queries in an einsum, as in MViT."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).reshape(2, 6, 3, -1, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.mT + torch.einsum("bhqc,qkc->bhqk", q, m.table)
        return m.head((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    table = nn.Parameter(torch.randn(6, 6, 4))
    return Net(run, qkv=nn.Linear(5, 36), table=table, head=nn.Linear(12, 5)), images(2, 6, 5)


@case
def spatial_attention() -> Any:
    """Mean and maximum over channels: what is left of them is averaged on."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.b(m.a(x)))
        stats = torch.cat([y.mean(1, keepdim=True), y.max(1, keepdim=True).values], 1)
        return m.head(pooled(F.relu(m.c(y * torch.sigmoid(m.mix(stats))))))

    return (Net(run, a=conv_bn_relu(3, 7), b=conv(7, 6), mix=conv(2, 1), c=conv(6, 8), head=nn.Linear(8, 5)), images())


@case
def spatial_gate() -> Any:
    """One map stretched over all channels."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.head(pooled(F.relu(m.c(torch.sigmoid(m.mix(y)) * y))))

    return Net(run, a=conv_bn_relu(3, 7), mix=conv(7, 1), c=conv(7, 6), head=nn.Linear(6, 5)), images()


@case
def unit_length() -> Any:
    """Activations divided by their length over the channels."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.normalize(F.relu(m.b(m.a(x))), dim=1)
        return m.head(pooled(m.c(y)))

    return Net(run, a=conv_bn_relu(3, 7), b=conv(7, 6), c=conv(6, 5), head=nn.Linear(5, 5)), images()


@case
def vector_norm() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.b(m.a(x)))
        y = y / (torch.linalg.vector_norm(y, 2, 1, keepdim=True) + 1)
        return m.head(pooled(m.c(y)) + torch.norm(y, 2, dim=(2, 3)).sum(1, keepdim=True))

    return Net(run, a=conv_bn_relu(3, 7), b=conv(7, 6), c=conv(6, 5), head=nn.Linear(5, 5)), images()


@case
def sorted_maps() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.a(x)).flatten(2)
        top, _ = torch.sort(y)
        return m.head(torch.relu(m.b(top[:, :, -3:].mean(2))))

    return Net(run, a=conv(3, 7), b=nn.Linear(7, 6), head=nn.Linear(6, 5)), images()


@case
def softmax_over_channels() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.softmax(m.b(F.relu(m.a(x))), dim=1)
        return m.head(pooled(F.softmax(m.c(y).flatten(2), -1).view(2, 6, 8, 8)))

    return Net(run, a=conv(3, 7), b=conv(7, 5), c=conv(5, 6), head=nn.Linear(6, 5)), images()


@case
def products_of_activations() -> Any:
    """Matrix products of activations have no rule: what they touch is frozen, and the trace says so."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.b(F.relu(m.a(x))).flatten(2)
        return m.head((y @ y.transpose(1, 2)).flatten(1))

    return Net(run, a=conv(3, 7), b=conv(7, 4), head=nn.Linear(16, 5)), images()


# ---- shared and tied ----------------------------------------------------------------------------------------


@case
def shared_module() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = F.relu(m.again(x))
        x = F.relu(m.again(x))
        return m.head(pooled(x))

    return Net(run, stem=conv_bn_relu(3, 6), again=conv(6, 6, bias=True), head=nn.Linear(6, 5)), images()


@case
def shared_module_on_sums() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = F.relu(x + m.again(x))
        x = F.relu(x + m.again(x))
        return m.head(pooled(x))

    return Net(run, stem=conv_bn_relu(3, 6), again=conv(6, 6, bias=True), head=nn.Linear(6, 5)), images()


@case
def module_with_two_names() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.first(m.stem(x)))
        return m.head(pooled(F.relu(m.second(x) + x)))

    shared = conv(6, 6)
    return Net(run, stem=conv_bn_relu(3, 6), first=shared, second=shared, head=nn.Linear(6, 5)), images()


@case
def tied_parameters() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(
            pooled(F.relu(m.a(x)) + F.relu(m.b(x[:, :, ::2, ::2])).repeat_interleave(2, 2).repeat_interleave(2, 3))
        )

    a, b = conv(6, 7), conv(6, 7)
    b.weight = a.weight
    return Net(run, stem=conv_bn_relu(3, 6), a=a, b=b, head=nn.Linear(7, 5)), images()


@case
def tied_on_two_sums() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.last(F.relu(x + m.a(x)))
        return m.head(pooled(F.relu(m.b(x) + y)))

    a, b = conv(6, 6), conv(6, 6)
    b.weight = a.weight
    return Net(run, stem=conv_bn_relu(3, 6), a=a, b=b, last=conv_bn(6, 6), head=nn.Linear(6, 5)), images()


@case
def functional_weight() -> Any:
    """A module's weight used without calling the module."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, m.a.weight, m.a.bias, padding=1))
        return m.head(pooled(F.relu(m.b(y))))

    return Net(run, a=conv(3, 6, bias=True), b=conv(6, 7), head=nn.Linear(7, 5)), images()


class TwoWeights(nn.Module):
    """Two layers written by hand in one module."""

    def __init__(self, a: int, b: int, c: int):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(b, a) / 3), nn.Parameter(torch.randn(c, b) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.up)), self.down)


@case
def two_weights_in_one_module() -> Any:
    return nn.Sequential(TwoWeights(6, 9, 7), nn.ReLU(), nn.Linear(7, 4)), images(3, 6)


@case
def learned_query() -> Any:
    """A parameter that enters a layer as an input."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(F.relu(m.a(x) + m.b(m.query)))

    return Net(
        run, a=nn.Linear(6, 8), b=nn.Linear(5, 8), query=nn.Parameter(torch.randn(5)), head=nn.Linear(8, 4)
    ), images(3, 6)


@case
def standardised_weight() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        w = m.b.weight - m.b.weight.mean((1, 2, 3), keepdim=True)
        return m.head(pooled(F.relu(m.c(F.relu(F.conv2d(m.a(x), w, padding=1))))))

    return Net(run, a=conv_bn_relu(3, 6), b=conv(6, 7), c=conv(7, 6), head=nn.Linear(6, 5)), images()


@case
def filtered_by_activations() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        w = m.b.weight * m.gate(pooled(x).mean(0)).view(-1, 1, 1, 1)
        return m.head(pooled(F.relu(m.c(F.relu(F.conv2d(m.a(x), w, padding=1))))))

    return (
        Net(run, a=conv_bn_relu(3, 6), b=conv(6, 7), gate=nn.Linear(3, 7), c=conv(7, 6), head=nn.Linear(6, 5)),
        images(),
    )


@case
def transposed_weights() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(pooled(m.a(x)) @ m.b.weight.T + m.b.bias)
        one, two = m.c.weight.chunk(2)
        left, right = m.c.bias.chunk(2)
        return m.head(F.relu(F.linear(y, one, left)) * F.linear(y, two, right))

    return (Net(run, a=conv_bn_relu(3, 6), b=nn.Linear(6, 7), c=nn.Linear(7, 10), head=nn.Linear(5, 3)), images())


@case
def weight_normalised() -> Any:
    made = nn.utils.parametrizations.weight_norm(conv(6, 7))

    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(pooled(F.relu(m.c(F.relu(m.b(m.a(x)))))))

    return Net(run, a=conv_bn_relu(3, 6), b=made, c=conv(7, 6), head=nn.Linear(6, 5)), images()


@case
def split_by_tuple() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        gate, plain, mixed = torch.split(m.a(x), m.sizes, 1)
        return m.head(pooled(F.gelu(gate) * torch.cat([plain, m.b(mixed)], 1)))

    model = Net(run, a=conv(3, 24), b=conv(8, 8, groups=8), head=nn.Linear(12, 5))
    model.sizes = (12, 4, 8)
    return model, images()


@case
def multihead_attention() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        tokens = m.a(x).flatten(2).transpose(1, 2)
        y = tokens + m.own(tokens, tokens, tokens, need_weights=False)[0]
        return m.head(m.cross(y, tokens, tokens + 1)[0].mean(1))

    own, cross = (nn.MultiheadAttention(12, 4, batch_first=True) for _ in range(2))
    return Net(run, a=conv(3, 12, stride=2), own=own, cross=cross, head=nn.Linear(12, 5)), images()


@case
def inside_autocast() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.a(x)).flatten(2).transpose(1, 2)
        with torch.autocast("cpu", enabled=False):
            y = F.relu(m.b(y))
        return m.head(y.mean(1))

    return Net(run, a=conv(3, 6, stride=2), b=nn.Linear(6, 7), head=nn.Linear(7, 5)), images()


@case
def spatial_parameters() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x) + m.plane
        y = F.relu(m.b(y)) * m.volume
        return m.head(pooled(F.relu(m.c(y))))

    return (
        Net(
            run,
            a=conv_bn_relu(3, 6),
            plane=nn.Parameter(torch.randn(8, 8)),
            b=conv(6, 7),
            volume=nn.Parameter(torch.randn(1, 7, 8, 8)),
            c=conv(7, 6),
            head=nn.Linear(6, 5),
        ),
        images(),
    )


# ---- transposed, up and down --------------------------------------------------------------------------------


@case
def transposed() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.last(F.relu(m.b(F.relu(m.up(m.a(x))))))

    up = nn.ConvTranspose2d(6, 7, 3, stride=2, padding=1, output_padding=1)
    return Net(run, a=conv_bn_relu(3, 6, stride=2), up=up, b=conv_bn(7, 5), last=conv(5, 3, 1, bias=True)), images()


@case
def grouped_transposed() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.last(F.relu(m.norm(m.up(m.a(x)))))

    up = nn.ConvTranspose2d(8, 12, 2, stride=2, groups=4)
    return Net(run, a=conv_bn_relu(3, 8, stride=2), up=up, norm=nn.BatchNorm2d(12), last=conv(12, 3)), images()


@case
def unet_transposed() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        a = m.down1(x)
        b = m.down2(F.max_pool2d(a, 2))
        y = torch.cat([a, m.up(b)], 1)
        return m.last(m.mix(y))

    return (
        Net(
            run,
            down1=conv_bn_relu(3, 5),
            down2=conv_bn_relu(5, 8),
            up=nn.ConvTranspose2d(8, 6, 2, stride=2),
            mix=conv_bn_relu(11, 6),
            last=conv(6, 2, 1, bias=True),
        ),
        images(),
    )


@case
def unet_upsampled() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        a = m.down1(x)
        b = m.down2(F.max_pool2d(a, 2))
        y = torch.cat([F.interpolate(b, scale_factor=2.0, mode="bilinear"), a], 1)
        return m.last(m.mix(y) + F.interpolate(m.side(b), scale_factor=2, mode="nearest"))

    return (
        Net(
            run,
            down1=conv_bn_relu(3, 5),
            down2=conv_bn_relu(5, 8),
            side=conv_bn(8, 6, 1),
            mix=conv_bn(13, 6),
            last=conv(6, 2, 1, bias=True),
        ),
        images(),
    )


@case
def pixel_shuffle() -> Any:
    layers = conv_bn_relu(3, 6), conv(6, 12), nn.PixelShuffle(2), nn.ReLU(), conv(3, 5), nn.ReLU(), conv(5, 2)
    return nn.Sequential(*layers), images(2, 3, 4, 4)


# ---- normalisations -----------------------------------------------------------------------------------------


@case
def group_norm_many() -> Any:
    """More groups than channels in each: whole groups go and the others stay as they are."""
    return net_chain(conv(3, 12), nn.GroupNorm(6, 12), nn.ReLU(), conv(12, 6), width=6), images()


@case
def group_norm_few() -> Any:
    """Fewer groups than channels in each: the statistics of every group change."""
    return net_chain(conv(3, 12), nn.GroupNorm(2, 12), nn.ReLU(), conv(12, 6), nn.ReLU(), conv(6, 5), width=5), images()


@case
def group_norm_without_affine() -> Any:
    return net_chain(conv(3, 12), nn.GroupNorm(6, 12, affine=False), nn.ReLU(), conv(12, 6), width=6), images()


@case
def functional_group_norm() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(pooled(F.relu(m.b(F.relu(F.group_norm(m.a(x), 6))))))

    return Net(run, a=conv(3, 12), b=conv(12, 6), head=nn.Linear(6, 5)), images()


@case
def layer_norm_mlp() -> Any:
    return nn.Sequential(
        nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4)
    ), images(3, 6)


@case
def layer_norm_without_affine() -> Any:
    layers = nn.Linear(6, 9), nn.LayerNorm(9, elementwise_affine=False), nn.ReLU(), nn.Linear(9, 7), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(7, 4)), images(3, 6)


@case
def layer_norm_over_maps() -> Any:
    """Several axes at once: on the input, and on something that is then frozen."""
    layers = nn.LayerNorm([3, 8, 8]), conv_bn_relu(3, 7), conv(7, 6), nn.LayerNorm([6, 8, 8]), nn.ReLU()
    return net_chain(*layers, width=6), images()


@case
def rms_norm_mlp() -> Any:
    return nn.Sequential(nn.Linear(6, 9), nn.RMSNorm(9), nn.ReLU(), nn.Linear(9, 4)), images(3, 6)


@case
def instance_norm() -> Any:
    layers = conv(3, 6), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), conv(6, 7), nn.InstanceNorm2d(7), nn.ReLU()
    return net_chain(*layers, conv(7, 5), nn.InstanceNorm2d(5, track_running_stats=True), width=5), images()


@case
def batch_norm_without_affine() -> Any:
    layers = conv(3, 6), nn.BatchNorm2d(6, affine=False), nn.ReLU(), conv(6, 7)
    return net_chain(*layers, nn.BatchNorm2d(7, affine=False, track_running_stats=False), nn.ReLU(), width=7), images()


@case
def convnext_block() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.norm(m.mix(x).permute(0, 2, 3, 1))
        y = m.down(F.gelu(m.up(y))) * m.scale
        x = x + y.permute(0, 3, 1, 2)
        return m.head(m.last(pooled(x)))

    return (
        Net(
            run,
            stem=conv(3, 6, 2, stride=2, padding=0),
            mix=conv(6, 6, 5, groups=6, bias=True),
            norm=nn.LayerNorm(6),
            up=nn.Linear(6, 10),
            down=nn.Linear(10, 6),
            scale=nn.Parameter(torch.randn(6)),
            last=nn.LayerNorm(6),
            head=nn.Linear(6, 5),
        ),
        images(),
    )


# ---- inputs and outputs -------------------------------------------------------------------------------------


@case
def two_inputs() -> Any:
    def run(m: Any, x: Tensor, z: Tensor) -> Tensor:
        y = m.a(x) + m.b(z)[:, :, None, None]
        return m.head(pooled(F.relu(m.c(F.relu(y)))))

    return (Net(run, a=conv_bn(3, 6), b=nn.Linear(4, 6), c=conv(6, 7), head=nn.Linear(7, 5)), (images(), images(2, 4)))


@case
def named_inputs() -> Any:
    def run(m: Any, *, left: Tensor, right: Tensor) -> Tensor:
        return m.head(pooled(m.c(torch.cat([F.relu(m.a(left)), F.relu(m.b(right))], 1))))

    return (
        Net(run, a=conv_bn(3, 6), b=conv_bn(2, 4), c=conv_bn_relu(10, 7), head=nn.Linear(7, 5)),
        {"left": images(), "right": images(2, 2, 8, 8)},
    )


@case
def outputs_in_tuple() -> Any:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = m.stem(x)
        return m.head(pooled(x)), m.map(F.relu(m.a(x)))

    return Net(run, stem=conv_bn_relu(3, 6), head=nn.Linear(6, 5), a=conv(6, 7), map=conv(7, 2, 1)), images()


@case
def outputs_in_dict() -> Any:
    def run(m: Any, x: Tensor) -> dict[str, Tensor]:
        x = m.stem(x)
        y = F.relu(m.a(x))
        return {"logits": m.head(pooled(y)), "features": y, "seen": torch.ones(())}

    return Net(run, stem=conv_bn_relu(3, 6), a=conv_bn(6, 7), head=nn.Linear(7, 5)), images()


@case
def without_batch_axis() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(F.relu(m.b(F.relu(m.a(x)))).mean((1, 2)))

    return Net(run, a=conv(3, 6), b=conv(6, 7), head=nn.Linear(7, 5)), images(3, 8, 8)


# ---- what must be left alone --------------------------------------------------------------------------------


@case
def hard_coded_view() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(m.b(m.a(x))), 4).view(2, 7 * 4)
        return m.head(y)

    return Net(run, a=conv_bn_relu(3, 6), b=conv(6, 7), head=nn.Linear(28, 5)), images()


@case
def hard_coded_groups() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.b(m.a(x))).view(2, 2, 4, 8, 8).mean(2)
        return m.head(pooled(F.relu(m.c(y))))

    return Net(run, a=conv_bn_relu(3, 6), b=conv(6, 8), c=conv(2, 6), head=nn.Linear(6, 5)), images()


@torch.library.custom_op("hap_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halved.register_autograd(lambda ctx, gradient: gradient / 2)


@case
def custom_operator() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = halved(F.relu(m.b(m.a(x))))
        return m.head(pooled(F.relu(m.c(y))))

    return Net(run, a=conv_bn_relu(3, 6), b=conv(6, 7), c=conv(7, 6), head=nn.Linear(6, 5)), images()


@case
def cumulative() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cumsum(F.relu(m.b(m.a(x))), 1)
        return m.head(pooled(torch.cumsum(m.c(y), 2) / 9))

    return Net(run, a=conv_bn_relu(3, 6), b=conv(6, 7), c=conv(7, 6), head=nn.Linear(6, 5)), images()


@case
def nothing_to_remove() -> Any:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), images(2, 3, 2, 2)


class Attention(nn.Module):
    """Self-attention as people write it: with the heads in an attribute, by hand or by torch's function."""

    def __init__(self, width: int, heads: int, kv_heads: int, fused: bool):
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim, self.fused = heads, kv_heads, width // heads, fused
        self.q = nn.Linear(width, heads * self.head_dim)
        self.k = nn.Linear(width, kv_heads * self.head_dim)
        self.v = nn.Linear(width, kv_heads * self.head_dim)
        self.out = nn.Linear(heads * self.head_dim, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        n, length, _ = x.shape
        q = self.q(x).view(n, length, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (f(x).view(n, length, self.kv_heads, self.head_dim).transpose(1, 2) for f in (self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kv_heads != self.num_heads)
        else:
            scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
            y = (scores if bias is None else scores + bias).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, length, -1))


def attention_net(heads: int, kv_heads: int, fused: bool) -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        x = x + m.attention(x)
        return m.head((x + m.down(F.gelu(m.up(x)))).mean(1))

    return Net(
        run,
        embed=nn.Linear(5, 12),
        attention=Attention(12, heads, kv_heads, fused),
        up=nn.Linear(12, 9),
        down=nn.Linear(9, 12),
        head=nn.Linear(12, 4),
    ), images(2, 6, 5)


@case
def attention_by_hand() -> Any:
    return attention_net(4, 4, fused=False)


@case
def attention_with_shared_bias() -> Any:
    """One bias for two layers, each of which can lose its own heads."""

    def run(m: Any, x: Tensor) -> Tensor:
        distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
        bias = F.embedding(distance, m.table).permute(2, 0, 1).unsqueeze(0)
        x = m.embed(x)
        x = x + m.one(x, bias)
        return m.head((x + m.two(x, bias=bias)).mean(1))

    return Net(
        run,
        embed=nn.Linear(5, 12),
        table=nn.Parameter(torch.randn(6, 4)),
        one=Attention(12, 4, 4, False),
        two=Attention(12, 4, 4, False),
        head=nn.Linear(12, 4),
    ), images(2, 6, 5)


@case
def selective_kernels() -> Any:
    """Two paths stacked on an axis of their own, weighed against each other and summed over it."""

    def run(m: Any, x: Tensor) -> Tensor:
        paths = torch.stack([m.a(x), m.b(x)], 1)
        gate = m.up(F.relu(m.down(paths.sum(1).mean((2, 3), keepdim=True))))
        gate = gate.view(len(x), 2, -1, 1, 1).softmax(1)
        return m.head(pooled((paths * gate).sum(1)))

    return Net(
        run, a=conv(3, 8), b=conv(3, 8, 5), down=conv(8, 4, 1), up=conv(4, 16, 1), head=nn.Linear(8, 5)
    ), images()


@case
def mixer() -> Any:
    """A layer along the tokens of something whose channels can go."""

    def run(m: Any, x: Tensor) -> Tensor:
        u, v = F.gelu(m.up(x)).chunk(2, -1)
        return m.head((u * m.mix(v.transpose(1, 2)).transpose(1, 2)).mean(1))

    return Net(run, up=nn.Linear(5, 12), mix=nn.Linear(6, 6), head=nn.Linear(6, 4)), images(2, 6, 5)


@case
def attention_fused() -> Any:
    return attention_net(3, 3, fused=True)


@case
def attention_grouped_queries() -> Any:
    return attention_net(6, 3, fused=True)


@case
def matrix_product_with_parameter() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(F.relu(m.a(x) @ m.w))

    return Net(run, a=nn.Linear(5, 7), w=nn.Parameter(torch.randn(7, 8)), head=nn.Linear(8, 4)), images(3, 5)


@case
def attention_with_tables() -> Any:
    """A rotary-like table over positions in a head, and a learned bias for each pair of heads and distances."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(2, 6, m.heads, 4).transpose(1, 2) for f in (m.q, m.k, m.v))
        q, k = (m.cosine * y + torch.cat([-y[..., 2:], y[..., :2]], -1) * m.sine for y in (q, k))
        bias = m.table[m.distance.flatten()].view(6, 6, -1).permute(2, 0, 1).unsqueeze(0)
        y = (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v
        return m.head(m.out(y.transpose(1, 2).flatten(2)).mean(1))

    net = Net(
        run,
        q=nn.Linear(5, 12),
        k=nn.Linear(5, 12),
        v=nn.Linear(5, 12),
        out=nn.Linear(12, 6),
        head=nn.Linear(6, 4),
        cosine=torch.rand(1, 1, 6, 4),
        sine=torch.rand(6, 4),
        table=nn.Parameter(torch.randn(11, 3)),
        distance=torch.arange(6)[:, None] - torch.arange(6) + 5,
    )
    net.heads = 3
    return net, images(2, 6, 5)


# ---- weights that a forward multiplies in itself ------------------------------------------------------------


@case
def einsum_layers() -> Any:
    """The letters of a layer, written out, with dots, and with the weight first."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(torch.einsum("bti,ih->bth", x, m.a))
        y = F.relu(torch.einsum("oh, ...h -> ...o", m.b, y))
        return m.head(torch.tensordot(y, m.c, 1).sum(1))

    a, b, c = (nn.Parameter(torch.randn(*shape)) for shape in ((5, 7), (6, 7), (6, 8)))
    return Net(run, a=a, b=b, c=c, head=nn.Linear(8, 4)), images(2, 6, 5)


@case
def attention_by_einsum() -> Any:
    """Heads and their width are axes of the weights."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bthk", x, w) for w in (m.q, m.k, m.v))
        y = torch.einsum("bhqt,bthk->bqhk", torch.einsum("bqhk,bthk->bhqt", q, k).softmax(-1), v)
        return m.head(torch.tensordot(y, m.out, ([2, 3], [0, 1])).mean(1))

    q, k, v = (nn.Parameter(torch.randn(5, 3, 4)) for _ in range(3))
    return Net(run, q=q, k=k, v=v, out=nn.Parameter(torch.randn(3, 4, 6)), head=nn.Linear(6, 4)), images(2, 6, 5)


@case
def experts() -> Any:
    """A weight for each of several, batch by batch, and one that mixes heads."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(torch.bmm(m.up(x).expand(3, -1, -1), m.a)) @ m.b
        return m.head(torch.einsum("ebo,ef->bfo", y, m.mix).flatten(1))

    a, b, mix = (nn.Parameter(torch.randn(*shape)) for shape in ((3, 7, 8), (3, 8, 6), (3, 2)))
    return Net(run, up=nn.Linear(5, 7), a=a, b=b, mix=mix, head=nn.Linear(12, 4)), images(4, 5)


@case
def weights_in_odd_places() -> Any:
    """A weight times a mask before a product, one stretched over several, one whose inputs are summed before."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.a(x) @ (m.w * m.mask))
        z = (
            torch.einsum("bi,io->bo", m.b(y), m.one)
            + torch.matmul(y.unsqueeze(0), m.several.transpose(1, 2)).sum((0, 2))[:, None]
        )
        return m.head(z) + torch.einsum("bni,io->bo", m.c(x).view(-1, 2, 3), m.last)

    w, one, several, last = (nn.Parameter(torch.randn(*s)) for s in ((7, 8), (1, 6), (3, 4, 8), (3, 4)))
    mask = (torch.rand(7, 8) > 0.5).double()
    return Net(
        run,
        a=nn.Linear(5, 7),
        w=w,
        mask=mask,
        b=nn.Linear(8, 5),
        one=one,
        several=several,
        c=nn.Linear(5, 6),
        last=last,
        head=nn.Linear(6, 4),
    ), images(4, 5)


@case
def masked_on_the_way_up() -> Any:
    up = nn.ConvTranspose2d(6, 5, 2, 2)
    nn.utils.parametrize.register_parametrization(up, "weight", Masked(up.weight))
    return net_chain(conv(3, 6), nn.ReLU(), up, nn.ReLU(), width=5), images()


@case
def gated_linear_units() -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(pooled(F.glu(m.b(F.glu(m.a(x), 1)), 1)))

    return Net(run, a=conv_bn(3, 12), b=conv(6, 10), head=nn.Linear(5, 4)), images()


@case
def picked_places() -> Any:
    """Rows by their numbers, and places of an image between its pixels."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.grid_sample(m.a(x), m.places.expand(len(x), -1, -1, -1), align_corners=False)
        return m.head(F.logsigmoid(m.b(y).index_select(2, m.rows)).mean((2, 3)))

    places = torch.rand(1, 5, 6, 2) - 0.5
    return Net(
        run, a=conv_bn_relu(3, 7), b=conv(7, 6), head=nn.Linear(6, 4), places=places, rows=torch.tensor([3, 0, 2])
    ), images()


class Masked(nn.Module):
    """Half of the elements of a weight."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.register_buffer("mask", (torch.rand_like(weight) > 0.5).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


@case
def masked_weights() -> Any:
    a, b = conv(3, 8), conv(8, 6)
    nn.utils.parametrize.register_parametrization(a, "weight", Masked(a.weight))
    nn.utils.parametrize.register_parametrization(b, "weight", Masked(b.weight))
    return net_chain(a, nn.ReLU(), b, nn.ReLU(), width=6), images()


@case
def recurrent_layers() -> Any:
    """Steps of a signal through layers of both directions, then from the state that these end in."""

    def run(m: Any, x: Tensor) -> Tensor:
        y, last = m.both(m.a(x).relu().transpose(1, 2))
        z, _ = m.steps(
            m.b(y).tanh(), (m.start(torch.cat([last[0], last[3]], 1))[None], x.new_zeros(1, len(x), m.cells))
        )
        return m.head(z[:, -1])

    net = Net(
        run,
        a=nn.Conv1d(3, 6, 3, padding=1),
        both=nn.GRU(6, 5, 2, batch_first=True, bidirectional=True),
        b=nn.Linear(10, 7),
        start=nn.Linear(10, 8),
        steps=nn.LSTM(7, 8, batch_first=True),
        head=nn.Linear(8, 4),
    )
    net.cells = 8
    return net, images(3, 3, 6)

"""Small random modules that mix everything the rules know, each made from one integer.

`make(seed)` gives (model, example): float64, eval mode, a handful of random blocks on maps, signals, tokens or vectors.
A block is a function of a random generator and the width that it reads; it returns a module and the width that comes
out. `model.blocks` names the blocks, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import Net, randomise

SIDE, LENGTH, WORDS = 6, 6, 11
Made = tuple[nn.Module, int]
Block = Callable[[Random, int], Made]
BLOCKS: dict[str, dict[str, Block]] = {"maps": {}, "signal": {}, "tokens": {}, "vector": {}}
ACTIVATIONS = (F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.hardswish, F.leaky_relu, F.softplus)


def block(*domains: str) -> Callable[[Block], Block]:
    def register(function: Block) -> Block:
        for domain in domains:
            BLOCKS[domain][function.__name__] = function
        return function

    return register


def net(run: Callable[..., Any], numbers: dict[str, Any] | None = None, **modules: Any) -> nn.Module:
    """A module with numbers of its own, as forwards read them."""
    made = Net(run, **modules)
    for name, value in (numbers or {}).items():
        setattr(made, name, value)
    return made


def width(r: Random) -> int:
    return r.randint(3, 8)


def act(r: Random) -> Any:
    return r.choice(ACTIVATIONS)


def conv(r: Random, a: int, b: int, k: int = 0, **options: Any) -> nn.Module:
    """A convolution that keeps the size of maps."""
    k = k or r.choice([1, 3, 3, 5])
    mode = r.choice(["zeros", "zeros", "zeros", "reflect", "circular"]) if k == 3 else "zeros"
    padding = "same" if r.random() < 0.2 else k // 2
    return nn.Conv2d(a, b, k, padding=padding, bias=r.random() < 0.5, padding_mode=mode, **options)


def norm(r: Random, c: int) -> nn.Module:
    """Any norm of maps, or none."""
    groups = r.choice([g for g in range(1, c + 1) if c % g == 0])
    return r.choice(
        [
            nn.BatchNorm2d(c),
            nn.BatchNorm2d(c),
            nn.BatchNorm2d(c, affine=False),
            nn.BatchNorm2d(c, track_running_stats=False),
            nn.GroupNorm(groups, c),
            nn.GroupNorm(c, c),
            nn.InstanceNorm2d(c, affine=r.random() < 0.5),
            nn.Identity(),
            nn.PReLU(c),
        ]
    )


def layer(r: Random, a: int, b: int, k: int = 0, **options: Any) -> nn.Module:
    return nn.Sequential(conv(r, a, b, k, **options), norm(r, b))


def vector_norm(r: Random, c: int) -> nn.Module:
    """Any norm over the last axis, or none."""
    return r.choice([nn.LayerNorm(c), nn.LayerNorm(c, elementwise_affine=False), nn.RMSNorm(c), nn.Identity()])


# ---- maps ---------------------------------------------------------------------------------------------------


@block("maps")
def plain(r: Random, c: int) -> Made:
    o, f = width(r), act(r)
    return net(lambda m, x: f(m.a(x)), a=layer(r, c, o)), o


@block("maps")
def residual(r: Random, c: int) -> Made:
    o, f, sign = width(r), act(r), r.choice([1, -1])
    return net(lambda m, x: f(x + sign * m.b(f(m.a(x)))), a=layer(r, c, o), b=layer(r, o, c)), c


@block("maps")
def projected_sum(r: Random, c: int) -> Made:
    o, f = width(r), act(r)
    return net(lambda m, x: f(m.a(x) - m.b(x)), a=layer(r, c, o), b=layer(r, c, o, 1)), o


@block("maps")
def three_sums(r: Random, c: int) -> Made:
    o, f = width(r), act(r)

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x) + m.b(x)
        y = f(y + m.c(f(y)))
        return y + m.d(y)

    return net(run, a=layer(r, c, o), b=layer(r, c, o, 1), c=layer(r, o, o), d=layer(r, o, o, groups=o)), o


@block("maps")
def padded_shortcut(r: Random, c: int) -> Made:
    more, f = r.randint(1, 3), act(r)

    def run(m: Any, x: Tensor) -> Tensor:
        return f(m.a(x) + F.pad(x, (0, 0, 0, 0, 0, more)))

    return net(run, a=layer(r, c, c + more)), c + more


@block("maps")
def dense(r: Random, c: int) -> Made:
    o, f = width(r), act(r)

    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([x, f(m.a(x))], 1)
        return torch.cat([m.b(y), y], 1)

    return net(run, a=layer(r, c, o), b=layer(r, c + o, 3)), c + o + 3


@block("maps")
def gated(r: Random, c: int) -> Made:
    o = width(r)
    if r.random() < 0.5:
        return net(lambda m, x: F.glu(m.a(x), 1), a=layer(r, c, 2 * o)), o

    def run(m: Any, x: Tensor) -> Tensor:
        a, b = m.a(x).chunk(2, 1)
        return a * torch.sigmoid(b)

    return net(run, a=layer(r, c, 2 * o)), o


@block("maps")
def split_in_two(r: Random, c: int) -> Made:
    o, f, computed = width(r), act(r), r.random() < 0.5

    def run(m: Any, x: Tensor) -> Tensor:
        y = f(m.a(x))
        a, b = y.split(y.shape[1] // 2, 1) if computed else y.split(o, 1)
        return torch.cat([a, m.b(b)], 1)

    return net(run, a=layer(r, c, 2 * o), b=layer(r, o, 4)), o + 4


@block("maps")
def split_by_attribute(r: Random, c: int) -> Made:
    o, f = width(r), act(r)
    one = r.randint(1, o - 1)

    def run(m: Any, x: Tensor) -> Tensor:
        gate, a, b = torch.split(m.a(x), m.sizes, 1)
        return f(gate) * torch.cat([a, m.b(b)], 1)

    return net(run, {"sizes": (o, one, o - one)}, a=layer(r, c, 2 * o), b=layer(r, o - one, o - one, 3)), o


@block("maps")
def sliced(r: Random, c: int) -> Made:
    o, f = width(r), act(r)
    take = r.randint(1, o)
    return net(lambda m, x: f(m.b(m.a(x)[:, :take])), a=layer(r, c, o), b=layer(r, take, o)), o


@block("maps")
def grouped(r: Random, c: int) -> Made:
    groups, f = r.choice([2, 3, 4]), act(r)
    a, b = groups * r.randint(1, 4), groups * r.randint(1, 3)
    return net(lambda m, x: f(m.b(f(m.a(x)))), a=layer(r, c, a, 1), b=layer(r, a, b, groups=groups)), b


@block("maps")
def depthwise(r: Random, c: int) -> Made:
    times, f = r.choice([1, 1, 2]), act(r)
    return net(lambda m, x: f(m.a(x)), a=layer(r, c, times * c, groups=c)), times * c


@block("maps")
def inverted_residual(r: Random, c: int) -> Made:
    o, f = width(r), act(r)
    parts = {"a": layer(r, c, o, 1), "b": layer(r, o, o, 3, groups=o), "c": layer(r, o, c, 1)}
    return net(lambda m, x: x + m.c(f(m.b(f(m.a(x))))), **parts), c


@block("maps")
def transposed(r: Random, c: int) -> Made:
    groups = r.choice([g for g in (1, 1, 2, 3) if c % g == 0])
    o, f = groups * r.randint(1, 4), act(r)
    if r.random() < 0.5:
        up = nn.ConvTranspose2d(c, o, 3, padding=1, groups=groups)
        return net(lambda m, x: f(m.norm(m.up(x))), up=up, norm=norm(r, o)), o
    up = nn.ConvTranspose2d(c, o, 2, stride=2, groups=groups, bias=False)
    return net(lambda m, x: F.max_pool2d(f(m.norm(m.up(x))), 2), up=up, norm=norm(r, o)), o


@block("maps")
def shuffled(r: Random, c: int) -> Made:
    g, way, f = r.choice([2, 3]), r.choice(["function", "constant", "attribute", "computed"]), act(r)
    o = g * r.randint(1, 3)

    def run(m: Any, x: Tensor) -> Tensor:
        y = f(m.a(x))
        n, c, h, w = y.shape
        if way == "function":
            y = F.channel_shuffle(y, g)
        elif way == "constant":
            y = y.view(n, g, o // g, h, w).transpose(1, 2).reshape(n, o, h, w)
        elif way == "attribute":
            y = y.view(n, m.groups, m.each, h, w).transpose(1, 2).flatten(1, 2)
        else:
            y = y.view(n, g, c // g, h, w).transpose(1, 2).reshape(n, c, h, w)
        return m.b(y)

    b = layer(r, o, o, groups=r.choice([1, g]))
    return net(run, {"groups": g, "each": o // g}, a=layer(r, c, o, 1, groups=1), b=b), o


@block("maps")
def shuffle_unit(r: Random, c: int) -> Made:
    half, f = r.randint(2, 4), act(r)

    def run(m: Any, x: Tensor) -> Tensor:
        a, b = m.a(x).chunk(2, 1)
        return F.channel_shuffle(torch.cat([a, f(m.b(b))], 1), 2)

    return net(run, a=layer(r, c, 2 * half), b=layer(r, half, half)), 2 * half


@block("maps")
def excited(r: Random, c: int) -> Made:
    o = width(r)
    if r.random() < 0.5:
        down, up = nn.Conv2d(c, o, 1), nn.Conv2d(o, c, 1)
        return net(
            lambda m, x: x * torch.sigmoid(m.up(F.relu(m.down(F.adaptive_avg_pool2d(x, 1))))), down=down, up=up
        ), c

    def run(m: Any, x: Tensor) -> Tensor:
        n, c, _, _ = x.shape
        return x * F.hardsigmoid(m.up(F.silu(m.down(x.mean((2, 3)))))).view(n, c, 1, 1).expand_as(x)

    return net(run, down=nn.Linear(c, o), up=nn.Linear(o, c)), c


@block("maps")
def resized(r: Random, c: int) -> Made:
    way, a = (
        r.choice(["max", "average", "up", "bilinear", "reflect", "zeros", "ones", "roll"]),
        layer(r, c, width(r), 3),
    )
    padded = nn.Conv2d(c, 4, 3)

    def run(m: Any, x: Tensor) -> Tensor:
        if way in ("max", "average"):
            return m.a(F.max_pool2d(x, 3, 1, 1) if way == "max" else F.avg_pool2d(x, 3, 1, 1))
        if way in ("up", "bilinear"):
            y = F.interpolate(x, scale_factor=2, mode="nearest" if way == "up" else "bilinear")
            return F.avg_pool2d(m.a(y), 2)
        if way == "roll":
            return m.a(x.roll((1, 2), (2, 3)))
        options = {"reflect": ("reflect", None), "zeros": ("constant", 0.0), "ones": ("constant", 1.0)}[way]
        return m.padded(F.pad(x, (1, 1, 1, 1), *options))

    used = {"padded": padded} if way in ("reflect", "zeros", "ones") else {"a": a}
    return net(run, **used), 4 if "padded" in used else a[0].out_channels


@block("maps")
def pixels_shuffled(r: Random, c: int) -> Made:
    o = r.randint(1, 3)
    return net(lambda m, x: m.b(F.pixel_shuffle(m.a(x), 2)), a=layer(r, c, 4 * o, 1), b=nn.Conv2d(o, 5, 2, 2)), 5


@block("maps")
def pixels_unshuffled(r: Random, c: int) -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        return F.interpolate(m.a(F.pixel_unshuffle(x, 2)), size=x.shape[2:])

    return net(run, a=nn.Conv2d(4 * c, 5, 1)), 5


@block("maps")
def selective(r: Random, c: int) -> Made:
    o, k = width(r), r.choice([1, 3])

    def run(m: Any, x: Tensor) -> Tensor:
        paths = torch.stack([m.a(x), m.b(x)], 1)
        gate = m.up(F.relu(m.down(paths.sum(1).mean((2, 3), keepdim=True))))
        return (paths * gate.view(len(x), 2, -1, 1, 1).softmax(1)).sum(1)

    down, up = nn.Conv2d(o, 3, 1), nn.Conv2d(3, 2 * o, 1)
    return net(run, a=layer(r, c, o, k), b=layer(r, c, o), down=down, up=up), o


@block("maps")
def stacked(r: Random, c: int) -> Made:
    o, how, f = width(r), r.choice(["mean", "sum", "amax", "flatten"]), act(r)

    def run(m: Any, x: Tensor) -> Tensor:
        paths = torch.stack([m.a(x), f(m.b(x)), m.a(-x)], r.choice([1]))
        return m.c(paths.flatten(1, 2)) if how == "flatten" else m.d(getattr(paths, how)(1))

    last = {"c": nn.Conv2d(3 * o, 4, 1)} if how == "flatten" else {"d": nn.Conv2d(o, 4, 1)}
    return net(run, a=layer(r, c, o), b=layer(r, c, o), **last), 4


@block("maps")
def odd_weights(r: Random, c: int) -> Made:
    """Weights that are not used as they are stored."""
    o, f = width(r), act(r)
    way = r.choice(["standardised", "centred", "normed", "by row", "functional", "scaled", "chunked", "transposed"])
    a = nn.Conv2d(c, o if way != "chunked" else 2 * o, 3, padding=1, bias=way != "scaled")
    if way == "normed":
        return net(lambda m, x: f(m.a(x)), a=nn.utils.parametrizations.weight_norm(a)), o

    def run(m: Any, x: Tensor) -> Tensor:
        w, b = m.a.weight, m.a.bias
        if way in ("standardised", "centred"):
            w = w - w.mean((1, 2, 3), keepdim=True)
            w = w / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt() if way == "standardised" else w
        elif way == "by row":
            w = w / w.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        elif way == "scaled":
            w = w * m.scale.view(-1, 1, 1, 1)
        elif way == "chunked":
            (one, two), (left, right) = w.chunk(2), b.chunk(2)
            return F.conv2d(x, one, left, padding=1) * torch.sigmoid(F.conv2d(x, two, right, padding=1))
        elif way == "transposed":
            return f(F.conv_transpose2d(x, w.transpose(0, 1), b, padding=1))
        return f(F.conv2d(x, w, b, padding=1))

    return net(run, a=a, **({"scale": nn.Parameter(torch.rand(o) + 0.5)} if way == "scaled" else {})), o


@block("maps")
def next_generation(r: Random, c: int) -> Made:
    o, eps = width(r), nn.Parameter(torch.rand(c))

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.norm(m.mix(x).permute(0, 2, 3, 1))
        return x + (m.down(F.gelu(m.up(y))) * m.scale).permute(0, 3, 1, 2)

    mix = nn.Conv2d(c, c, 3, padding=1, groups=c)
    return net(run, mix=mix, norm=vector_norm(r, c), up=nn.Linear(c, o), down=nn.Linear(o, c), scale=eps), c


@block("maps")
def shared_twice(r: Random, c: int) -> Made:
    f, a = act(r), layer(r, c, c)
    if r.random() < 0.5:
        return net(lambda m, x: f(m.a(f(m.a(x)))), a=a), c
    return net(lambda m, x: f(x + m.a(f(x + m.a(x)))), a=a), c


@block("maps")
def tied(r: Random, c: int) -> Made:
    o, f = width(r), act(r)
    a, b = nn.Conv2d(c, o, 3, padding=1), nn.Conv2d(c, o, 3, padding=1, bias=False)
    b.weight = a.weight
    if r.random() < 0.5:
        return net(lambda m, x: torch.cat([f(m.a(x)), m.b(-x)], 1), a=a, b=b), 2 * o
    return net(lambda m, x: f(m.a(x)) + m.b(x.flip(3)), a=a, b=b), o


@block("maps")
def filtered(r: Random, c: int) -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.a(F.conv2d(x, m.kernel, padding=1, groups=len(m.kernel)))

    return net(run, kernel=torch.rand(c, 1, 3, 3) / 9, a=layer(r, c, 4)), 4


@block("maps")
def looked_over(r: Random, c: int) -> Made:
    """Reductions over channels and operators along them: what they touch is frozen or spanned."""
    way = r.choice(["mean", "max", "softmax", "normalize", "eca", "cumsum", "gate"])
    o = width(r)

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        if way == "mean":
            return y * torch.sigmoid(y.mean(1, keepdim=True))
        if way == "max":
            return y * torch.sigmoid(y.amax(1, keepdim=True))
        if way == "eca":
            return y * torch.sigmoid(m.mix(y.mean((2, 3)).unsqueeze(1))).squeeze(1)[:, :, None, None]
        if way == "gate":
            return y * torch.sigmoid(m.mix(y))
        return y.cumsum(1) / o if way == "cumsum" else getattr(F, way)(y, dim=1)

    mixes = {"eca": nn.Conv1d(1, 1, 3, padding=1), "gate": nn.Conv2d(o, 1, 3, padding=1)}
    return net(run, a=layer(r, c, o), **({"mix": mixes[way]} if way in mixes else {})), o


@block("maps")
def map_attention(r: Random, c: int) -> Made:
    attention, _ = self_attention(r, c)

    def run(m: Any, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        y = m.attention(x.flatten(2).transpose(1, 2))
        return x + y.transpose(1, 2).reshape(n, -1, h, w)

    return net(run, attention=attention), c


@block("maps")
def placed(r: Random, c: int) -> Made:
    """Parameters over space, over channels, or over both."""
    shape = r.choice([(SIDE, SIDE), (c, 1, 1), (1, c, SIDE, SIDE), (1, 1, SIDE, SIDE), (1,)])
    return net(lambda m, x: m.a(x * m.table + m.table), table=nn.Parameter(torch.randn(shape)), a=layer(r, c, 4)), 4


# ---- signals: (batch, channels, length) ---------------------------------------------------------------------


@block("signal")
def conv_1d(r: Random, c: int) -> Made:
    groups = r.choice([g for g in (1, 1, 2, 3, c) if c % g == 0])
    o, f = groups * r.randint(1, 3), act(r)
    a = nn.Conv1d(c, o, 3, padding=1, groups=groups, bias=r.random() < 0.5)
    behind = r.choice([nn.BatchNorm1d(o), nn.GroupNorm(1, o), nn.InstanceNorm1d(o, affine=True), nn.Identity()])
    return net(lambda m, x: f(m.norm(m.a(x))), a=a, norm=behind), o


@block("signal")
def wave_block(r: Random, c: int) -> Made:
    o = width(r)

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.glu(m.a(x), 1) if glu else torch.tanh(m.a(x)) * torch.sigmoid(m.b(x))
        return x + m.c(y)

    glu = r.random() < 0.5
    b = {} if glu else {"b": nn.Conv1d(c, o, 3, padding=2, dilation=2)}
    return net(run, a=nn.Conv1d(c, o * (1 + glu), 3, padding=1), c=nn.Conv1d(o, c, 1), **b), c


@block("signal")
def up_and_down(r: Random, c: int) -> Made:
    o, f = width(r), act(r)
    up = nn.ConvTranspose1d(c, o, 2, stride=2)
    return net(lambda m, x: F.avg_pool1d(f(m.up(x)), 2), up=up), o


@block("signal")
def joined_signal(r: Random, c: int) -> Made:
    o = width(r)
    a, b = nn.Conv1d(c, o, 1), nn.Conv1d(c, o, 3, padding=1)
    return net(lambda m, x: torch.cat([m.a(x), m.b(x), x], 1), a=a, b=b), 2 * o + c


# ---- tokens: (batch, length, width) -------------------------------------------------------------------------


def self_attention(r: Random, c: int) -> Made:
    """Self-attention in one of the ways in which it is written."""
    d, kv = r.randint(1, 4), r.randint(1, 4)
    h = kv * r.choice([1, 1, 2])
    way = r.choice(["fused", "fused attribute", "separate", "separate", "einsum"]) if h == kv else "separate"
    sizes = r.choice(["attribute", "computed", "attribute"])
    by_hand, rotary, table = r.random() < 0.5, r.random() < 0.2, r.random() < 0.25
    modules: dict[str, Any] = {"out": nn.Linear(h * d, c)}
    if way.startswith("fused"):
        modules["qkv"] = nn.Linear(c, 3 * h * d, bias=r.random() < 0.5)
    else:
        modules |= {"q": nn.Linear(c, h * d), "k": nn.Linear(c, kv * d), "v": nn.Linear(c, kv * d)}
    if table:
        modules["table"] = nn.Parameter(torch.randn(2 * 36, h))
    if rotary:
        modules["sine"] = torch.rand(36, d)

    def heads(m: Any, y: Tensor, number: int) -> Tensor:
        shape = (*y.shape[:2], number, m.head_dim) if sizes == "attribute" else (*y.shape[:2], -1, d)
        return y.view(shape).transpose(1, 2)

    def three(m: Any, x: Tensor) -> Any:
        n, length, _ = x.shape
        if way == "fused":
            return m.qkv(x).reshape(n, length, 3, m.heads, m.head_dim).permute(2, 0, 3, 1, 4)
        if way == "fused attribute":
            return [heads(m, y, m.heads) for y in m.qkv(x).chunk(3, -1)]
        return heads(m, m.q(x), m.heads), heads(m, m.k(x), m.kv_heads), heads(m, m.v(x), m.kv_heads)

    def run(m: Any, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = three(m, x)
        if rotary:
            q, k = q * m.sine[:length], k * m.sine[:length]
        place = torch.arange(length)
        bias = m.table[place[:, None] - place + 36].permute(2, 0, 1) if table else None
        if not by_hand and way != "einsum":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=h != kv)
        else:
            if h != kv:
                k, v = k.repeat_interleave(h // kv, 1), v.repeat_interleave(h // kv, 1)
            scores = torch.einsum("bhid,bhjd->bhij", q, k) if way == "einsum" else q @ k.transpose(-1, -2)
            scores = scores / d**0.5 if bias is None else scores / d**0.5 + bias
            y = scores.softmax(-1) @ v
        y = y.transpose(1, 2)
        return m.out(y.reshape(n, length, -1) if sizes == "computed" else y.reshape(n, length, m.inner))

    return net(run, {"heads": h, "kv_heads": kv, "head_dim": d, "inner": h * d}, **modules), c


@block("tokens")
def attended(r: Random, c: int) -> Made:
    attention, _ = self_attention(r, c)
    return net(lambda m, x: x + m.attention(m.norm(x)), attention=attention, norm=vector_norm(r, c)), c


@block("tokens")
def torch_attention(r: Random, c: int) -> Made:
    heads = r.choice([2, 3])
    e, cross = heads * r.randint(1, 3), r.random() < 0.5

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.enter(x)
        return m.attention(y, y.flip(1) if cross else y, y, need_weights=False)[0]

    attention = nn.MultiheadAttention(e, heads, batch_first=True, bias=r.random() < 0.7)
    return net(run, enter=nn.Linear(c, e), attention=attention), e


@block("tokens")
def shared_bias(r: Random, c: int) -> Made:
    h, d = r.choice([2, 3, 4]), r.randint(1, 3)

    def attend(m: Any, x: Tensor, bias: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (f(x).view(n, length, m.heads, d).transpose(1, 2) for f in (m.q, m.k, m.v))
        y = (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v
        return x + m.out(y.transpose(1, 2).reshape(n, length, -1))

    def run(m: Any, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        bias = F.embedding((place[:, None] - place).abs(), m.table).permute(2, 0, 1).unsqueeze(0)
        return m.two(m.one(x, bias), bias)

    def one() -> nn.Module:
        own = {name: nn.Linear(c, h * d) for name in "qkv"}
        return net(attend, {"heads": h}, out=nn.Linear(h * d, c), **own)

    return net(run, table=nn.Parameter(torch.randn(40, h)), one=one(), two=one()), c


@block("tokens", "vector")
def mlp(r: Random, c: int) -> Made:
    o, f, scaled = width(r), act(r), r.random() < 0.4
    parts = {"norm": vector_norm(r, c), "up": nn.Linear(c, o), "down": nn.Linear(o, c)}
    if scaled:
        parts["scale"] = nn.Parameter(torch.rand(c))
        return net(lambda m, x: x + m.scale * m.down(f(m.up(m.norm(x)))), **parts), c
    return net(lambda m, x: x + m.down(f(m.up(m.norm(x)))), **parts), c


@block("tokens", "vector")
def gated_mlp(r: Random, c: int) -> Made:
    o, way = width(r), r.choice(["glu", "chunk", "apart", "size"])

    def run(m: Any, x: Tensor) -> Tensor:
        if way == "apart":
            return m.down(F.silu(m.up(x)) * m.gate(x))
        y = m.up(x)
        if way == "glu":
            return m.down(F.glu(y, -1))
        a, b = y.chunk(2, -1) if way == "chunk" else y.split(m.hidden, -1)
        return m.down(F.silu(a) * b)

    gate = {"gate": nn.Linear(c, o)} if way == "apart" else {}
    up = nn.Linear(c, o if way == "apart" else 2 * o)
    return net(run, {"hidden": o}, up=up, down=nn.Linear(o, c), **gate), c


@block("tokens", "vector")
def linear(r: Random, c: int) -> Made:
    o, f, way = width(r), act(r), r.choice(["module", "T", "functional", "matmul", "normed", "einsum", "tensordot"])
    a = nn.Linear(c, o, bias=way != "matmul")
    if way == "normed":
        a = nn.utils.parametrizations.weight_norm(a)
    if way in ("matmul", "einsum", "tensordot"):
        multiply = {
            "matmul": torch.matmul,
            "einsum": lambda x, w: torch.einsum("...i,io->...o", x, w),
            "tensordot": lambda x, w: torch.tensordot(x, w, 1),
        }[way]
        return net(lambda m, x: f(multiply(x, m.w)), w=nn.Parameter(torch.randn(c, o) / 2)), o
    if way == "T":
        return net(lambda m, x: f(x @ m.a.weight.T + m.a.bias), a=a), o
    if way == "functional":
        return net(lambda m, x: f(F.linear(x, m.a.weight, m.a.bias)), a=a), o
    return net(lambda m, x: m.norm(f(m.a(x))), a=a, norm=vector_norm(r, o)), o


@block("tokens", "vector")
def several_weights(r: Random, c: int) -> Made:
    """A weight with an axis for each of several, such as heads or experts, on the way there and back."""
    h, e, f, way = r.choice([2, 3]), r.randint(1, 3), act(r), r.choice(["einsum", "matmul"])

    def run(m: Any, x: Tensor) -> Tensor:
        if way == "einsum":
            return torch.einsum("...he,heo->...o", f(torch.einsum("...i,ihe->...he", x, m.a)), m.b)
        rows = x.reshape(1, -1, x.shape[-1]).expand(h, -1, -1)
        return (f(rows @ m.a.permute(1, 0, 2).contiguous()) @ m.b).sum(0).view(x.shape)

    a, b = nn.Parameter(torch.randn(c, h, e) / 2), nn.Parameter(torch.randn(h, e, c) / 2)
    return net(run, a=a, b=b), c


@block("tokens", "vector")
def tied_decoder(r: Random, c: int) -> Made:
    """A layer, and back by the same weight."""
    o, f = width(r), act(r)
    return net(lambda m, x: F.linear(f(m.a(x)), m.a.weight.t()), a=nn.Linear(c, o)), c


@block("tokens", "vector")
def reshaped(r: Random, c: int) -> Made:
    """Features in groups: scaled, summed over a group, or mixed between groups."""
    g, e, f = r.choice([2, 3]), r.randint(1, 3), act(r)
    way, sizes = r.choice(["scale", "sum", "mix", "swap"]), r.choice(["attribute", "constant", "first", "last"])

    def run(m: Any, x: Tensor) -> Tensor:
        y = f(m.a(x))
        shape = {"attribute": (m.groups, m.each), "constant": (g, e), "first": (-1, e), "last": (g, -1)}[sizes]
        y = y.view(*y.shape[:-1], *shape)
        if way == "scale":
            y = y * m.scale.unsqueeze(-1)
        elif way == "mix":
            y = torch.einsum("...ge,gh->...he", y, m.matrix)
        elif way == "swap":
            y = y.transpose(-1, -2)
        return m.b(y.sum(-1)) if way == "sum" else m.c(y.flatten(-2))

    extra: dict[str, Any] = {"scale": nn.Parameter(torch.rand(g))} if way == "scale" else {}
    extra |= {"matrix": nn.Parameter(torch.rand(g, g))} if way == "mix" else {}
    extra |= {"b": nn.Linear(g, 4)} if way == "sum" else {"c": nn.Linear(g * e, 4)}
    return net(run, {"groups": g, "each": e}, a=nn.Linear(c, g * e), **extra), 4


@block("tokens", "vector")
def joined_features(r: Random, c: int) -> Made:
    o, f = width(r), act(r)
    return net(lambda m, x: torch.cat([x, f(m.a(x))], -1), a=nn.Linear(c, o)), c + o


@block("tokens")
def along_tokens(r: Random, c: int) -> Made:
    groups = r.choice([1, c])
    a = nn.Conv1d(c, c, 3, padding=1, groups=groups)
    return net(lambda m, x: x + m.a(m.norm(x).transpose(1, 2)).transpose(1, 2), a=a, norm=vector_norm(r, c)), c


@block("tokens")
def with_class_token(r: Random, c: int) -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.a(torch.cat([m.token.expand(len(x), -1, -1), x[:, 1:]], 1))

    return net(run, token=nn.Parameter(torch.randn(1, 1, c)), a=nn.Linear(c, 6)), 6


@block("tokens")
def merged_patches(r: Random, c: int) -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([x[:, 0::2], x[:, 1::2]], -1) if by_slices else x.reshape(len(x), x.shape[1] // 2, -1)
        return m.a(m.norm(y)).repeat_interleave(2, 1)

    by_slices = r.random() < 0.5
    return net(run, a=nn.Linear(2 * c, 5), norm=vector_norm(r, 2 * c)), 5


@block("tokens")
def windows(r: Random, c: int) -> Made:
    attention, _ = self_attention(r, c)

    def run(m: Any, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        y = x.roll(1, 1).view(n * 2, length // 2, -1)
        return x + m.attention(y).reshape(n, length, -1).roll(-1, 1)

    return net(run, attention=attention), c


@block("tokens")
def mixed_tokens(r: Random, c: int) -> Made:
    length_up, f = r.randint(2, 5), act(r)

    def run(m: Any, x: Tensor) -> Tensor:
        return x + m.down(f(m.up(x.transpose(1, 2)))).transpose(1, 2)

    return net(run, up=nn.LazyLinear(length_up), down=nn.Linear(length_up, 1)), c


# ---- whole modules ------------------------------------------------------------------------------------------


def _stem(r: Random, domain: str) -> tuple[nn.Module, int, Tensor]:
    """The first layer, the width that it gives, and its input."""
    c, n = width(r), 2
    if domain == "maps":
        return layer(r, 3, c), c, torch.randn(n, 3, SIDE, SIDE, dtype=torch.float64)
    if domain == "signal":
        return nn.Conv1d(2, c, 3, padding=1), c, torch.randn(n, 2, LENGTH, dtype=torch.float64)
    if domain == "vector":
        return nn.Linear(5, c), c, torch.randn(3, 5, dtype=torch.float64)
    way = r.choice(["words", "words and places", "linear", "words and layer"])
    if way == "linear":
        return nn.Linear(5, c), c, torch.randn(n, LENGTH, 5, dtype=torch.float64)
    words, ids = nn.Embedding(WORDS, c), torch.randint(0, WORDS, (n, LENGTH))
    if way == "words":
        return words, c, ids
    if way == "words and layer":
        return nn.Sequential(words, nn.Linear(c, c + 1)), c + 1, ids
    places = nn.Parameter(torch.randn(1, LENGTH, c))
    return net(lambda m, x: m.words(x) + m.places, words=words, places=places), c, ids


def _change(r: Random, domain: str, c: int) -> tuple[nn.Module, int, str]:
    """A way from one kind of tensor to another."""
    if domain == "maps":
        way = r.choice(["tokens", "mean", "flatten", "max", "signal"])
        if way == "tokens":
            return net(lambda m, x: F.max_pool2d(x, 2).flatten(2).transpose(1, 2)[:, :LENGTH]), c, "tokens"
        if way == "signal":
            return net(lambda m, x: x.mean(3)), c, "signal"
        if way == "flatten":
            return net(lambda m, x: F.adaptive_avg_pool2d(x, 2).flatten(1)), 4 * c, "vector"
        pool = F.adaptive_avg_pool2d if way == "mean" else F.adaptive_max_pool2d
        return net(lambda m, x: pool(x, 1).flatten(1)), c, "vector"
    if domain == "signal":
        if r.random() < 0.5:
            return net(lambda m, x: x.transpose(1, 2)), c, "tokens"
        return net(lambda m, x: x.amax(2)), c, "vector"
    way = r.choice(["mean", "first", "last"])
    picks = {"mean": lambda m, x: x.mean(1), "first": lambda m, x: x[:, 0], "last": lambda m, x: x[:, -1]}
    return net(picks[way]), c, "vector"


class Whole(nn.Module):
    """Stem, blocks and head; perhaps a second input that is added somewhere, and a second output."""

    def __init__(self, stem: nn.Module, steps: list[nn.Module], head: nn.Module, side: nn.Module | None, where: int):
        super().__init__()
        self.stem, self.steps, self.head, self.where = stem, nn.ModuleList(steps), head, where
        self.side = side
        self.aside: nn.Module | None = None

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        x, more = self.stem(x), None
        for i, step in enumerate(self.steps):
            x = step(x)
            if i == self.where and self.side is not None:
                x = self.side(x, z)
            elif i == self.where and self.aside is not None:
                more = self.aside(x)
        return self.head(x) if more is None else {"main": self.head(x), "aside": more}


def _side(r: Random, domain: str, c: int) -> nn.Module:
    """A second input that shifts or gates the features."""
    places = {"maps": (2, 3), "signal": (2,), "tokens": (), "vector": ()}[domain]

    def run(m: Any, x: Tensor, z: Tensor) -> Tensor:
        y = m.a(z[: len(x)])
        y = y.unsqueeze(1) if domain == "tokens" else y[(..., *(None for _ in places))]
        return x + y if shifts else x * torch.sigmoid(y)

    shifts = r.random() < 0.5
    return net(run, a=nn.Linear(4, c))


def _channels_last(domain: str, x: Tensor) -> Tensor:
    return x.movedim(1, -1) if domain in ("maps", "signal") else x


def _head(r: Random, domain: str, c: int) -> nn.Module:
    if domain == "maps" and r.random() < 0.5:
        return nn.Conv2d(c, 2, 1)
    return net(lambda m, x: m.last(_channels_last(domain, x)), last=nn.Linear(c, 3))


def make(seed: int) -> tuple[nn.Module, Any]:
    """The module of this seed, and an example of its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, example = _make(Random(seed))
        with torch.no_grad():  # lazy layers learn their sizes here
            model.double().eval()(*example)
        return randomise(model), example


def _make(r: Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    domain = r.choice(["maps", "maps", "maps", "signal", "tokens", "tokens", "vector"])
    stem, c, example = _stem(r, domain)
    steps: list[nn.Module] = []
    names, places = [domain], []
    for _ in range(r.randint(1, 4)):
        if r.random() < 0.15 and domain != "vector":
            step, c, domain = _change(r, domain, c)
            names.append(f"to {domain}")
        else:
            name = r.choice(sorted(BLOCKS[domain]))
            step, c = BLOCKS[domain][name](r, c)
            names.append(name)
        steps.append(step)
        places.append((domain, c))
    where, extra = r.randrange(len(steps)), r.random()
    side = _side(r, *places[where]) if extra < 0.15 else None
    model = Whole(stem, steps, _head(r, domain, c), side, where)
    if 0.15 <= extra < 0.3:
        model.aside = _head(r, *places[where])
    model.blocks = names
    return model, (example,) if side is None else (example, torch.randn(3, 4, dtype=torch.float64))

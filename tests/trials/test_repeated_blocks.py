"""Blocks that repeat another one are not tried again, and share its fate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hap
from hap.groups.groups import Groups
from hap.tracing import trace
from hap.trials.find_unprunable import Search
from hap.trials.repeated_blocks import NONE, Repeats


class Block(nn.Module):
    """Attention and an MLP. A `fixed` one has its number of heads written into its forward."""

    def __init__(self, width: int = 24, heads: int = 6, fixed: bool = False, scale: float = 1.0, joined: bool = True):
        super().__init__()
        self.heads, self.size, self.fixed, self.scale, self.joined = heads, width // heads, fixed, scale, joined
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = 6 if self.fixed else self.heads
        y = self.qkv(self.norm(x)).unflatten(-1, (3, heads, self.size))
        q, k, v = y.movedim(-3, 0).transpose(-3, -2)
        y = (q @ k.mT).softmax(-1) @ v
        x = (x if self.joined else 0) + self.out(y.transpose(-3, -2).flatten(-2)) * self.scale
        return x + self.down(torch.relu(self.up(x)))


def network(*blocks: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), *blocks, nn.Linear(24, 3)).double().eval(), torch.randn(2, 5, 8).double()


def repeats_of(model: nn.Module, example: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Repeats, Groups]:
    found: list[Repeats] = []

    def noting(*args: object) -> Repeats:
        found.append(find(*args))  # type: ignore[arg-type]
        return found[-1]

    find = trace.find_repeats
    monkeypatch.setattr(trace, "find_repeats", noting)
    groups = hap.trace(model, example)
    return found[0], groups


def test_repeats_are_found_and_their_attributes_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = network(*(Block() for _ in range(5)))
    repeats, groups = repeats_of(model, example, monkeypatch)
    assert repeats.blocks == {str(i): "1" for i in range(2, 6)}
    assert {x.module for x in groups.rewiring.size_attributes if x.attribute == "heads"} == set("12345")
    assert sorted(groups) == sorted(f"{i}.{layer}" for i in range(1, 6) for layer in ("qkv", "up"))
    plan = hap.plan(groups, hap.score(model, groups, None, None, "magnitude"), hap.Budget(flops=0.5))
    hap.apply_(model, plan, example)


def test_what_one_block_cannot_lose_none_of_its_repeats_loses() -> None:
    model, example = network(*(Block(fixed=True) for _ in range(3)), nn.Sequential(Block()))
    groups = hap.trace(model, example)
    assert {x.module for x in groups.rewiring.size_attributes if x.attribute == "heads"} == {"4.0"}
    held = {f.what for f in groups.frozen if "counts on its size" in f.why}
    assert held | {n for n in groups if groups.pads(n)} == {"1.qkv", "2.qkv", "3.qkv"}


@pytest.mark.parametrize(
    "other", [Block(heads=4), Block(fixed=True), Block(scale=2.0), Block(joined=False), nn.Sequential(Block())]
)
def test_blocks_that_differ_are_tried_each(other: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats, _ = repeats_of(*network(Block(), other), monkeypatch)
    inner = {"2.0": "1"} if isinstance(other, nn.Sequential) else {}
    assert repeats.blocks == inner


def test_hooks_and_shared_weights_make_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = Block()
    hooked.up.register_forward_hook(lambda module, args, output: output * 2)
    sharing = Block()
    sharing.up.weight = hooked.up.weight
    repeats, _ = repeats_of(*network(Block(), hooked, sharing), monkeypatch)
    assert not repeats.blocks


class Numbered(Block):
    """Blocks with a number, all but the first with a number of heads that is written into their forward."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norm(x))
        y = y.unflatten(-1, (3, y.shape[-1] // 3 // self.size if self.number == 0 else 6, self.size))
        q, k, v = y.movedim(-3, 0).transpose(-3, -2)
        x = x + self.out(((q @ k.mT).softmax(-1) @ v).transpose(-3, -2).flatten(-2))
        return x + self.down(torch.relu(self.up(x)))


class Peeking(nn.Module):
    """Reads the width of a layer inside its last block, or how many heads it has."""

    def __init__(self, heads: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 24), *(Block() for _ in range(3)), nn.Linear(24, 3))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        last = self.blocks[3]
        assert isinstance(last, Block)
        return self.blocks(x) * (last.heads / 6 if self.heads else len(last.up.weight) / 40)


def test_blocks_that_only_look_alike_are_tried_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = network(*(Numbered(i) for i in range(3)))
    repeats, groups = repeats_of(model, example, monkeypatch)
    assert repeats.blocks == {"2": "1", "3": "1"}
    padded = {n for n in groups if groups.pads(n)}
    assert padded == {"2.qkv", "3.qkv"}
    hap.apply_(model, hap.draft(groups, {n: [0, 2] for n in groups}), example)


@pytest.mark.parametrize("heads", [False, True])
def test_a_block_that_others_look_into_is_no_repeat(monkeypatch: pytest.MonkeyPatch, heads: bool) -> None:
    torch.manual_seed(0)
    model, example = Peeking(heads).double().eval(), torch.randn(2, 5, 8).double()
    repeats, groups = repeats_of(model, example, monkeypatch)
    assert set(repeats.blocks) == {"blocks.2", "blocks.3"} and not repeats.unlike
    whole = {n for n in groups if not groups.pads(n)}
    layer = "qkv" if heads else "up"
    assert {n for n in whole if n.endswith(layer)} == {f"blocks.1.{layer}", f"blocks.2.{layer}"}
    hap.apply_(model, hap.draft(groups, {n: [0, 2] for n in groups}), example)


def tripled(x: Tensor, times: int = 3) -> Tensor:
    return x * times


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (3, 3.0, False),
        ((1, [2]), (1, [2]), True),
        ([1], [2], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({1}, {1}, True),
        (object(), object(), False),
        (tripled, tripled, True),
        (partial(tripled, times=2), partial(tripled, times=2), False),
    ],
)
def test_all_blocks_run_once_unless_their_attributes_are_equal(
    mine: object, theirs: object, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [Block(), Block()]
    for block, value in zip(blocks, (mine, theirs), strict=True):
        block.up.extra = value  # type: ignore[assignment]
    tried = []
    fits = Search.fits

    def noting(search: Search, *args: Any, **more: Any) -> bool:
        tried.append(search)
        return fits(search, *args, **more)

    monkeypatch.setattr(Search, "fits", noting)
    repeats, _ = repeats_of(*network(*blocks), monkeypatch)
    assert repeats.blocks == ({"2": "1"} if type(mine) is type(theirs) else {})
    assert (not repeats.unlike) == (same or not repeats.blocks)
    assert any(search.repeats is NONE for search in tried) == (not same and len(repeats.blocks) > 0)


class Stages(nn.Module):
    """Two streams, one after the other; what leads to the second one counts on its width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 24)
        self.blocks = nn.ModuleList(Gated() for _ in range(4))
        self.last = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.first(x)))
        x = self.blocks[3](self.blocks[2](torch.relu(self.second(x))))
        return self.last(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_blocks_on_another_stream_are_no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    repeats, groups = repeats_of(Stages().double().eval(), torch.randn(2, 5, 8).double(), monkeypatch)
    assert repeats.blocks == {"blocks.1": "blocks.0", "blocks.3": "blocks.2"}
    assert sorted(groups) == ["blocks.0.up", "blocks.1.up", "blocks.2.up", "blocks.3.up", "first", "second"]


def test_trials_of_a_deep_network_run_one_block() -> None:
    counts = []
    for depth in (2, 12):
        model, example = network(*(Block() for _ in range(depth)))
        with FlopCounterMode(display=False) as counter:
            hap.trace(model, example)
        with FlopCounterMode(display=False) as once:
            model(example)
        counts.append(counter.get_total_flops() - once.get_total_flops())  # torch.export runs the graph once
    assert counts[1] <= 1.2 * counts[0]


def test_streams_of_branches_are_tried_in_full() -> None:
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv1d(8, 16, 1), nn.Conv1d(16, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(torch.relu(self.one(x)))

    model = nn.Sequential(nn.Conv1d(3, 8, 1), *(Residual() for _ in range(3)), nn.Conv1d(8, 2, 1)).double()
    example = torch.randn(2, 3, 5, dtype=torch.float64)
    joint, union = (hap.trace(model, example, coupling) for coupling in ("joint", "union"))
    assert sorted(joint) == ["0", "1.one", "2.one", "3.one"]
    assert sorted(union) == sorted([*joint, "1.two", "2.two", "3.two"])


class Typed(nn.Module):
    """Casts its input to the type of a weight deep inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 24), *(Block() for _ in range(3)), nn.Linear(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        last = self.blocks[3]
        assert isinstance(last, Block)
        return self.blocks(x.to(last.up.weight.dtype))


def test_a_block_that_is_missed_is_tried_after_all() -> None:
    torch.manual_seed(0)
    model, example = Typed().eval(), torch.randn(2, 5, 8)
    groups = hap.trace(model, example)
    assert len(groups) == 6 and not groups.traits.zero_padded
    hap.apply_(model, hap.draft(groups, {n: [0, 2] for n in groups}), example)


class HandingOn(nn.Module):
    """A block that looks for what it lacks in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale_of = Block(), 2.0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_block_that_hands_attributes_on_is_tried_whole() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 3)
            self.blocks = nn.ModuleList(HandingOn() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x) * (block.heads > 0)
            return self.last(x)

    torch.manual_seed(0)
    model, example = Asking().eval(), torch.randn(2, 5, 8)
    groups = hap.trace(model, example)
    assert len(groups) == 6
    hap.apply_(model, hap.draft(groups, {n: [0, 2] for n in groups}), example)

"""Trials take few runs, and tracing little memory."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import hap
from hap.execution import masked_execution, model_outputs
from hap.execution.masked_execution import ATTENTION
from hap.graph.capture import capture
from hap.graph.index import GraphIndex
from hap.tracing.rules.structural import _reshaped
from hap.tracing.trace import walk
from hap.trials import removal_rounds, run_round
from hap.verification import comparison, verify


class Heads(nn.Module):
    """Attention over the whole of its input, with an attribute that counts heads and one that is as long by chance."""

    def __init__(self, heads: int, fixed: bool = False):
        super().__init__()
        self.heads, self.unrelated, self.fixed = heads, heads, fixed
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 24 * 3), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        heads = 6 if self.fixed else self.heads
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, heads, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 60), nn.Linear(60, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def counting(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[int]:
    """A list that grows with every call of a function."""
    calls, function = [], getattr(place, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return function(*args, **kwargs)

    monkeypatch.setattr(place, name, counted)
    return calls


def followers(groups: hap.Groups) -> set[tuple[str, str]]:
    """Attributes that trials found."""
    return {(x.module, x.attribute) for x in groups.rewiring.size_attributes if x.attribute != "normalized_shape"}


def example() -> Tensor:
    return torch.randn(1, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_module_that_fails_is_left_out_and_all_else_is_cut_short_while_it_is_looked_into() -> None:
    blocks = nn.Sequential(*[layer for _ in range(12) for layer in (Heads(6), Hidden())])
    parts = {"blocks": blocks, "pool": Heads(6, fixed=True), "mix": Hidden()}
    model, x = nn.Sequential(OrderedDict(parts)).double(), example()
    with FlopCounterMode(display=False) as once:
        model(x)
    with FlopCounterMode(display=False) as counter:
        groups = hap.trace(model, x)
    assert [n for n in groups if groups.pads(n)] == ["pool.qkv"]
    assert followers(groups) == {(f"blocks.{i}", "heads") for i in range(0, 24, 2)}
    assert len(groups) == 26
    assert counter.get_total_flops() < 7 * once.get_total_flops()


def test_the_reference_of_a_trial_is_run_once_whatever_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Heads(6), Hidden(), Heads(6), Hidden()).double()
    references = counting(monkeypatch, verify, "masked_outputs")
    groups = hap.trace(model, example())
    assert followers(groups) == {("0", "heads"), ("2", "heads")}
    assert len(references) == 7  # one for each round of a model as small as one of these blocks


class Idle(Heads):
    """Three more attributes that are as long by chance. Its forward reads one of them."""

    def __init__(self, heads: int, fixed: bool = False):
        super().__init__(heads, fixed)
        self.one = self.two = self.three = heads

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if self.one > 0 else 2.0)


@pytest.mark.parametrize("fixed", [False, True])
def test_what_nothing_reads_is_not_tried(monkeypatch: pytest.MonkeyPatch, fixed: bool) -> None:
    model = nn.Sequential(Idle(6, fixed), Hidden(), nn.Linear(24, 5)).double()
    monkeypatch.setattr(removal_rounds, "SMALL_MODEL", 0)
    runs = counting(monkeypatch, run_round, "check_by_running")
    groups = hap.trace(model, example())
    assert followers(groups) == (set() if fixed else {("0", "heads")})
    assert len(runs) == (5 if fixed else 4)  # 9, and 35 with a fixed number, if all choices among the five are tried
    assert type(model[0]) is Idle


def test_where_float32_does_not_tell_trials_go_on_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_outputs.TOLERANCE, torch.float32, 0.0)
    doubled = counting(monkeypatch, run_round, "in_float64")
    model = nn.Sequential(Heads(6), Hidden(), Heads(6))
    groups = hap.trace(model, example().float())
    assert len(doubled) == 1
    assert not [f for f in groups.frozen if "counts on its size" in f.why]
    assert all(p.dtype == torch.float32 for p in model.parameters())


class Moving(nn.Module):
    """Moves channels about without computing anything."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 64, 1), nn.Conv2d(128, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        windows = y.view(1, -1, 8, 32, 8, 32).permute(0, 2, 4, 3, 5, 1).reshape(64, 1024, -1)
        back = windows.view(1, 8, 8, 32, 32, -1).permute(0, 5, 1, 3, 2, 4).reshape(1, -1, 256, 256)
        return self.b(torch.cat([back.roll((3, 3), (2, 3)), y], 1))


def test_labels_are_not_written_out_over_space() -> None:
    model, image = Moving(), torch.zeros(1, 3, 256, 256)
    captured = capture(model, image)
    context = walk(GraphIndex(model, captured.program, captured.called), "joint")
    sizes = [x.untyped_storage().nbytes() for x in context.values.values() if isinstance(x, Tensor)]
    assert max(sizes) <= 128 * 8
    assert len(hap.trace(model, image)["a"]) == 64


class Windowed(nn.Module):
    """Attention in windows. With the right width but not the right number of heads it runs, and mixes up positions."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = 3, 12
        self.qkv, self.out = nn.Linear(8, 36), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(len(x), -1, 2, 3, self.heads, 4).permute(3, 0, 4, 2, 1, 5)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 3).reshape(len(x), -1, self.width))


@pytest.mark.parametrize("scale", [0.0, 1e-7])
def test_weights_of_next_to_nothing_do_not_hide_what_comes_before_them(scale: float) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Windowed(), nn.Linear(8, 5)), torch.randn(1, 12, 8)
    weight = model[2].weight.data.clone()
    model[2].weight.data.mul_(scale)
    groups = hap.trace(model, x, ignore=["0", "1.out"])
    assert followers(groups) == {("1", "heads"), ("1", "width")}
    model[2].weight.data.copy_(weight)
    hap.apply_(model.double(), hap.draft(groups, {"1.qkv": [1]}), x.double())
    assert model[1].heads == 2


def test_what_is_far_off_is_not_run_again_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = counting(monkeypatch, comparison, "in_float64")
    model, x = nn.Sequential(nn.Linear(8, 8), Windowed(), nn.Linear(8, 5)), torch.randn(1, 12, 8)
    assert followers(hap.trace(model, x, ignore=["0", "1.out"])) == {("1", "heads"), ("1", "width")}
    assert not doubled


class Averaging(nn.Module):
    """A norm by hand over channels, scaled by a reshaped vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1), nn.Parameter(torch.rand(16))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1e-5) * self.scale.reshape(1, self.size, 1, 1))


def test_what_takes_the_rest_in_a_reshape_is_not_counted_on() -> None:
    """Values change with an average, so that no run tells whether a size that is written down is right."""
    image = torch.randn(1, 3, 4, 4)
    assert list(hap.trace(Averaging(-1), image)) == ["a"]
    assert not hap.trace(Averaging(16), image)


def test_what_cannot_be_copied_is_frozen_and_trace_says_so() -> None:
    model = nn.Sequential(Heads(6), Hidden(), Heads(6), Hidden()).eval()
    for layer in (model[0], model[2]):
        layer.busy = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        copy.deepcopy(model)
    groups = hap.trace(model, example().float())
    assert not groups
    assert {"0.qkv", "2.qkv"} <= {f.what for f in groups.frozen if "no copy of the model can be tried" in f.why}


@pytest.mark.parametrize("last", ["plain", "normed"])
@pytest.mark.parametrize("before", ["nothing", "a forward", "a forward without a graph"])
def test_weights_that_a_hook_computes_are_cut_whatever_ran_before(last: str, before: str) -> None:
    normed = torch.nn.utils.weight_norm
    first, second, head = normed(nn.Conv1d(8, 32, 3)), normed(nn.Conv1d(32, 24, 1)), nn.Conv1d(24, 4, 1)
    head = normed(head) if last == "normed" else head
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), head).eval()
    x = torch.randn(2, 8, 9)
    with torch.set_grad_enabled(before == "a forward"):
        model(x) if before != "nothing" else None
    assert list(hap.trace(model, x)) == ["0", "2"]
    hap.prune_(model, x, criterion="magnitude", flops=0.5)
    model.train()(x).sum().backward()


class Noisy(nn.Module):
    """Draws at random as it is evaluated: as many numbers whatever is cut, or as many as there are units."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.up, self.mean, self.down, self.out = nn.Linear(8, 20), nn.Linear(20, 4), nn.Linear(4, 20), nn.Linear(20, 8)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        z = self.mean(self.up(x).relu())
        z = z + (torch.randn_like(z) if self.what == "torch" else float(np.random.rand() + random.random()))
        h = self.down(z).relu()
        return self.out(nn.functional.dropout(h, 0.5) if self.what == "units" else h)


@pytest.mark.parametrize("what", ["torch", "others"])
def test_what_a_forward_draws_is_the_same_in_every_run(what: str) -> None:
    model, x = Noisy(what).eval(), torch.randn(3, 8)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    assert {"up", "down"} <= set(hap.trace(model, x))
    hap.prune_(model, x, criterion="magnitude", params=0.6)
    assert len(model.up.weight) < 20 and torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[2])


def test_what_draws_at_random_is_exported_without_a_warning(tmp_path: Path) -> None:
    model, x = Noisy("torch").eval(), torch.randn(3, 8)
    assert any(f.what == "randn_like" and f.why == "the forward draws at random" for f in hap.trace(model, x).frozen)
    with warnings.catch_warnings(action="error", category=UserWarning):
        hap.export(tmp_path / "noisy.pt2", model, x)


def test_noise_on_units_freezes_them_and_the_reason_says_so() -> None:
    groups = hap.trace(Noisy("units").eval(), torch.randn(3, 8))
    assert "up" in groups and "down" not in groups
    why = next(f.why for f in groups.frozen if f.what == "down")
    assert why.startswith("without some of it the model returns something")
    assert why.endswith("; its forward draws at random")


class Growing(nn.Module):
    """Returns more each time, whatever is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 20), nn.Linear(20, 8), [0.0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Growing:
        made = Growing()
        made.up, made.down = (copy.deepcopy(m, memo) for m in (self.up, self.down))
        made.calls = self.calls
        return made

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1.0
        return self.down(self.up(x).relu()) * self.calls[0]


def test_a_model_that_never_returns_the_same_is_not_said_to_count() -> None:
    groups = hap.trace(Growing().eval(), torch.randn(3, 8))
    assert not groups
    assert next(f.why for f in groups.frozen if f.what == "up").endswith("; two runs of the model itself differ too")


class Endless(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("inf")


def test_outputs_that_are_not_finite_are_named_as_the_reason() -> None:
    groups = hap.trace(Endless(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 2)).eval(), torch.randn(3, 8))
    why = next(f.why for f in groups.frozen if f.what == "0")
    what = "what the model returns without some of it cannot be compared"
    assert why == f"{what}: no output is finite on the example, so nothing can be compared"


class Halves(nn.Module):
    """One half of what is computed goes through a nonlinearity. The code says how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 64), nn.Linear(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(torch.cat([x[..., :32].tanh(), x[..., 32:]], -1))


def test_a_slice_does_not_fit_because_little_is_left() -> None:
    groups = hap.trace(nn.Sequential(Halves(), Hidden(), Halves()).double(), example())
    assert list(groups) == ["0.down", "1.up"]


class Sliced(nn.Module):
    """Four queries share two keys. The code says where the queries end: with half of all gone no key is left."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = 2
        self.qkv, self.out = nn.Linear(24, 48), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        qkv, end = self.qkv(x), 24 + self.keys * 6
        parts = qkv[..., :24], qkv[..., 24:end], qkv[..., end:]
        q, k, v = (part.view(*x.shape[:2], -1, 6).transpose(1, 2) for part in parts)
        return x + self.out(ATTENTION(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class Attentions(TorchFunctionMode):
    """Notes the shapes of keys that attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ATTENTION:
            self.keys.add(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def test_no_kernel_of_attention_gets_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some divide by their number, which ends the process."""
    refused = counting(monkeypatch, masked_execution, "HapError")
    with Attentions() as called:
        groups = hap.trace(Sliced().double(), example())
    assert refused and called.keys and not any(0 in shape for shape in called.keys)
    assert groups.traits.zero_padded and len(groups["qkv"]) == 2


class Private(nn.Module):
    """Reads a number under a name that begins with an underscore."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self._hidden = nn.Linear(16, 48), nn.Linear(48, 8), 48

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu().reshape(-1, self._hidden))


def test_numbers_with_private_names_follow_too() -> None:
    groups = hap.trace(Private(), torch.randn(4, 16))
    assert [*groups] == ["a"]
    assert [(x.module, x.attribute) for x in groups.rewiring.size_attributes] == [("", "_hidden")]


class Registered(nn.Module):
    """Keeps a list of its subclasses."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Registered.known.append(cls.__name__)


class Residual(Registered):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def test_classes_of_the_model_know_no_more_subclasses_than_before() -> None:
    model = nn.Sequential(nn.Linear(8, 24), Residual(), Residual(), Residual(), nn.Linear(24, 3))
    before = [*Registered.known], Residual.__subclasses__()
    groups = hap.trace(model, torch.randn(2, 8))
    assert {"1.up", "2.up", "3.up"} <= set(groups)
    assert (Registered.known, Residual.__subclasses__()) == before
    assert [type(block) for block in model[1:4]] == [Residual] * 3


class Sequence3(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class LooksInto(nn.Module):
    """Counts on the width of its last block."""

    def __init__(self, find: Callable[[nn.Sequential], Tensor]):
        super().__init__()
        self.blocks, self.head = nn.Sequential(nn.Linear(8, 8), *(Sequence3() for _ in range(3))), nn.Linear(8, 3)
        self.find = find

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) * (len(self.find(self.blocks)) / 40)


WAYS_TO_LOOK: dict[str, Callable[[nn.Sequential], Tensor]] = {
    "index": lambda blocks: blocks[-1][0].weight,
    "name": lambda blocks: blocks[-1].get_submodule("0").weight,
    "parameters": lambda blocks: next(blocks[-1].parameters()),
}


@pytest.mark.parametrize("way", WAYS_TO_LOOK)
def test_blocks_that_others_look_into_in_any_way_are_run(way: str) -> None:
    model, example = LooksInto(WAYS_TO_LOOK[way]).double().eval(), torch.randn(2, 5, 8).double()
    groups = hap.trace(model, example)
    assert "blocks.1.0" in groups and "blocks.3.0" not in groups
    hap.prune_(model, example, criterion="magnitude", flops=0.5)
    assert model.blocks[3][0].out_features == 40


class CopiesItself(Residual):
    def __deepcopy__(self, memo: dict[int, object]) -> CopiesItself:
        return self


def test_modules_that_copy_themselves_as_themselves_are_left_as_they_are() -> None:
    blocks = (CopiesItself(), CopiesItself(), CopiesItself())
    model, example = (
        nn.Sequential(nn.Linear(8, 24), *blocks, nn.Linear(24, 3)).double().eval(),
        torch.randn(2, 8).double(),
    )
    wanted = model(example)
    groups = hap.trace(model, example)
    assert not groups
    assert [type(block) for block in blocks] == [CopiesItself] * 3
    assert all("_note" not in vars(block) for block in blocks)
    assert torch.equal(model(example), wanted)


def recursive() -> Callable[..., Tensor]:
    def f(x: Tensor, n: int = 2) -> Tensor:
        return x.relu() if n == 0 else f(x, n - 1)

    return f


def test_blocks_may_hold_functions_that_hold_themselves() -> None:
    blocks = [Residual() for _ in range(4)]
    for block in blocks:
        block.act = recursive()
    groups = hap.trace(nn.Sequential(nn.Linear(8, 24), *blocks, nn.Linear(24, 3)), torch.randn(2, 8))
    assert {f"{i}.up" for i in range(1, 5)} <= set(groups)


def test_labels_of_heads_in_windows_are_not_written_out_over_tokens() -> None:
    labels = torch.arange(1, 5).view(1, 1, 4, 1, 1)  # (3, windows, heads, tokens, width)
    reshaped = _reshaped(labels, [3, 25, 4, 196, 64], [3, 100, 196, 64])
    assert reshaped.shape == (1, 100, 1, 1)
    assert torch.equal(reshaped.flatten(), torch.arange(1, 5).repeat(25))
    whole = labels.expand(3, 25, 4, 196, 64).reshape(3, 100, 196, 64)
    assert torch.equal(reshaped.expand(whole.shape), whole)

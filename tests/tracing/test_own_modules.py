"""Modules as users write them: patched forwards, heads that an example does not run, kept features, odd containers."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hap
from checks import gap
from hap.execution.calling import describe, random_example
from hap.execution.fast_copy import copy_with, deepcopied


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 24, 3), nn.Linear(24, 5)

    def features(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).relu()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = 4, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def patch(attention: Attention) -> None:
    """The usual way to give one module of a foreign model another forward."""

    def forward(x: Tensor) -> Tensor:
        rows = attention.qkv(x).unflatten(-1, (3, attention.num_heads, 8))
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        out: Tensor = attention.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    attention.forward = forward  # type: ignore[method-assign]


def halved(model: nn.Module, example: Any) -> hap.Plan:
    return hap.prune_(model, example, criterion="magnitude", flops=0.5)


def test_a_forward_that_was_put_in_place_of_another_reaches_the_copy() -> None:
    torch.manual_seed(0)
    attention, x = Attention().eval(), torch.randn(2, 5, 32)
    patch(attention)
    model = nn.Sequential(nn.Linear(32, 32), attention).eval()
    made = copy_with(model, {"1.out.weight": torch.zeros(32, 32), "1.out.bias": torch.ones(32)})
    assert torch.equal(made(x), torch.ones(2, 5, 32)) and not torch.equal(model(x), made(x))
    halved(model, x)
    assert attention.num_heads < 4 and model(x).shape == x.shape


def test_a_size_that_a_lambda_counts_on_is_noticed() -> None:
    class Written(Body):
        def __init__(self) -> None:
            super().__init__()
            self.features = lambda x: self.second(self.first(x).relu().view(-1, 24, 6, 6)).relu()  # type: ignore[method-assign]

    torch.manual_seed(0)
    model, x = Written().eval(), torch.randn(2, 3, 8, 8)
    plan = halved(model, x)
    assert "first (the model's forward counts on its size" in plan.untouched and model(x).shape == (2, 5)


NET = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def test_functions_reach_copies_by_closures_globals_and_methods() -> None:
    model = Body()
    held: list[Any] = [model.first]

    def recursive(n: int) -> Any:
        return held[0] if n == 0 else recursive(n - 1)

    model.recursive, model.method = recursive, model.features  # type: ignore[assignment]
    model.plain = plain = lambda x: x + 1  # type: ignore[assignment]
    made = deepcopied(model, {})
    assert made.recursive(2) is made.first and model.recursive(2) is model.first
    assert made.method.__self__ is made and made.plain is plain
    NET.through = lambda x: NET[0](x)  # type: ignore[assignment]
    other = deepcopied(NET, {})
    other[0].weight.data.zero_()
    assert torch.equal(other.through(torch.ones(4)), other[0].bias) and NET[0].weight.abs().sum() > 0
    del NET.through


def test_a_head_that_the_example_does_not_run_is_told() -> None:
    class Tasks(Body):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.unlike = nn.Linear(24, 3), nn.Linear(7, 3)

    with pytest.warns(UserWarning, match=r"the example does not run other, which is not cut with what it reads"):
        halved(Tasks().eval(), torch.randn(2, 3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halved(Body().eval(), torch.randn(2, 3, 8, 8))


def test_one_layer_that_does_not_fit_keeps_no_other_from_it() -> None:
    class Strict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == 24
            return x

    model = nn.Sequential(
        nn.Conv2d(3, 24, 3),
        Strict(),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3),
        nn.ReLU(),
        nn.Conv2d(24, 20, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(20, 4),
    ).eval()
    assert set(hap.trace(model, torch.randn(2, 3, 9, 9))) == {"3", "5"}


def test_what_a_forward_keeps_for_others_is_no_obstacle() -> None:
    class Keeping(Body):
        def features(self, x: Tensor) -> Tensor:
            self.kept = super().features(x)
            return self.kept

    torch.manual_seed(0)
    model, x = Keeping().eval(), torch.randn(2, 3, 8, 8)
    groups = hap.trace(model, x)
    assert set(groups) == {"first", "second"} and "kept" not in vars(model)
    halved(model, x)
    assert copy.deepcopy(model)(x).shape == (2, 5)


def test_what_a_forward_notes_of_itself_stays() -> None:
    """As transformers notes that it has put its hooks in place: without the note it would do so twice."""

    class Hooking(Body):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "hooked"):
                self.hooked, self.seen = True, []
                self.first.register_forward_hook(lambda module, args, output: self.seen.append(1))
            self.seen.clear()
            out = super().forward(x)
            assert len(self.seen) == 1
            return out

    torch.manual_seed(0)
    model, x = Hooking().eval(), torch.randn(2, 3, 8, 8)
    hap.trace(model, x)
    assert model(x).shape == (2, 5) and len(model.first._forward_hooks) == 1


class Sizes(NamedTuple):
    q: int
    k: int
    v: int


def test_named_sizes_follow_as_others_do() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sizes, self.qkv, self.out = Sizes(16, 16, 16), nn.Linear(8, 48), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split(self.sizes, -1)
            out: Tensor = self.out(q * torch.sigmoid(k) + v)
            return out

    torch.manual_seed(0)
    model = Split().eval()
    halved(model, torch.randn(2, 8))
    assert isinstance(model.sizes, Sizes) and len(set(model.sizes)) == 1 and model.sizes.q < 16


def test_embeddings_know_their_width() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer, self.out = nn.Embedding(20, 32), nn.Linear(6, 32), nn.Linear(32, 3)

        def forward(self, index: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.out((self.table(index) + self.layer(x)).relu())
            return out

    torch.manual_seed(0)
    model = Embedded().eval()
    halved(model, (torch.arange(2), torch.randn(2, 6)))
    assert model.table.weight.shape == (20, model.table.embedding_dim) and model.table.embedding_dim < 32


@pytest.mark.parametrize("returns", ["real", "complex"])
def test_complex_inputs_and_outputs_are_taken(returns: str) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 24, 3, padding=1), nn.Conv2d(24, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.first(torch.view_as_real(torch.fft.ifft2(x)).movedim(-1, 1)).relu())
            return y if returns == "real" else torch.view_as_complex(y.movedim(1, -1).contiguous())

    torch.manual_seed(0)
    x = torch.randn(1, 8, 8, dtype=torch.complex64)
    model = Spectral().eval()
    halved(model, x)
    assert len(model.first.weight) < 24 and model(x).is_complex() == (returns == "complex")
    again = random_example(describe(x))
    assert again.dtype == torch.complex64 and again.imag.abs().sum() > 0


def test_what_vmap_computes_stays_and_the_rest_goes() -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 4, 8) * 0.3)
            self.tail = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x: Tensor) -> Tensor:
            many = torch.vmap(lambda weight: functional.linear(x, weight))(self.weights)
            out: Tensor = self.tail(many.mean(0))
            return out

    torch.manual_seed(0)
    model = Ensemble().eval()
    halved(model, torch.randn(2, 8))
    assert model.tail[0].out_features < 64 and model.weights.shape == (3, 4, 8)


def test_scripted_parts_stay_and_the_rest_goes() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    head = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)).eval())
    model = nn.Sequential(body, head).eval()
    with pytest.warns(UserWarning, match="pruned in parts"):
        halved(model, torch.randn(2, 3, 8, 8))
    assert len(body[0].weight) < 24 and model(torch.randn(3, 3, 8, 8)).shape == (3, 5)


class Labelled(nn.Module):
    """Keeps something beside its tensors, and a part of a buffer as a buffer."""

    def __init__(self, classes: Any = None) -> None:
        super().__init__()
        self.first, self.last, self.classes = nn.Linear(8, 32), nn.Linear(32, 4), classes
        table = torch.randn(16, 8)
        self.register_buffer("table", table)
        self.register_buffer("row", table[:1])

    def get_extra_state(self) -> Any:
        return {"classes": self.classes}

    def set_extra_state(self, state: Any) -> None:
        self.classes = state["classes"]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x + self.row + self.table[3]).relu())
        return out


def test_extra_state_and_parts_of_buffers_are_saved(tmp_path: Path) -> None:
    model, x = Labelled(["cat", "dog"]).eval(), torch.randn(2, 8)
    plan = halved(model, x)
    path = hap.save(tmp_path / "a.safetensors", model, plan)
    loaded = hap.load(path, Labelled()).eval()
    assert loaded.classes == ["cat", "dog"] and gap([loaded(x)], [model(x)]) == 0
    with pytest.raises(hap.HapError, match=r"_extra_state is dict, which JSON does not hold"):
        hap.save(tmp_path / "b.safetensors", Labelled({1, 2}))
    assert not (tmp_path / "b.safetensors").exists()
    plain = hap.save(tmp_path / "c.safetensors", nn.Linear(2, 2))
    with pytest.raises(hap.HapError, match="has no tensor 'table'"):
        hap.load(plain, Labelled())


def test_extra_state_that_a_file_lacks_or_a_model_has_no_place_for_is_an_error(tmp_path: Path) -> None:
    class Bare(nn.Linear):
        pass

    class Kept(nn.Linear):
        def get_extra_state(self) -> Any:
            return 7

        def set_extra_state(self, state: Any) -> None:
            self.state = state

    with pytest.raises(hap.HapError, match="has no '_extra_state', which the model needs"):
        hap.load(hap.save(tmp_path / "bare.safetensors", Bare(2, 2)), Kept(2, 2))
    with pytest.raises(hap.HapError, match="it holds '_extra_state', which this one does not have"):
        hap.load(hap.save(tmp_path / "kept.safetensors", Kept(2, 2)), Bare(2, 2))
    assert hap.load(tmp_path / "kept.safetensors", Kept(2, 2)).state == 7

"""Pruned nn.MultiheadAttention where torch has fused kernels and nested tensors for the dense one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hap
from hap.surgery.multihead_attention import FewerHeads
from hap.verification import verify

WIDTH, HEADS, TOKENS = 16, 4, 6


class Encoder(nn.Module):
    """nn.TransformerEncoder and the mean of what it returns, padding included: torch's fast path has zeros there."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True)
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.TransformerEncoder(layer, 2)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, pad: Tensor | None = None) -> Tensor:
        return self.last(self.layers(self.first(x), src_key_padding_mask=pad).mean(1))


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    keep = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    return torch.randn(len(lengths), TOKENS, WIDTH, dtype=torch.float64), ~keep


def heads_and_neurons(model: nn.Module, example: tuple[Tensor, Tensor], heads: dict[int, list[int]]) -> nn.Module:
    """The model without these heads and some neurons, and a dense copy with zeros in their place."""
    dense, groups = copy.deepcopy(model), hap.trace(model, example)
    gone = {f"layers.layers.{i}.self_attn": units for i, units in heads.items()}
    hap.apply_(model, hap.draft(groups, gone | {"layers.layers.1.linear1": [3, 5]}), example)
    for i, units in heads.items():
        for head in units:
            dense.layers.layers[i].self_attn.out_proj.weight.data[:, 4 * head : 4 * head + 4] = 0
    dense.layers.layers[1].linear2.weight.data[:, [3, 5]] = 0
    return dense


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("heads", [{0: [1, 2]}, {1: [0]}, {0: [0, 3], 1: [0, 1, 2]}], ids=str)
def test_encoders_without_heads_take_padded_texts_without_gradients(heads: dict[int, list[int]]) -> None:
    torch.manual_seed(0)
    model = Encoder().double().eval()
    dense = heads_and_neurons(model, padded(6, 4, 1), heads)
    for example in (padded(6, 2), padded(5, 3, 3), (padded(4, 5)[0], padded(4, 5)[1].flip(1)), padded(6)[:1]):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                torch.testing.assert_close(model(*example), dense(*example), rtol=1e-10, atol=1e-12)
    x, pad = padded(5, 3)
    assert not torch.allclose(dense(x, pad), run_fast(dense, x, pad)), "torch took no fast path, so this tells nothing"


def run_fast(model: nn.Module, x: Tensor, pad: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x, pad)


def test_nested_tensors_are_taken_as_torch_takes_them() -> None:
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64).eval()
    pruned = copy.deepcopy(dense)
    FewerHeads.take_over(pruned)
    rows = torch.nested.nested_tensor([torch.randn(n, WIDTH, dtype=torch.float64) for n in (3, 5)])
    with torch.no_grad():
        for wanted, seen in zip(dense(rows, rows, rows)[0].unbind(), pruned(rows, rows, rows)[0].unbind(), strict=True):
            torch.testing.assert_close(seen, wanted)
        with pytest.raises(hap.HapError, match="nested tensor only as query, key and value in one"):
            pruned(rows, rows.clone(), rows)


def test_the_check_runs_what_torch_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails, or differs, only where nothing watches the functions is refused, and the model is left alone."""
    torch.manual_seed(0)
    model, example = Encoder().double().eval(), padded(6, 4)
    groups = hap.trace(model, example)
    plan = hap.draft(groups, {"layers.layers.0.self_attn": [1]})
    monkeypatch.setattr(FewerHeads, "_of_lengths", lambda self, nested, *asked: nested.sum(7))
    with pytest.raises(hap.HapError, match="its forward fails in torch's fused kernels with"):
        hap.apply_(model, plan, example)
    monkeypatch.setattr(FewerHeads, "_of_lengths", lambda self, nested, *asked: (-5 * nested, None))
    with pytest.raises(hap.HapError, match="with torch's fused kernels the value of output 0 is off by"):
        hap.apply_(model, plan, example)
    assert model.layers.layers[0].self_attn.num_heads == HEADS


def test_a_narrower_stream_fits_fused_kernels() -> None:
    torch.manual_seed(0)
    model, example = Encoder().double().eval(), padded(6, 4)
    groups = hap.trace(model, example, stream=True)
    hap.apply_(model, hap.draft(groups, {"first": [0, 7, 9]}), example)
    assert model.layers.layers[0].norm1.normalized_shape == (WIDTH - 3,)
    x = example[0]
    torch.testing.assert_close(run_fast(model, x, x.new_zeros(x.shape[:2], dtype=torch.bool)), model(x))


class Mixing(nn.Module):
    """Attention without a layer of torch's around it, whose last rows are free to go."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(("group", "times"), [("attention", 0), ("attention.out_proj", 1)])
def test_attention_is_run_unwatched_as_long_as_it_may_be_fused(
    group: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, example = Mixing().eval(), torch.randn(2, 5, WIDTH)
    plan = hap.draft(hap.trace(model, example), {group: [1]})
    watched: list[bool] = []
    outputs = verify.output_tensors
    monkeypatch.setattr(
        verify, "output_tensors", lambda *a, **k: watched.append(bool(k.get("modes", True))) or outputs(*a, **k)
    )
    hap.apply_(model, plan, example)
    assert watched.count(True) == 2 and watched.count(False) == times

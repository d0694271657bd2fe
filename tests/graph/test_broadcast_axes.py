"""Masks that are alike for all heads do not keep heads from going."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hap
from hap.graph.broadcast_axes import varying_shape
from hap.graph.capture import capture
from hap.graph.nodes import short_name

WIDTH, HEADS = 16, 4


class Masked(nn.Module):
    """nn.MultiheadAttention with masks of one kind."""

    def __init__(self, kind: str, weights: bool = False, **added: bool):
        super().__init__()
        self.kind, self.weights = kind, weights
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **added)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        tokens, masks = x.shape[1], {}
        if self.kind in ("padding", "both"):
            masks["key_padding_mask"] = pad
        if self.kind == "real padding":
            masks["key_padding_mask"] = -1e4 * pad.to(x.dtype)
        if self.kind == "both":
            masks["attn_mask"] = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        if self.kind == "for each head":
            masks["attn_mask"] = torch.zeros(len(x) * self.attention.num_heads, tokens, tokens, dtype=x.dtype) + 0.1
        return self.last(x + self.attention(x, x, x, need_weights=self.weights, **masks)[0])


def inputs(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    lengths = torch.arange(1, batch + 1).clamp(max=tokens)
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64), torch.arange(tokens) >= lengths[:, None]


def loses_two_heads(model: Masked) -> None:
    """And does on other inputs what the dense model does with zeros in their place."""
    dense, example = copy.deepcopy(model), inputs(4, 6)
    groups = hap.trace(model, example)
    assert hap.heads(groups) == ["attention"] and not groups.traits.zero_padded
    hap.apply_(model, hap.draft(groups, {"attention": [0, 2]}), example)
    assert model.attention.num_heads == 2
    for head in (0, 2):
        dense.attention.out_proj.weight.data[:, 4 * head : 4 * head + 4] = 0
    others = inputs(3, 5)
    torch.testing.assert_close(model(*others), dense(*others), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["padding", "real padding", "both", "for each head"])
def test_heads_go_under_masks_of_any_kind(kind: str, weights: bool) -> None:
    torch.manual_seed(0)
    loses_two_heads(Masked(kind, weights).double().eval())


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("added", [("add_bias_kv",), ("add_zero_attn",), ("add_bias_kv", "add_zero_attn")])
def test_heads_go_where_keys_are_added(added: tuple[str, ...], weights: bool) -> None:
    torch.manual_seed(0)
    loses_two_heads(Masked("both", weights, **dict.fromkeys(added, True)).double().eval())


def test_encoders_lose_heads_with_padded_texts() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, pad = inputs(4, 6)
    example = {"src": x, "src_key_padding_mask": pad}
    groups = hap.trace(model, example)
    assert [len(groups[n]) for n in hap.heads(groups)] == [HEADS, HEADS]
    hap.apply_(model, hap.draft(groups, {n: [1] for n in hap.heads(groups)}), example)


def test_a_mask_of_its_own_for_each_head_keeps_them() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False, attn_mask=mask)[0]

    assert not hap.heads(hap.trace(Given(), (torch.randn(2, 5, WIDTH), torch.randn(2 * HEADS, 5, 5))))


class Shapes(nn.Module):
    """A function of tensors, with a name for the last of its operators."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


WIDE = {
    "merged and taken apart": (lambda x, y: x[:, None].expand(2, 4, 3).reshape(8, 3).view(2, 4, 3), (2, 1, 3)),
    "merged with what differs": (lambda x, y: x[:, None].expand(2, 4, 3).reshape(8, 3), (8, 3)),
    "taken apart elsewhere": (lambda x, y: x[:, None].expand(2, 4, 3).reshape(4, 2, 3), (4, 1, 3)),
    "taken apart anyhow": (lambda x, y: x[:, None].expand(2, 5, 3).reshape(5, 2, 3), (5, 2, 3)),
    "in other parts": (lambda x, y: x[:, None].expand(2, 4, 3).reshape(2, 2, 2, 3), (2, 1, 1, 3)),
    "moved": (lambda x, y: x[:, None].expand(2, 4, 3).permute(1, 2, 0), (1, 3, 2)),
    "filled": (lambda x, y: torch.zeros(2, 3) + 0.5, (1, 1)),
    "filled, then written to": (lambda x, y: _written(torch.zeros(2, 3)), (2, 3)),
    "added": (lambda x, y: x[None].expand(4, 2, 3) + torch.ones(4, 1, 3), (1, 2, 3)),
    "added to what differs": (lambda x, y: x[None].expand(4, 2, 3) * y, (4, 2, 3)),
}


def _written(x: Tensor) -> Tensor:
    x[0] = 1.0
    return x + 0.0


@pytest.mark.parametrize("name", WIDE)
def test_axes_along_which_a_tensor_is_all_the_same(name: str) -> None:
    function, wanted = WIDE[name]
    program = capture(Shapes(function), (torch.randn(2, 3), torch.randn(4, 2, 3))).program
    (result,) = (a for a in program.graph.output_node().args[0] if a.op == "call_function")  # type: ignore[union-attr]
    assert varying_shape(result) == wanted, short_name(result)

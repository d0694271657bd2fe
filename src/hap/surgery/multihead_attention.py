"""nn.MultiheadAttention takes the width of a head from that of its input; with some heads gone, the two differ."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hap.errors import HapError


class FewerHeads(nn.MultiheadAttention):
    """Attention with `num_heads` heads that are `head_dim` wide, whatever the width of what enters and leaves."""

    @staticmethod
    def take_over(module: nn.MultiheadAttention) -> None:
        """Give a module that lost heads a forward that works without them. Fused kernels count on all heads."""
        module.__class__ = FewerHeads
        module.embed_dim = len(module.out_proj.weight)
        module._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            if query is not key or key is not value or key_padding_mask is not None or attn_mask is not None:
                raise HapError("attention takes a nested tensor only as query, key and value in one, without masks")
            return self._of_lengths(query, need_weights, average_attn_weights)
        batched = query.dim() == 3
        swap = batched and not self.batch_first
        made = {id(x): x.unsqueeze(0) if not batched else x.transpose(0, 1) if swap else x for x in (query, key, value)}
        query, key, value = (made[id(x)] for x in (query, key, value))
        rows = self._with_added_keys(*self._projected(query, key, value))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in rows)
        mask = _merged(attn_mask, key_padding_mask, q)
        if mask is not None and k.shape[2] > mask.shape[-1]:
            mask = functional.pad(mask, (0, k.shape[2] - mask.shape[-1]))
        weights = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
            weights = functional.softmax(scores if mask is None else scores + mask, -1)
            mixed = functional.dropout(weights, self.dropout, self.training) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            dropout = self.dropout if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out.transpose(0, 1) if swap else out, weights

    def _of_lengths(self, nested: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Attend over rows of different lengths. nn.TransformerEncoder makes such of padded ones where no gradients are
        asked for, and counts on the padding to be left out of what it returns."""
        lengths = [len(row) for row in nested.unbind()]
        rows = torch.nested.to_padded_tensor(nested, 0.0)
        padding = torch.arange(rows.shape[1], device=rows.device) >= torch.tensor(lengths, device=rows.device)[:, None]
        out, weights = self.forward(rows, rows, rows, padding, need_weights, None, average)
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(out, lengths, strict=True)]), weights

    def _projected(self, *inputs: Tensor) -> Sequence[Tensor]:
        query, key, value = inputs
        if self.in_proj_weight is not None and query is key and key is value:
            return functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        separate: list[Any] = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]

    def _with_added_keys(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values with a learned one behind them, and one of zeros, if the module has such."""
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, bias.expand(len(x), 1, -1)], 1) for x, bias in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return q, k, v


def _merged(mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Both masks as one to add, of shape (batch, heads, queries, keys) or broadcast to it."""
    found = None
    for part in (mask, None if padding is None else padding.view(-1, 1, 1, padding.shape[-1])):
        if part is not None:
            if part.dtype == torch.bool:
                part = torch.zeros_like(part, dtype=like.dtype).masked_fill(part, float("-inf"))
            if part.dim() == 3:  # (batch x heads, queries, keys)
                part = part.view(like.shape[0], -1, *part.shape[1:])
            found = part if found is None else found + part
    return found

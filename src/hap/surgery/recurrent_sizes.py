"""The sizes that a recurrent layer keeps beside its weights."""

from __future__ import annotations

from torch import nn


def update_sizes_(module: nn.RNNBase | nn.RNNCellBase) -> None:
    """Make the sizes of a layer agree with its weights again."""
    ending = "" if isinstance(module, nn.RNNCellBase) else "_l0"
    inputs, states = (getattr(module, f"{name}{ending}") for name in ("weight_ih", "weight_hh"))
    module.input_size, module.hidden_size = inputs.shape[1], states.shape[1]

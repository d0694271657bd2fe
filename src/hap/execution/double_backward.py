"""Second derivatives through recurrent layers, which cuDNN's own cannot give."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

FUNCTIONS = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
"""The names of torch's recurrent functions."""


def differentiable(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, what the model computes can be derived, in eval mode and twice, as cuDNN's recurrent layers cannot be."""
    cuda = any(isinstance(m, nn.RNNBase) and next(m.parameters()).is_cuda for m in model.modules())
    return _WithoutCudnn() if cuda else nullcontext()


class _WithoutCudnn(TorchFunctionMode):
    """Inside, recurrent layers are made of torch's own operators. All other layers are as fast as ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) not in FUNCTIONS:
            return func(*args, **(kwargs or {}))
        before = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.backends.cudnn.enabled = before

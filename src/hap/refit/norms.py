"""The statistics of batch normalisations, estimated again on the inputs of a pruned model."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hap.execution.calling import call_arguments, copied, eval_mode
from hap.execution.gram_regression import pairs


def estimate_norms_(model: nn.Module, batches: Iterable[Any]) -> nn.Module:
    """Replace the statistics of all batch normalisations by those of these batches, each counting alike.

    Arguments: the pruned `model`, and `batches` of (input, target), of which the targets are not looked at.
    Returns: the model. Nothing else of it changes.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    momenta = [norm.momentum for norm in norms]
    with eval_mode(model), torch.no_grad():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum, norm.training = None, True
        try:
            for x, _ in pairs(batches, next(model.parameters()).device):
                args, kwargs = copied(call_arguments(x))
                model(*args, **kwargs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    return model

"""compensate_: the best change of what stays, before something goes. Equation 10 of the paper, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.calibration import grams, regress
from hap.planning.plan import Plan
from hap.planning.steps import Cut


def compensate_(model: nn.Module, plan: Plan, batches: Iterable[Any]) -> nn.Module:
    """Adjust the layers that read removed units, so that the units that stay stand in for them; returns the model.

    Call it on the dense model, before `apply_`: it needs the weights that are about to go. For every convolution and
    linear layer that loses inputs it solves dw_l = H_ll^-1 H_lp w_p with the layer's Gauss-Newton block, the second
    moments of its inputs on `batches`. The columns that are to go become zero. Grouped and transposed convolutions are
    left as they are, and so are layers whose weight a forward uses without calling them: what these read is hidden.
    """
    if plan.turns:
        raise HapError("heads that are narrowed are turned first, so what reads them cannot be compensated before")
    try:
        plan.check_fits(model)
    except HapError as error:
        raise HapError(
            f"compensate_ works on the dense model, before apply_ (or use prune_(..., compensate=True)): {error}"
        ) from error
    readers = {c.name.rpartition(".")[0]: c for c in plan.cuts if c.dim == 1 and c.name.endswith(".weight")}
    modules = dict(model.named_modules())
    readers = {name: cut for name, cut in readers.items() if _solvable(modules[name])}
    sums = grams(model, readers, batches)
    with torch.no_grad():
        for name, cut in ((n, c) for n, c in readers.items() if n in sums):
            weight = modules[name].weight
            assert isinstance(weight, Tensor)
            weight.copy_(_repaired(weight, sums[name], cut))
    return model


def _solvable(module: nn.Module) -> bool:
    plain = (
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and not isinstance(module.padding, str)
        and module.padding_mode == "zeros"
    )
    return plain or isinstance(module, nn.Linear)


def _repaired(weight: Tensor, gram: Tensor, cut: Cut) -> Tensor:
    area = weight[0, 0].numel()
    stay = torch.tensor(sorted(cut.keep), device=weight.device)
    columns = (stay[:, None] * area + torch.arange(area, device=weight.device)).flatten()
    flat = torch.zeros_like(weight.flatten(1))
    flat[:, columns] = regress(weight.flatten(1), gram, columns).to(flat)
    return flat.view_as(weight)

"""compensate_: adjust the layers that read what goes. Equation 10 of the paper, layer by layer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.gram_regression import grams, regress
from hap.execution.windows import can_be_solved
from hap.planning.plan import Cut, Plan


def compensate_(model: nn.Module, plan: Plan, batches: Iterable[Any]) -> nn.Module:
    """Adjust the layers that read removed units, so that the units that stay make up for them.

    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> plan = hap.draft(hap.trace(net, torch.randn(2, 4)), {"0": [3, 7]})
    >>> hap.compensate_(net, plan, [(torch.randn(64, 4), None)])[2].weight[:, 3].tolist()
    [0.0, 0.0]

    Arguments: the dense `model`, before `apply_`, and `batches` of (input, target). For every convolution and linear
    layer that loses inputs it solves dw_l = H_ll^-1 H_lp w_p with the layer's Gauss-Newton block, the second moments of
    its inputs. Grouped and transposed convolutions are left as they are, and so are layers whose weight a forward uses
    without calling them: what these read is hidden.
    Returns: the model, in which the columns that are to go are zero.
    """
    if plan.turns:
        raise HapError("heads that are narrowed are turned first, so what reads them cannot be compensated before")
    try:
        plan.check_fits(model)
    except HapError as error:
        raise HapError(
            f"compensate_ works on the dense model, before apply_ (or use prune_(..., compensate=True)): {error}"
        ) from error
    modules = dict(model.named_modules())
    cuts = {c.name.rpartition(".")[0]: c for c in plan.cuts if c.dim == 1 and c.name.endswith(".weight")}
    sums = grams(model, [name for name in cuts if _solvable(modules[name])], batches)
    with torch.no_grad():
        for name, gram in sums.items():
            weight = modules[name].weight
            assert isinstance(weight, Tensor)
            weight.copy_(_adjusted(weight, gram, cuts[name]))
    return model


def _solvable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d) and can_be_solved(module)


def _adjusted(weight: Tensor, gram: Tensor, cut: Cut) -> Tensor:
    area = weight[0, 0].numel()
    stay = torch.tensor(sorted(cut.keep), device=weight.device)
    columns = (stay[:, None] * area + torch.arange(area, device=weight.device)).flatten()
    flat = torch.zeros_like(weight.flatten(1))
    flat[:, columns] = regress(weight.flatten(1), gram, columns).to(flat)
    return flat.view_as(weight)

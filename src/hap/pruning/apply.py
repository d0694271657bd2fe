"""apply_: carry out a plan on a model, in place, and prove by running it that nothing else changed."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hap.execution.calling import random_example
from hap.execution.gram_regression import pointwise_fits
from hap.execution.input_checks import outside_inference
from hap.planning.plan import Plan
from hap.surgery.additions import build_implants
from hap.surgery.cut import carry_out_, cut_tensors
from hap.surgery.rotate_heads import rotated
from hap.utils.gc_pause import gc_paused
from hap.verification.verify import verify_plan


@gc_paused()
def apply_(
    model: nn.Module, plan: Plan, example: Any = None, verify: bool = True, batches: Iterable[Any] | None = None
) -> nn.Module:
    """Carry out a plan on `model` in place. Modules keep their classes and names.

    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> plan = hap.draft(hap.trace(net, torch.randn(2, 4)), {"0": [3, 7]})
    >>> hap.apply_(net, plan)[0]
    Linear(in_features=4, out_features=14, bias=True)

    Arguments: `verify` runs the result on `example` (or on random inputs like the traced ones) and compares it with the
    dense model whose removed slices are zero; if they differ, HapError is raised and `model` is left as it was.
    `batches` are the calibration inputs for implants that are fitted by least squares; without them these start at the
    kernel's centre.
    Returns: the model. Make a new optimizer afterwards: the old one's momentum has the old shapes.
    """
    plan.check_fits(model)
    if example is None and verify:
        example = random_example(plan.example, next(iter(model.parameters())).device)
    with outside_inference(model):
        with rotated(model, plan.turns, example if verify else None):
            implants = build_implants(model, plan, _fits(model, plan, batches))
            shorter = cut_tensors(model, plan)
            if verify:
                verify_plan(model, plan, implants, example, shorter)
        carry_out_(model, plan, implants, shorter)
    return model


def _fits(model: nn.Module, plan: Plan, batches: Iterable[Any] | None) -> dict[str, Tensor]:
    if batches is None or plan.implant is None or not plan.implant.needs_inputs:
        return {}
    inputs = plan.kept_inputs()
    return pointwise_fits(model, {g.module: (g.rows, inputs.get(g.weight)) for g in plan.grafts}, batches)

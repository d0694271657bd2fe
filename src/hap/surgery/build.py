"""Implants and pruned shapes, built as a plan says."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hap.groups.types import ConvGeometry
from hap.implants import ImplantModule
from hap.planning.plan import Plan
from hap.planning.steps import ImplantStep
from hap.surgery.cut import carry_out_, cut_tensors


def rebuild_(model: nn.Module, plan: Plan) -> nn.Module:
    """The shape of the pruned model, in place: implants get start values that a checkpoint is about to overwrite."""
    plan.check_fits(model)
    carry_out_(model, plan, build_implants(model, plan), cut_tensors(model, plan))
    return model


def build_implants(model: nn.Module, plan: Plan, fits: dict[str, Tensor] | None = None) -> dict[str, ImplantModule]:
    if not plan.grafts:
        return {}
    assert plan.implant is not None
    fits, built = fits or {}, {}
    modules, inputs = dict(model.named_modules()), plan.kept_inputs()
    for graft in plan.grafts:
        module = modules[graft.module]
        assert isinstance(module, nn.Conv2d)
        weight = module.weight.detach()[list(graft.rows)]
        weight = weight[:, list(inputs[graft.weight])] if graft.weight in inputs else weight
        bias = None if module.bias is None else module.bias.detach()[list(graft.rows)]
        implant = plan.implant.build(_geometry(graft, module), weight, bias, fits.get(graft.module))
        built[graft.module] = implant.to(module.weight.device, module.weight.dtype).train(module.training)
    return built


def _geometry(step: ImplantStep, conv: nn.Conv2d) -> ConvGeometry:
    """The convolution's geometry; sizes of maps are not needed to build."""
    module: Any = conv
    shape = (module.kernel_size, module.stride, module.padding, module.dilation)
    return ConvGeometry(step.module, step.weight, *shape, (0, 0), (0, 0), 1)

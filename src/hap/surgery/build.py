"""Implants and pruned shapes, built as a plan says."""

from __future__ import annotations

from torch import Tensor, nn

from hap.groups.types import ConvGeometry
from hap.implants import ImplantModule
from hap.planning.plan import Plan
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
    fits = fits or {}
    modules = dict(model.named_modules())
    inputs = plan.kept_inputs()
    built = {}
    for graft in plan.grafts:
        module = modules[graft.module]
        assert isinstance(module, nn.Conv2d)
        weight = module.weight.detach()[list(graft.rows)]
        weight = weight[:, list(inputs[graft.weight])] if graft.weight in inputs else weight
        bias = None if module.bias is None else module.bias.detach()[list(graft.rows)]
        implant = plan.implant.build(site_of(graft.module, graft.weight, module), weight, bias, fits.get(graft.module))
        built[graft.module] = implant.to(module.weight.device, module.weight.dtype).train(module.training)
    return built


def site_of(name: str, weight: str, conv: nn.Conv2d) -> ConvGeometry:
    """The convolution's geometry; sizes of maps are not needed to build."""
    assert not isinstance(conv.padding, str)
    kernel, stride, padding, dilation = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    return ConvGeometry(name, weight, kernel, stride, padding, dilation, (0, 0), (0, 0), 1)  # type: ignore[arg-type]

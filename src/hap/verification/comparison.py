"""The two models of a comparison: a pruned one, and one that has zeros in place of what was removed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.fast_copy import copy_with
from hap.execution.masked_execution import SparseWeight
from hap.execution.model_outputs import in_float64
from hap.implants import ImplantModule
from hap.planning.plan import Cut, Plan
from hap.surgery.cut import cut_tensors, shortened, update_modules_
from hap.utils.module_tree import named_tensors

REFUSED = "the pruned model does not do what the plan says, so nothing was changed"
COUNTED = "the model's forward counts on its size"
UNCOPIED = "no copy of the model can be tried"
BY_ZEROS = "the model does not run with zeros in place of some of it"
UNLIKE = "without some of it the model returns something else than with zeros there"
UNKNOWABLE = "what the model returns without some of it cannot be compared"
LARGE = 1 << 14
"""Weights with as many elements are not written out with zeros in place of what goes: see `masked_execution`."""
ALMOST_ZERO = 1e-12
"""Stands for zero in weights of which the direction counts: zeros have none."""


class Misfit(HapError):
    """A pruned model does not do what its plan says: why not, as a reason to leave units alone, and what was seen."""

    def __init__(self, message: str, why: str, seen: str):
        super().__init__(message)
        self.why, self.seen = why, seen


def in_a_line(error: BaseException) -> str:
    """The type of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


@dataclass(frozen=True)
class Comparison:
    """A pruned model, to be compared on an example with the dense model that has zeros in place of what goes.

    With `base`, a milder plan, it is compared with what that one leaves of the dense model, which runs faster.
    `shorter` holds what the plan leaves of tensors, where that is known.
    """

    model: nn.Module
    plan: Plan
    example: Any
    implants: Mapping[str, ImplantModule] = field(default_factory=dict)
    base: Plan | None = None
    shorter: dict[str, Tensor] | None = None

    @cached_property
    def cut(self) -> dict[str, Tensor]:
        """What the plan leaves of tensors, by name."""
        return cut_tensors(self.model, self.plan) if self.shorter is None else self.shorter

    def in_float64(self) -> Comparison:
        """A copy of everything in float64."""
        model, example = in_float64(self.model, self.example)
        implants = {name: copy.deepcopy(implant).double() for name, implant in self.implants.items()}
        return Comparison(model, self.plan, example, implants, self.base)

    def pruned(self) -> nn.Module:
        """A pruned copy. A forward may write to its tensors, so they share nothing with the dense model's."""
        try:
            pruned = copy_with(self.model, {name: tensor.clone() for name, tensor in self.cut.items()})
        except Exception as error:  # copying runs code of whatever the model holds
            line = in_a_line(error)
            raise Misfit(f"{REFUSED}: the model cannot be copied to try it, {line}", UNCOPIED, line) from error
        update_modules_(pruned, self.plan, copy.deepcopy(dict(self.implants)))
        return pruned

    def masked(self, skip_zeros: bool = False) -> tuple[nn.Module, dict[nn.Parameter, SparseWeight]]:
        """A copy of the dense model, or of what `base` leaves of it, with zeros where the plan cuts.

        Each implant is written out as the k x k kernel it equals. To `skip_zeros`, large weights are not written out,
        but come with the model, by the parameter that stands for each: see `masked_execution`.
        """
        tensors, cuts = named_tensors(self.model), cuts_of(self.base)
        grafted = {name for g in self.plan.grafts for name in (f"{g.module}.weight", f"{g.module}.bias")}
        masks = cuts_of(self.plan)
        changed = {n: tensors[n].detach().clone() for n in grafted if n in tensors and n not in masks}
        sparse: dict[nn.Parameter, SparseWeight] = {}
        for name, mask in masks.items():
            tensor, cut, directed = tensors[name], cuts.get(name, {}), _has_direction(name, tensors)
            large = tensor.ndim > 1 and tensor.numel() >= LARGE
            if not tensor.is_floating_point():
                changed[name] = reduce(shortened, cut.values(), tensor.detach()).clone()
                continue
            thin = sparse_weight(tensor, self.cut[name], cut, mask)
            if skip_zeros and large and isinstance(tensor, nn.Parameter) and not directed and name not in grafted:
                changed[name] = placeholder = thin.placeholder()
                sparse[placeholder] = thin
            else:
                changed[name] = thin.full(ALMOST_ZERO if directed else 0.0)
        masked = copy_with(self.model, changed)
        if self.base is not None:
            update_modules_(masked, self.base, {})
        self._write_out_implants_(masked)
        return masked, sparse

    def _write_out_implants_(self, masked: nn.Module) -> None:
        modules = dict(masked.named_modules())
        inputs: dict[str, Any] = {name: list(keep) for name, keep in self.plan.kept_inputs().items()}
        for graft in self.plan.grafts:
            weight, implant, rows = modules[graft.module].weight, self.implants[graft.module], list(graft.rows)
            assert isinstance(weight, Tensor)
            dense = weight.data.new_zeros(len(rows), *weight.shape[1:])
            dense[:, inputs.get(graft.weight, slice(None))] = implant.kernel()
            weight.data[rows] = dense
            if implant.bias_values is not None:
                modules[graft.module].bias.data[rows] = implant.bias_values.detach()


def cuts_of(plan: Plan | None) -> dict[str, dict[int, Cut]]:
    """The cuts of each tensor, by axis."""
    found: dict[str, dict[int, Cut]] = {}
    for cut in plan.cuts if plan else ():
        found.setdefault(cut.name, {})[cut.dim] = cut
    return found


def _has_direction(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a weight may be computed from this one's direction, as by either weight_norm: zeros have none."""
    return "parametrizations." in name or (name.endswith("_v") and f"{name[:-1]}g" in tensors)


def sparse_weight(tensor: Tensor, small: Tensor, cuts: dict[int, Cut], masks: dict[int, Cut]) -> SparseWeight:
    """A tensor that is cut, and zero where more of it would be cut; `small` is what is left then."""
    shape = [len(cuts[d].keep) if d in cuts else size for d, size in enumerate(tensor.shape)]
    index = {}
    for dim, mask in masks.items():
        place = torch.arange(mask.size, device=tensor.device)
        if dim in cuts:
            place[list(cuts[dim].keep)] = torch.arange(len(cuts[dim].keep), device=tensor.device)
        index[dim] = place[list(mask.keep)]
    return SparseWeight(small, tuple(shape), index)

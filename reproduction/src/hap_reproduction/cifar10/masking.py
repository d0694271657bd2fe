"""The dense shape of a pruned network: zeros where something went, and masks that keep them zero while it trains.

Training it takes the same steps as training the pruned network, since both are one function of what is left. On a GPU
it is often the faster of the two: widths stay multiples of eight, branches need no scatter, and networks pruned in
different ways share their kernels.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from hap.errors import HapError
from hap.implants import ImplantModule, Pointwise
from hap.planning.plan import Cut, Plan
from hap.pruning.apply import apply_
from hap.utils.module_tree import named_tensors


def trains_alike(plan: Plan) -> bool:
    """Whether the dense shape under masks takes the steps that the pruned network would.

    Every entry of an implant must be one entry of the kernel it equals, which holds for 1x1 implants but not for
    products of factors. A norm that averages over what went sees zeros in the dense shape, and a weight that is
    computed from others cannot be held at zero.
    """
    plain = not any("parametrizations." in cut.name for cut in plan.cuts)
    return plan.exact and plain and (plan.implant is None or isinstance(plan.implant, Pointwise))


def dense_form(pruned: nn.Module, plan: Plan, dense: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of `dense`, the network before the plan was carried out, that computes what `pruned` does, and its masks:
    by name of a parameter, ones for what is left of it and zeros for what is not.

    Only the shapes of `dense` count. Parameters of which everything is left have no mask.
    """
    if not trains_alike(plan):
        raise HapError(
            f"implants are {type(plan.implant).__name__} and zeros in place of what goes "
            f"{'are' if plan.exact else 'are not'} the same function: expected 1x1 implants or none, norms that see "
            "each unit apart and weights that are not computed from others. Train the pruned network itself"
        )
    made, ones = copy.deepcopy(dense), copy.deepcopy(pruned)
    with torch.no_grad():
        for parameter in ones.parameters():
            parameter.fill_(1)
        tensors = named_tensors(made)
        for name, tensor in spread(pruned, plan, made).items():
            tensors[name].copy_(tensor)
        left = spread(ones, plan, made)
    return made, {name: left[name] for name, _ in made.named_parameters() if name in left and not left[name].all()}


def pruned_form(model: nn.Module, plan: Plan, example: object = None) -> nn.Module:
    """The pruned network of one that was trained in the dense shape, as a copy checked by running it.

    What implants have learnt stands at the centres of their kernels. Raises HapError if anything but zeros would go.
    """
    if not trains_alike(plan):
        raise HapError("this plan does not leave a network that trains alike in its dense shape; see hap.masking")
    centred = replace(plan.implant, init="center") if isinstance(plan.implant, Pointwise) else None
    pruned = apply_(copy.deepcopy(model), replace(plan, implant=centred), example)
    back, parameters = spread(pruned, plan, model), dict(model.named_parameters())
    for name in back.keys() & parameters.keys():
        if not torch.equal(back[name], parameters[name]):
            raise HapError(
                f"{name} is not zero everywhere the plan removes it: was the network trained without the masks of "
                "dense_form?"
            )
    return pruned


@torch.no_grad()
def spread(pruned: nn.Module, plan: Plan, dense: nn.Module) -> dict[str, Tensor]:
    """The tensors of a pruned network at their places in those of the dense one, with zeros elsewhere."""
    places, found = named_tensors(dense), named_tensors(pruned)
    cuts: dict[int, list[Cut]] = {}  # by tensor, which may have several names
    for cut in plan.cuts:
        cuts.setdefault(id(places[cut.name]), []).append(cut)
    spread = {}
    for name, place in places.items():
        if place.is_floating_point() or id(place) not in cuts:
            spread[name] = _embedded(found[name].detach(), cuts.get(id(place), []))
    modules, inputs = dict(pruned.named_modules()), plan.kept_inputs()
    for graft in plan.grafts:
        implant = modules[graft.module].implant
        assert isinstance(implant, ImplantModule)
        rows, weight = list(graft.rows), spread[graft.weight]
        kernel = torch.zeros_like(weight[rows])
        kernel[:, list(inputs.get(graft.weight, range(weight.shape[1])))] = implant.kernel()
        weight[rows] = kernel
        if implant.bias_values is not None:
            spread[f"{graft.module}.bias".removeprefix(".")][rows] = implant.bias_values
    return spread


def _embedded(tensor: Tensor, cuts: list[Cut]) -> Tensor:
    """A new tensor in which each axis has its length before the cuts."""
    tensor = tensor.clone()
    for cut in cuts:
        shape = [*tensor.shape[: cut.dim], cut.size, *tensor.shape[cut.dim + 1 :]]
        tensor = tensor.new_zeros(shape).index_copy(cut.dim, torch.tensor(cut.keep, device=tensor.device), tensor)
    return tensor

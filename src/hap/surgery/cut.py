"""Cut the tensors of a model as a plan says, and make all else follow: attributes, implants, what stands around."""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from hap.execution.calling import forgetting_caches
from hap.execution.fast_copy import deepcopied
from hap.implants import ImplantModule
from hap.planning.plan import Cut, Plan
from hap.surgery.additions import attach_implant, attach_input_selection, attach_output_scatter, build_implants
from hap.surgery.multihead_attention import FewerHeads
from hap.utils.module_tree import named_tensors


def rebuild_(model: nn.Module, plan: Plan) -> nn.Module:
    """The shape of the pruned model, in place: implants get start values that a checkpoint is about to overwrite."""
    plan.check_fits(model)
    carry_out_(model, plan, build_implants(model, plan), cut_tensors(model, plan))
    return model


def cut_tensors(model: nn.Module, plan: Plan, names: Set[str] | None = None) -> dict[str, Tensor]:
    """What the plan leaves of the tensors that it cuts, or of those with these names."""
    tensors, shorter = named_tensors(model), dict[str, Tensor]()
    for cut in plan.cuts:
        if names is None or cut.name in names:
            shorter[cut.name] = shortened(shorter.get(cut.name, tensors[cut.name].detach()), cut)
    return shorter


def carry_out_(model: nn.Module, plan: Plan, implants: dict[str, ImplantModule], shorter: dict[str, Tensor]) -> None:
    tensors = named_tensors(model)
    with forgetting_caches(model):
        with torch.no_grad():
            for name, tensor in shorter.items():
                _replace_data(tensors[name], tensor)
        update_modules_(model, plan, implants)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()  # the list of its weights, which cuDNN wants side by side in memory


def update_modules_(model: nn.Module, plan: Plan, implants: dict[str, ImplantModule]) -> None:
    """Everything but the tensors, which are cut already: attributes, implants and what stands around modules."""
    modules, tensors = dict(model.named_modules(remove_duplicate=False)), named_tensors(model)
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)
    touched: dict[str, dict[str, list[int]]] = {}
    for cut in plan.cuts:
        for alias in aliases[id(tensors[cut.name])]:
            owner, leaf = _owner(modules, alias, tensors[cut.name])
            shape = touched.setdefault(owner, {}).setdefault(leaf, list(tensors[cut.name].shape))
            shape[cut.dim] = cut.size
    for owner, before in touched.items():
        _sync(modules[owner], before)
    for resize in plan.resizes:
        old = vars(modules[resize.module])[resize.attribute]
        setattr(modules[resize.module], resize.attribute, with_entry(old, resize.entry, resize.value))
    for graft in plan.grafts:
        attach_implant(modules[graft.module], implants[graft.module], graft)
    for widen in plan.widenings:
        attach_output_scatter(modules, widen)
    for narrow in plan.narrowings:
        attach_input_selection(modules, narrow)


def with_entry(old: Any, entry: int, value: Any) -> Any:
    """The value in place of the old one; of several in a tuple or list, in place of the one at `entry`."""
    if not isinstance(old, tuple | list):
        return value
    items = [*old[:entry], value, *old[entry + 1 :]]
    return old._make(items) if hasattr(old, "_make") else type(old)(items)  # that of a namedtuple takes them one by one


def _owner(modules: dict[str, nn.Module], name: str, tensor: Tensor) -> tuple[str, str]:
    """The module that a tensor belongs to and its name there, also where that is computed from it."""
    owner, _, leaf = name.rpartition(".")
    layer, found, parametrized = owner.rpartition("parametrizations.")
    for ending in ("_orig", "_v"):  # torch.nn.utils.prune and weight_norm compute from it what the module holds
        made = leaf.removesuffix(ending)
        if made != leaf and isinstance(vars(modules[owner]).get(made), Tensor):
            setattr(modules[owner], made, tensor.detach())  # of the right shape, until the next forward
            return owner, made
    own = found and "." not in parametrized  # and not of one of the modules that compute it
    if own and getattr(modules[layer.rstrip(".")], parametrized).shape == tensor.shape:
        return layer.rstrip("."), parametrized
    return owner, leaf


def _replace_data(tensor: Tensor, shorter: Tensor) -> None:
    """Through .data, so that modules that share the parameter go on sharing it."""
    if tensor.requires_grad:  # a graph still alive holds a gradient accumulator of the old shape; a new type drops it
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = shorter
    tensor.grad = None


def shortened(tensor: Tensor, cut: Cut) -> Tensor:
    """What a cut leaves of a tensor, which stays channels-last if it is nothing else."""
    last = tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    index = torch.tensor(cut.keep, dtype=torch.int64, device=tensor.device)
    layout = torch.channels_last if last else torch.contiguous_format
    return tensor.index_select(cut.dim, index).contiguous(memory_format=layout)


def masked_copy(dense: nn.Module, pruned: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the dense model with the values of the pruned one, and zeros for what went. It computes what the pruned
    model does, unless a norm averages over what went (`Plan.masks`)."""
    made = deepcopied(dense, {})
    values, tensors, cuts = named_tensors(pruned), named_tensors(made), dict[int, list[Cut]]()
    for cut in plan.cuts:  # by one of the names of a tensor
        cuts.setdefault(id(tensors[cut.name]), []).append(cut)
    for name, tensor in tensors.items():
        value = values[name].detach()
        for cut in reversed(cuts.get(id(tensor), [])):
            value = _lengthened(value, cut)
        tensor.data.copy_(value)
    return made


def _lengthened(tensor: Tensor, cut: Cut) -> Tensor:
    """A tensor with zeros at the indices that a cut took away."""
    shape = list(tensor.shape)
    shape[cut.dim] = cut.size
    index = torch.tensor(cut.keep, dtype=torch.int64, device=tensor.device)
    return tensor.new_zeros(shape).index_copy_(cut.dim, index, tensor)


# ---- attributes follow the tensors --------------------------------------------------------------------------


def _sync(module: nn.Module, before: dict[str, list[int]]) -> None:
    """Make a module's integers agree with its tensors again. `before` holds the old shapes of those that were cut."""
    if isinstance(module, _ConvNd):
        _sync_convolution(module, before.get("weight", list(module.weight.shape)))
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _NormBase):
        vectors = (module.weight, module.bias, module.running_mean)
        module.num_features = next(len(v) for v in vectors if v is not None)
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = len(module.weight)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.MultiheadAttention):
        FewerHeads.take_over(module)
    elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
        ending = "" if isinstance(module, nn.RNNCellBase) else "_l0"
        module.input_size = getattr(module, f"weight_ih{ending}").shape[1]
        module.hidden_size = getattr(module, f"weight_hh{ending}").shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.num_embeddings, module.embedding_dim = module.weight.shape


def _sync_convolution(module: _ConvNd, before: list[int]) -> None:
    weight = module.weight
    if module.groups > 1 and (module.transposed or module.groups >= before[1]):  # whole groups went: rules._tie_groups
        module.groups = module.groups * weight.shape[0] // before[0]
    first, second = weight.shape[0], weight.shape[1] * module.groups
    module.in_channels, module.out_channels = (first, second) if module.transposed else (second, first)

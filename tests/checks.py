"""Invariants shared by the tests, written without the code that they check.

`reference` is the dense model with removed units silenced by hooks: what reads a dead class has zeros in its input
slices, and a branch of a stream returns zeros in its dead channels. Nothing here looks at `plan.cuts`.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

import hap
from cases import CASES
from hap.graph.capture import Captured, capture
from hap.groups.groups import Groups
from hap.planning.cost import CostModel
from hap.tracing.trace import trace_captured
from hap.utils.gc_pause import gc_paused

COUPLINGS = ("joint", "union")
# Cases whose groups differ between the couplings. All others have the same in both, as test_trace.py shows, so that
# what holds in one coupling holds in the other.
UNLIKE_IN_UNION = """
inplace_functional residual preactivation bottleneck residual_on_input subtraction_and_pools zero_padded_shortcut
grouped_branch_on_sum two_grouped_branches_on_sum one_producer_two_sums depthwise_of_input_on_sum
residual_with_branches scaled_residual same_tensor_concatenated inverted_residual channel_shuffle squeeze_excite
shared_module_on_sums tied_parameters tied_on_two_sums spatial_parameters unet_upsampled convnext_block two_inputs
""".split()


def traces(names: Iterable[str]) -> list[tuple[str, str]]:
    """These cases in joint coupling, and in union coupling those that differ there."""
    return [
        (name, coupling) for coupling in COUPLINGS for name in names if coupling == "joint" or name in UNLIKE_IN_UNION
    ]


TRACES = traces(CASES)


@cache
def _captured(name: str) -> tuple[nn.Module, Any, Captured]:
    """A case with what torch.export captures of it, which takes longer than all else of a trace."""
    model, example = CASES[name]()
    return model, example, capture(model, example)


@cache
def traced(name: str, coupling: str) -> Groups:
    """hap.trace of a case, which is captured once for both couplings."""
    model, example, captured = _captured(name)
    with gc_paused():
        return trace_captured(captured, model, example, coupling, (), stream=True)


def copied(model: nn.Module) -> nn.Module:
    """What copy.deepcopy returns, in half of its time: the rest goes into dicts of hooks that are empty."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    return copy.deepcopy(model, {id(x): type(x)() for x in attributes if type(x) in (dict, OrderedDict, set) and not x})


def run(model: nn.Module, example: Any) -> list[Any]:
    """All values that the model returns, flat, in eval mode."""
    model = model.eval()
    with torch.no_grad():
        if isinstance(example, dict):
            out = model(**example)
        else:
            out = model(*example) if isinstance(example, tuple) else model(example)
    return pytree.tree_leaves(out)


def gap(a: list[Any], b: list[Any]) -> float:
    """The largest difference, relative to the outputs' size where that exceeds one."""
    assert len(a) == len(b)
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        if x.numel():
            worst = max(worst, float((x - y).abs().max()) / max(1.0, float(x.abs().max())))
    return worst


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the independent masked reference -----------------------------------------------------------------------


def alive(groups: Groups, removed: Mapping[str, Sequence[int]]) -> set[int]:
    """Classes that are left: units that were not removed, and streams that at least one of these feeds."""
    left = {0}
    for name, group in groups.items():
        gone = set(removed[name])
        left |= {int(c) for u, c in enumerate(group.classes) if u not in gone}
    for _ in groups.rewiring.output_scatters:
        for scatter in groups.rewiring.output_scatters:
            pairs = zip(scatter.narrow.tolist(), scatter.wide.tolist(), strict=True)
            left |= {w for n, w in pairs if n in left}
    return left


def reference(model: nn.Module, groups: Groups, plan: hap.Plan, pruned: nn.Module, example: Any) -> list[Any]:
    """What the pruned model should return. `pruned` only lends its implants, which are run as they are."""
    dense, left = copied(model), alive(groups, plan.removed)
    tensors = dict(dense.named_parameters(remove_duplicate=False)) | dict(dense.named_buffers(remove_duplicate=False))
    modules, grown = dict(dense.named_modules()), dict(pruned.named_modules())
    readers = {key for group in groups.values() for key in group.consumers} | _own_readers(groups)
    with torch.no_grad():
        for weight, dim in readers:
            dead = [i for i, c in enumerate(groups.axes[weight, dim].tolist()) if c not in left]
            tensors[weight].data.index_fill_(dim, torch.tensor(dead, dtype=torch.int64), 0)
        for key, dead in _multiplied(groups, left).items():
            tensors[key[0]].data.index_fill_(key[1], dead, 0)
    keep = {c.name: list(c.keep) for c in plan.cuts if c.dim == 1}
    for graft in plan.grafts:
        inputs = keep.get(graft.weight, slice(None))
        modules[graft.module].register_forward_hook(_grafted(list(graft.rows), inputs, grown[graft.module].implant))
    for scatter in groups.rewiring.output_scatters:
        dead = [i for i, c in enumerate(scatter.narrow.tolist()) if c not in left]
        modules[scatter.module].register_forward_hook(_silenced(dead, scatter.dim))
    return run(dense, example)


def _own_readers(groups: Groups) -> set[tuple[str, int]]:
    """Axes of weights that are used several times: the axis that computes units once may read them elsewhere."""
    uses = Counter(term.weight for term in groups.costs.weight_macs)
    return {(p.weight, p.dim) for g in groups.values() for p in g.producers if uses[p.weight] > 1}


def _multiplied(groups: Groups, left: set[int]) -> dict[tuple[str, int], Tensor]:
    """Dead indices that meet other activations in a product, where they are computed: no weight reads a query."""
    gone = {int(c) for product in groups.costs.activation_macs for c in product.classes} - left
    axes = {key: [i for i, c in enumerate(classes.tolist()) if c in gone] for key, classes in groups.axes.items()}
    return {key: torch.tensor(dead) for key, dead in axes.items() if dead}


def _grafted(rows: list[int], inputs: Any, implant: nn.Module) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, rows] = implant(args[0][:, inputs])
        return output

    return hook


def _silenced(dead: list[int], dim: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.index_fill(dim, torch.tensor(dead, dtype=torch.int64), 0)

    return hook


# ---- plans --------------------------------------------------------------------------------------------------


def implantable(groups: Groups) -> dict[str, list[int]]:
    """Units with at least one producer larger than 1x1, all of which are plain convolutions called once."""
    found = {}
    for name, group in groups.items():
        large = [p for p in group.producers if int(np.prod(groups.shapes[p.weight][2:])) > 1]
        able = [set(p.unit[p.unit >= 0].tolist()) for p in large if p.weight in groups.conv_geometry]
        unable = [set(p.unit[p.unit >= 0].tolist()) for p in large if p.weight not in groups.conv_geometry]
        found[name] = sorted(set().union(*able) - set().union(*unable))
    return found


def random_plan(groups: Groups, seed: int, share: float = 0.5, implant: hap.Implant | None = None) -> hap.Plan:
    """Every unit goes with probability `share`, but something of each layer stays; half of it may be implanted."""
    draw = np.random.default_rng(seed)
    removed, implanted = {}, {}
    able = implantable(groups)
    for name, group in groups.items():
        stays = {draw.choice(p.unit[p.unit >= 0]) for p in group.producers}
        out = [u for u in np.flatnonzero(draw.random(len(group)) < share).tolist() if u not in stays]
        take = [u for u in out if u in able[name] and draw.random() < 0.5] if implant is not None else []
        removed[name], implanted[name] = [u for u in out if u not in take], take
    _put_back(groups, removed)
    return hap.draft(groups, removed, implanted, implant)


def _put_back(groups: Groups, removed: dict[str, list[int]]) -> None:
    """Keep a unit of every axis, and of all that an attribute counts, of which nothing would be left."""
    for classes in groups.spans():
        if not alive(groups, removed) & set(classes.tolist()):
            sources = {int(n) for n, w in groups.feeds.tolist() if w in classes} | set(classes.tolist())
            name, unit = next((n, u) for n, out in removed.items() for u in out if groups[n].classes[u] in sources)
            removed[name].remove(unit)


def random_scores(groups: Groups, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.rand(len(g), generator=generator) for n, g in groups.items()}


def reachable(groups: Groups, kind: str, fractions: Iterable[float]) -> list[float]:
    """Those fractions that the removal of all but one unit per group would meet."""
    least = hap.draft(groups, {n: range(1, len(g)) for n, g in groups.items() if len(g) > 1})
    field = {"flops": "macs"}.get(kind, kind)
    bottom = getattr(least.after, field) / max(getattr(least.before, field), 1)
    return [f for f in fractions if f > bottom + 0.05 * (1 - bottom)]


# ---- what must hold -----------------------------------------------------------------------------------------


def check_pruned(
    model: nn.Module, groups: Groups, plan: hap.Plan, example: Any, tolerance: float = 1e-10, verify: bool = True
) -> nn.Module:
    """Promises 1 and 2 on one plan: pruned = masked, planned = counted, attributes true. Returns the pruned copy."""
    pruned = hap.apply_(copied(model), plan, example=example, verify=verify)
    seen = check_attributes(pruned, example)
    wanted = reference(model, groups, plan, pruned, example)
    if plan.exact:
        assert gap(wanted, seen) <= tolerance
    else:
        assert [x.shape for x in wanted] == [x.shape for x in seen]
    check_cost(pruned, plan.after, example)
    return pruned


def check_cost(model: nn.Module, planned: Any, example: Any) -> None:
    counted = hap.cost(model, example)
    assert (planned.params, planned.macs) == (counted.params, counted.macs)
    assert counted.params == sum(p.numel() for p in model.parameters())


def check_attributes(model: nn.Module, example: Any) -> list[Any]:
    """The integers of every module agree with its tensors, and with what really flows in. Returns the outputs."""
    hooks = [m.register_forward_pre_hook(_check_input) for m in model.modules()]
    outputs = run(model, example)
    for hook in hooks:
        hook.remove()
    for name, module in model.named_modules():
        if isinstance(module, _ConvNd):
            ends = (module.in_channels, module.out_channels // module.groups)
            ends = ends if module.transposed else (module.out_channels, module.in_channels // module.groups)
            assert tuple(module.weight.shape[:2]) == ends, name
            assert module.in_channels % module.groups == module.out_channels % module.groups == 0, name
            assert module.bias is None or len(module.bias) == module.out_channels, name
        elif isinstance(module, nn.Linear):
            assert tuple(module.weight.shape) == (module.out_features, module.in_features), name
            assert module.bias is None or len(module.bias) == module.out_features, name
        elif isinstance(module, nn.RNNBase):
            flat = zip(module._flat_weights_names, module._flat_weights, strict=True)
            assert all(weight is getattr(module, own) for own, weight in flat), name
            assert module.weight_ih_l0.shape[1] == module.input_size, name
            assert module.weight_hh_l0.shape[1] == module.hidden_size, name
        elif isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | nn.PReLU):
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            size = _norm_size(module)
            assert all(tuple(t.shape) == size for t in tensors if t.ndim), name
    return outputs


def _norm_size(module: Any) -> tuple[int, ...]:
    if isinstance(module, nn.GroupNorm):
        assert module.num_channels % module.num_groups == 0
        return (module.num_channels,)
    if isinstance(module, nn.PReLU):
        return (module.num_parameters,)
    return (module.num_features,) if isinstance(module, _NormBase) else tuple(module.normalized_shape)


def _check_input(module: nn.Module, args: Any) -> None:
    if isinstance(module, _ConvNd):
        assert args[0].shape[-len(module.kernel_size) - 1] == module.in_channels
    elif isinstance(module, nn.Linear):
        assert args[0].shape[-1] == module.in_features
    elif isinstance(module, _NormBase):
        assert args[0].shape[1] == module.num_features
    elif isinstance(module, nn.GroupNorm):
        assert args[0].shape[1] == module.num_channels
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        assert tuple(args[0].shape[-len(module.normalized_shape) :]) == tuple(module.normalized_shape)


def check_tight(groups: Groups, plan: hap.Plan, budget: hap.Budget) -> None:
    """Promise 2: the budget is met, and keeping any one unit more would not meet it."""
    target = np.array(list(budget.given.values())) * budget.of(plan.before)
    assert (budget.of(plan.after) <= target * (1 + 1e-12)).all()
    groups = groups if plan.implant is None else plan.implant.prepared(groups)
    cost, kept, implanted = CostModel(groups, plan.implant), groups.all_kept(), np.zeros(groups.classes, dtype=bool)
    for name, group in groups.items():
        kept[group.classes[plan.removed[name]]] = False
        implanted[group.classes[plan.implanted[name]]] = True
    assert cost(kept, implanted) == plan.after
    for name, group in groups.items():
        for unit in plan.removed[name] + plan.implanted[name]:
            one = np.arange(groups.classes) == group.classes[unit]
            more = cost(kept | one, implanted & ~one)
            assert (budget.of(more) > target).any(), f"{name}[{unit}] would still fit"


# ---- bit for bit --------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a pure function may not change."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {n: (id(t), t._version, t.detach().clone()) for n, t in tensors},
        "grads": {n: None if t.grad is None else t.grad.clone() for n, t in tensors},
        "requires": {n: t.requires_grad for n, t in tensors},
        "modes": {n: m.training for n, m in model.named_modules()},
        "classes": {n: type(m) for n, m in model.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()},
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for key in ("requires", "modes", "classes", "hooks"):
        assert after[key] == before[key], key
    assert after["tensors"].keys() == before["tensors"].keys()
    for name, (identity, version, value) in after["tensors"].items():
        old_identity, old_version, old = before["tensors"][name]
        assert identity == old_identity and version == old_version, name
        assert torch.equal(value, old), name
        a, b = after["grads"][name], before["grads"][name]
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name

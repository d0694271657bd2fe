"""Slow truths: full Hessians and per-sample loops, straight from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hap.groups.groups import Groups
from hap.groups.types import Group, OutputScatter

Batches = list[tuple[Any, Any]]
Loss = Callable[[Any, Any], Tensor]


def producers(groups: Groups) -> list[str]:
    return list(dict.fromkeys(p.weight for g in groups.values() for p in g.producers))


def mean_loss(model: nn.Module, batches: Batches, loss: Loss) -> Callable[[dict[str, Tensor]], Tensor]:
    """The loss averaged over all samples, as a function of some weights."""
    total = sum(len(y) for _, y in batches)

    def function(weights: dict[str, Tensor]) -> Tensor:
        parts = [len(y) / total * loss(torch.func.functional_call(model, weights, (x,)), y) for x, y in batches]
        return torch.stack(parts).sum()

    return function


def weights_of(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {n: parameters[n].detach().clone() for n in names}


def full_hessian(model: nn.Module, names: list[str], batches: Batches, loss: Loss) -> Tensor:
    """The Hessian in all of these weights, flattened one after the other."""
    weights = weights_of(model, names)
    sizes = [weights[n].numel() for n in names]
    function = mean_loss(model, batches, loss)

    def flat(vector: Tensor) -> Tensor:
        return function({n: v.view_as(weights[n]) for n, v in zip(names, vector.split(sizes), strict=True)})

    return torch.func.hessian(flat)(torch.cat([weights[n].flatten() for n in names])).detach()


def diagonals(model: nn.Module, names: list[str], batches: Batches, loss: Loss) -> dict[str, Tensor]:
    """The diagonal of the Hessian, shaped like each weight; one weight at a time, to stay small."""
    weights = weights_of(model, names)
    found = {}
    for name in names:
        square = full_hessian(model, [name], batches, loss)
        found[name] = square.diagonal().view_as(weights[name]).clone()
    return found


def by_unit(groups: Groups, name: str, values: dict[str, Tensor], formula: Callable[[Tensor], Tensor]) -> Tensor:
    """For each unit: the sum over producers of formula(this unit's slices of `values`)."""
    group = groups[name]
    out = torch.zeros(len(group), dtype=torch.float64)
    for producer in group.producers:
        rows = values[producer.weight].detach().double().movedim(producer.dim, 0)
        for unit in range(len(group)):
            index = [i for i, u in enumerate(producer.unit.tolist()) if u == unit]
            if index:
                out[unit] += formula(rows[index])
    return out


def equation6(groups: Groups, model: nn.Module, diagonal: dict[str, Tensor]) -> dict[str, Tensor]:
    """trace(H_pp) / (2 |p|) * ||w_p||^2, summed over the producers of a unit."""
    weights = weights_of(model, list(diagonal))
    pairs = {n: torch.stack([diagonal[n], weights[n]], dim=-1) for n in diagonal}

    def formula(slices: Tensor) -> Tensor:
        trace, square = slices[..., 0].sum(), slices[..., 1].square().sum()
        return trace / (2 * slices[..., 0].numel()) * square

    return {name: by_unit(groups, name, pairs, formula) for name in groups}


def obd(groups: Groups, model: nn.Module, diagonal: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = weights_of(model, list(diagonal))
    terms = {n: diagonal[n] * weights[n].square() / 2 for n in diagonal}
    return {name: by_unit(groups, name, terms, torch.sum) for name in groups}


def gradient(model: nn.Module, names: list[str], batches: Batches, loss: Loss) -> dict[str, Tensor]:
    return torch.func.grad(mean_loss(model, batches, loss))(weights_of(model, names))


def fisher(groups: Groups, model: nn.Module, batches: Batches, loss: Loss) -> dict[str, Tensor]:
    """1/2 sum E[g^2] w^2, one sample at a time."""
    names = producers(groups)
    weights = weights_of(model, names)
    squares = {n: torch.zeros_like(w) for n, w in weights.items()}
    samples = [(x[i : i + 1], y[i : i + 1]) for x, y in batches for i in range(len(y))]
    for sample in samples:
        for name, value in gradient(model, names, [sample], loss).items():
            squares[name] += value.square() / len(samples)
    terms = {n: squares[n] * weights[n].square() / 2 for n in names}
    return {name: by_unit(groups, name, terms, torch.sum) for name in groups}


def gate_curvature(model: nn.Module, groups: Groups, batches: Batches, loss: Loss) -> dict[str, Tensor]:
    """1/2 J^T B J for a factor on each unit: on the slices of weights that read it, and, where it joins a stream that
    others join, on what the module that is scattered there returns. J and B are whole Jacobians and Hessians. That
    these are the places at which a unit passes is for tests with pruned networks to show."""
    weights = {n: p.detach() for n, p in model.named_parameters()}
    modules, total = dict(model.named_modules()), sum(len(y) for _, y in batches)
    alone = {int(s): int(c) for c, s in groups.feeds if np.sum(groups.feeds[:, 1] == s) == 1}
    found = {}
    for name, group in groups.items():
        joined = [
            s
            for s in groups.rewiring.output_scatters
            if np.isin(s.narrow, group.classes).any() and not set(s.wide) <= set(alone)
        ]

        def outputs(gates: Tensor, x: Tensor, group: Group = group, joined: list[OutputScatter] = joined) -> Tensor:
            by_class = {int(c): g for c, g in zip(group.classes, gates, strict=True)}

            def factors(classes: Any) -> Tensor:
                return torch.stack([by_class.get(int(c), gates.new_ones(())) for c in classes])

            scaled = dict(weights)
            for weight, dim in group.consumers:
                wide = [-1 if d == dim else 1 for d in range(weights[weight].ndim)]
                scaled[weight] = scaled[weight] * factors(
                    [alone.get(int(c), c) for c in groups.axes[weight, dim]]
                ).view(wide)
            hooks = []
            for s in joined:

                def scale(module: nn.Module, args: Any, out: Tensor, s: OutputScatter = s) -> Tensor:
                    return out * factors(s.narrow).view([-1 if d == s.dim else 1 for d in range(out.ndim)])

                hooks.append(modules[s.module].register_forward_hook(scale))
            try:
                return torch.func.functional_call(model, scaled, (x,))
            finally:
                for hook in hooks:
                    hook.remove()

        one = torch.ones(len(group), dtype=torch.float64)
        found[name] = torch.zeros(len(group), dtype=torch.float64)
        for x, y in batches:
            jacobian = torch.func.jacrev(outputs)(one, x)
            curvature = torch.func.hessian(lambda o, y=y: loss(o, y))(outputs(one, x))
            found[name] += len(y) / total / 2 * torch.einsum("abu,abcd,cdu->u", jacobian, curvature, jacobian).detach()
    return found

"""The tensors of a layer, with the batch normalisation behind it, as one affine map: read, and written."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from hap.graph.nodes import arguments, shape_of
from hap.refit.flow import Layer, bias_name, channel_axis
from hap.refit.graph_run import Graph
from hap.refit.ridge_regression import Affine, Moments
from hap.refit.rows import LinearMap, at, by_axis

LEAST_SCALE = 1e-6
"""A normalisation that scales a channel by less is taken as one that scales by so much: it can be undone then."""


class LayerParameters:
    """What a layer's tensors are: `read` gives the map that they make, `write` sets them to another one.

    A norm by itself is a map for each channel, from the normalised value.
    """

    def __init__(self, layer: Layer, graph: Graph):
        self.layer, self.graph = layer, graph
        self.map = None if layer.is_norm else LinearMap(layer.node)
        self.weight = graph.tensors[layer.weight]
        bias = graph.parameters.get(arguments(layer.node).get(bias_name(layer.node)))
        self.bias = None if bias is None else graph.tensors[bias]
        self.norm = None if layer.way.norm is None else _Norm(layer.way.norm, layer.way.places, graph)

    @property
    def centred(self) -> bool:
        """Whether there is something to add to the result."""
        return self.bias is not None or self.norm is not None

    def rows(self, layer: Layer, value: Callable[[fx.Node], Any], positions: Tensor) -> Tensor:
        """(groups, positions, inputs): what the map reads at these positions of its result."""
        if self.map is not None:
            places = by_axis(positions, shape_of(layer.node), channel_axis(layer.node))
            rows = self.map.rows(value(layer.input), tuple(self.weight.shape[2:]), places)
        else:
            rows = at(self._normalised(layer.node, value), layer.way.axis, positions).t()[:, :, None]
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def _normalised(self, node: fx.Node, value: Callable[[fx.Node], Any]) -> Tensor:
        """What a norm returns without its own weight and bias."""
        given = {name: value(x) if isinstance(x, fx.Node) else x for name, x in arguments(node).items()}
        own = {name: None for name in ("weight", "bias") if name in given}
        normalised: Tensor = cast(Any, node.target)(**(given | own))
        return normalised

    def read(self) -> Affine:
        weight = self.weight.detach().double()
        matrices = weight[:, None, None] if self.map is None else self.map.matrices(weight)
        rows = matrices.shape[:2].numel()
        bias = weight.new_zeros(rows) if self.bias is None else self.bias.detach().double()
        if self.norm is not None:
            scale, shift = self.norm.affine()
            matrices, bias = matrices * scale.view(*matrices.shape[:2], 1), bias * scale + shift
        return Affine(matrices, bias.view(matrices.shape[:2]))

    def write(self, new: Affine, moments: Moments) -> None:
        """Set the tensors to this map. The batch normalisation gets the statistics that `moments` imply."""
        matrices, bias = new.weight, new.bias.flatten()
        if self.norm is not None:
            scale, _ = self.norm.affine()
            matrices = matrices / scale.view(*matrices.shape[:2], 1)
            own = torch.zeros_like(bias) if self.bias is None else self.bias.detach().double()
            mean, variance = moments.of_results(Affine(matrices, own.view(matrices.shape[:2])))
            self.norm.write(scale, bias + scale * (mean - own), mean, variance)
        elif self.bias is not None:
            self.bias.data.copy_(bias)
        values = matrices.flatten() if self.map is None else self.map.weight(matrices, self.weight)
        self.weight.data.copy_(values)


class _Norm:
    """A batch normalisation in eval mode, on the channels that one layer computes."""

    def __init__(self, node: fx.Node, places: Tensor, graph: Graph):
        given = arguments(node)
        self.places, self.eps = places, float(given["eps"])
        names = ("weight", "bias", "running_mean", "running_var")
        self.tensors = {name: graph.tensors[graph.parameters[given[name]]] for name in names}

    def affine(self) -> tuple[Tensor, Tensor]:
        """What it multiplies each channel by, and what it adds."""
        weight, bias, mean, variance = (t.detach().double()[self.places] for t in self.tensors.values())
        scale = weight * (variance + self.eps).rsqrt()
        least = torch.full_like(scale, LEAST_SCALE).copysign(scale)
        return torch.where(scale.abs() < LEAST_SCALE, least, scale), bias - scale * mean

    def write(self, scale: Tensor, mean_result: Tensor, mean: Tensor, variance: Tensor) -> None:
        """This scale and mean of the results, where what is normalised has this mean and variance."""
        values = (scale * (variance + self.eps).sqrt(), mean_result, mean, variance)
        for tensor, value in zip(self.tensors.values(), values, strict=True):
            tensor.data[self.places] = value.to(tensor)

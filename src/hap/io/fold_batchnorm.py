"""Folding: a BatchNorm in eval mode is a scale and a shift per channel, which the convolution before it can take on."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

aten = torch.ops.aten
_CONVOLUTIONS = [
    getattr(conv, name) for conv in (aten.conv1d, aten.conv2d, aten.conv3d) for name in ("default", "padding")
]
_TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def has_nothing_to_fold(program: ExportedProgram) -> bool:
    """Whether a program has no BatchNorm, and its tensors are parameters and buffers that it reads, each once.

    Constants are made buffers by a second capture, which then move to another device with the rest.
    """
    norms = program.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    unread = [node for node in program.graph.find_nodes(op="placeholder") if not node.users]
    tensors = list(program.state_dict.values())
    if norms or unread or program.graph_signature.lifted_tensor_constants:
        return False
    strided = all(tensor.layout is torch.strided for tensor in tensors)
    return strided and len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def fold_batchnorms(module: fx.GraphModule) -> fx.GraphModule:
    """The graph of a torch.export program without the BatchNorms whose scale and shift what is before them can take.

    That is a convolution, a linear layer, or several of them side by side (an implant beside its convolution), if
    nothing else reads its output. Weights are copied, so those of the model stay as they are.
    """
    for norm in list(module.graph.find_nodes(op="call_function", target=aten.batch_norm.default)):
        source, weight, bias, mean, variance, training, _, eps, _ = norm.args
        if training or mean is None:
            continue
        mean, variance = (_tensor(module, node).double() for node in (mean, variance))
        layers = _layers_before(source, module, torch.arange(len(mean), device=mean.device))
        if layers is None:
            continue
        scale = torch.rsqrt(variance + eps) * (1 if weight is None else _tensor(module, weight).double())
        shift = (0 if bias is None else _tensor(module, bias).double()) - mean * scale
        for layer, channels in layers:
            _absorb(layer, module, scale[channels], shift[channels])
        norm.replace_all_uses_with(source)
        module.graph.erase_node(norm)
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, module.graph)  # takes along only the tensors that are still read


def _layers_before(node: fx.Node, module: fx.GraphModule, channels: Tensor) -> list[tuple[fx.Node, Tensor]] | None:
    """The layers that compute these channels for a BatchNorm, each with its own; None if anything else sees them."""
    args: Any = node.args
    if len(node.users) != 1:
        return None
    flat = node.target is aten.linear.default and node.meta["val"].ndim == 2
    if flat or node.target in _CONVOLUTIONS or node.target in _TRANSPOSED:
        return [(node, channels)] if _constant(args[1]) else None
    if node.target is aten.cat.default and args[1:] == (1,) and len(set(args[0])) == len(args[0]):
        shares = channels.split([part.meta["val"].shape[1] for part in args[0]])
        found = [_layers_before(part, module, share) for part, share in zip(args[0], shares, strict=True)]
        return None if None in found else [layer for some in found for layer in some or ()]
    if node.target is aten.index_select.default and args[1] == 1 and _constant(args[2]):
        order = _tensor(module, args[2])
        if sorted(order.tolist()) == list(range(args[0].meta["val"].shape[1])):
            return _layers_before(args[0], module, channels[order.argsort()])
    return None


def _absorb(node: fx.Node, module: fx.GraphModule, scale: Tensor, shift: Tensor) -> None:
    args: Any = node.args
    weight = _tensor(module, args[1])
    bias = args[2] if len(args) > 2 else None
    moved = shift if bias is None else shift + scale * _tensor(module, bias).double()
    made = []
    for name, value in (("weight", _scaled(weight.double(), scale, node)), ("bias", moved)):
        folded = f"folded_{node.name}_{name}"
        module.register_parameter(folded, nn.Parameter(value.to(weight.dtype, copy=True), requires_grad=False))
        with module.graph.inserting_before(node):
            made.append(module.graph.get_attr(folded))
    node.args = (args[0], *made, *args[3:])


def _scaled(weight: Tensor, scale: Tensor, node: fx.Node) -> Tensor:
    """The weight times `scale` along its output channels, which transposed convolutions have on axis 1, by group."""
    if node.target not in _TRANSPOSED:
        return weight * scale.view(-1, *[1] * (weight.ndim - 1))
    groups: Any = node.args[6] if len(node.args) > 6 else 1
    grouped = weight.unflatten(0, (groups, -1))  # (groups, inputs / groups, outputs / groups, ...)
    return (grouped * scale.view(groups, 1, -1, *[1] * (weight.ndim - 2))).flatten(0, 1)


def _constant(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _tensor(module: nn.Module, node: Any) -> Tensor:
    owner, _, leaf = node.target.rpartition(".")
    return getattr(module.get_submodule(owner), leaf).detach()

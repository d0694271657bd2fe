"""One declaration for each operator: the rule that labels go through it by, and its traits.

To add an operator of torch, put its name into a row with its rule and traits, or add a row. `hap.tracing.rules` takes
the operators of each rule from here, so there is no second list to keep. Operators that torch itself tags as pointwise
need no row, unless they have traits.
"""

from dataclasses import dataclass
from enum import Flag, auto


class Trait(Flag):
    """What holds for an operator, whichever rule it has."""

    PIECEWISE_LINEAR = auto()  # the result is, almost everywhere, linear in the activations that enter
    KEEPS_ZERO = auto()  # a function of one tensor that maps a channel of zeros to a channel of zeros
    SIZED = auto()  # it may have sizes among its arguments, which a forward may have hard-coded
    MULTIPLIES = auto()  # it multiplies by weights or activations with each other, and the multiply-adds are counted
    ADDS = auto()  # it adds tensors, such as branches of a network
    UNCHANGED = auto()  # it gives the same values again
    SAME_ORDER = auto()  # it gives the same elements, in the same order, another shape
    TAKES_PARTS = auto()  # it makes a view that has parts of the axes of a tensor, in some order
    SPLITS = auto()  # it makes several parts along one axis
    EXPANDS = auto()  # it repeats a tensor along axes without copying
    COPIES = auto()  # it moves elements elsewhere: what is written there later does not change the source
    FILLS = auto()  # it makes a tensor of one value
    AVERAGES = auto()  # a reduction that spans an axis as a norm does: what is left of the axis is averaged on


NONE = Trait(0)


@dataclass(frozen=True)
class Operator:
    """The family of an operator, which has one rule ("": the operator has no rule), and its traits."""

    family: str
    traits: Trait


OPERATORS: dict[str, Operator] = {}


def _declare(family: str, traits: Trait, names: str, in_place: bool = True) -> None:
    """Operators by their names in torch, each also with the trailing underscore of its form that works `in_place`."""
    for name in names.split():
        for known in (name, f"{name}_") if in_place else (name,):
            assert known not in OPERATORS, f"{known} is declared twice"
            OPERATORS[known] = Operator(family, traits)


LINEAR, KEEPS_ZERO, SIZED, MULTIPLIES = Trait.PIECEWISE_LINEAR, Trait.KEEPS_ZERO, Trait.SIZED, Trait.MULTIPLIES
TAKES_PARTS, SAME_ORDER, COPIES = Trait.TAKES_PARTS, Trait.SAME_ORDER, Trait.COPIES

_declare("pointwise", LINEAR | KEEPS_ZERO | Trait.UNCHANGED, "alias clone contiguous detach")
_declare("pointwise", LINEAR | KEEPS_ZERO, "dropout leaky_relu relu relu6")
_declare("pointwise", LINEAR | Trait.UNCHANGED, "to _to_copy")
_declare("pointwise", LINEAR | Trait.ADDS, "add sub")
_declare("pointwise", LINEAR, "abs clamp clamp_max clamp_min feature_dropout hardtanh maximum minimum neg rsub")
_declare("pointwise", LINEAR, "threshold _prelu_kernel")
_declare("pointwise", KEEPS_ZERO, "gelu hardswish mish silu tanh")
_declare("pointwise", NONE, "alpha_dropout celu copy elu full_like hardsigmoid log_sigmoid masked_fill")
_declare("pointwise", NONE, "ones_like selu softplus where zeros_like")

_declare("structural", LINEAR, "adjoint flip mH")
_declare("structural", LINEAR | COPIES, "cat concat stack")
_declare("structural", LINEAR | TAKES_PARTS, "moveaxis movedim mT permute swapaxes swapdims t transpose")
_declare("structural", LINEAR | TAKES_PARTS | SAME_ORDER, "squeeze unsqueeze")
_declare("structural", LINEAR | SAME_ORDER, "flatten")
_declare("structural", LINEAR | SIZED, "channel_shuffle pixel_shuffle pixel_unshuffle select unbind")
_declare("structural", LINEAR | SIZED | COPIES, "repeat repeat_interleave roll tile")
_declare("structural", LINEAR | SIZED | Trait.EXPANDS, "broadcast_to expand expand_as")
_declare("structural", LINEAR | SIZED | TAKES_PARTS, "narrow numpy_T slice")
_declare("structural", LINEAR | SIZED | TAKES_PARTS | Trait.SPLITS, "chunk split split_with_sizes")
_declare("structural", LINEAR | SIZED | TAKES_PARTS | Trait.SPLITS, "unsafe_chunk unsafe_split unsafe_split_with_sizes")
_declare("structural", LINEAR | SIZED | SAME_ORDER, "reshape reshape_as unflatten _unsafe_view view view_as")
_declare("padding", LINEAR | SIZED, "constant_pad_nd pad")

_declare("pooling", LINEAR | KEEPS_ZERO, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
_declare("pooling", LINEAR | KEEPS_ZERO, "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d")
_declare("pooling", LINEAR | KEEPS_ZERO, "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d")
_declare("pooling", LINEAR | KEEPS_ZERO, "max_pool2d_with_indices upsample_bicubic2d upsample_bilinear2d")
_declare("pooling", LINEAR | KEEPS_ZERO, "upsample_linear1d upsample_trilinear3d")
_declare("pooling", LINEAR | KEEPS_ZERO, "upsample_nearest1d upsample_nearest2d upsample_nearest3d")
_declare("pooling", LINEAR, "reflection_pad1d reflection_pad2d reflection_pad3d")
_declare("pooling", LINEAR, "replication_pad1d replication_pad2d replication_pad3d")

_declare("reduction", LINEAR | Trait.AVERAGES, "mean")
_declare("reduction", LINEAR, "sum")
_declare("reduction", Trait.AVERAGES, "amax amin linalg_vector_norm max min norm std var")
_declare("reduction", NONE, "all any argmax logsumexp prod")
_declare("softmax", NONE, "cumsum log_softmax softmax _softmax")

_declare("linear", LINEAR | MULTIPLIES, "linear", in_place=False)
_declare("convolution", LINEAR | MULTIPLIES, "conv1d conv2d conv3d", in_place=False)
_declare("transposed_convolution", LINEAR | MULTIPLIES, "conv_transpose1d conv_transpose2d conv_transpose3d", False)
_declare("addmm", MULTIPLIES, "addmm", in_place=False)
_declare("matmul", MULTIPLIES, "bmm matmul mm", in_place=False)
_declare("attention", MULTIPLIES, "scaled_dot_product_attention", in_place=False)
_declare("recurrent", MULTIPLIES, "gru lstm rnn_relu rnn_tanh", in_place=False)
_declare("cell", MULTIPLIES, "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell", in_place=False)
for _name in ("baddbmm", "einsum", "tensordot"):  # they also make tables out of tables: see index.py
    _declare(_name, NONE, _name, in_place=False)

_declare("channel_norm", LINEAR, "batch_norm")
_declare("channel_norm", NONE, "instance_norm")
_declare("layer_norm", NONE, "layer_norm rms_norm")
_declare("group_norm", NONE, "group_norm")
_declare("prelu", LINEAR, "prelu")
_declare("glu", NONE, "glu")

_declare("new", Trait.FILLS, "new_full new_ones new_zeros", in_place=False)
_declare("new", NONE, "new_empty", in_place=False)
_declare("", Trait.FILLS, "full ones zeros")
_declare("grid_sampler", NONE, "grid_sampler grid_sampler_2d grid_sampler_3d", in_place=False)
for _name in ("embedding", "gather", "index", "index_select", "getitem", "type_as", "_assert_tensor_metadata"):
    _declare(_name, NONE, _name, in_place=False)


def family(*families: str) -> frozenset[str]:
    """The operators of these families."""
    return frozenset(name for name, operator in OPERATORS.items() if operator.family in families)


def having(trait: Trait) -> frozenset[str]:
    """The operators with this trait."""
    return frozenset(name for name, operator in OPERATORS.items() if trait in operator.traits)


CONVOLUTIONS, TRANSPOSED, PRODUCTS = family("convolution"), family("transposed_convolution"), family("matmul")
STRUCTURAL = family("structural", "padding")
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""How many rows of a recurrent layer's weight compute one hidden unit."""

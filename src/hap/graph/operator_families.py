"""Which operators behave alike, by name. `hap.rules` gives each family its rule."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    """The words of a text, each also with the trailing underscore of its in-place form."""
    return frozenset(name + end for name in text.split() for end in ("", "_"))


POINTWISE = _names("""
    alias alpha_dropout bfloat16 celu clamp clone contiguous copy detach dropout elu feature_dropout float full_like
    gelu half hardsigmoid hardswish hardtanh leaky_relu log_sigmoid masked_fill mish ones_like relu6 selu silu softplus
    to _to_copy where zeros_like
""")
"""Besides those that torch itself tags as pointwise."""

STRUCTURAL = _names("""
    adjoint broadcast_to cat channel_shuffle chunk concat constant_pad_nd expand expand_as flatten flip mH mT moveaxis
    movedim narrow numpy_T pad permute pixel_shuffle pixel_unshuffle repeat repeat_interleave reshape reshape_as roll
    select slice split split_with_sizes squeeze stack swapaxes swapdims t tile transpose unbind unflatten unsafe_chunk
    unsafe_split unsafe_split_with_sizes _unsafe_view unsqueeze view view_as
""")
"""Move elements without computing: they can run on labels."""

MOVING = _names("""
    chunk mT moveaxis movedim narrow numpy_T permute slice split split_with_sizes squeeze swapaxes swapdims t transpose
    unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze
""")
"""Make a view of a parameter that has parts of its axes, in some order."""

EXPANDING = _names("broadcast_to expand expand_as")
FILLED = _names("full new_full new_ones new_zeros ones zeros")
"""Make tensors of one value."""
COPYING = _names("cat concat repeat repeat_interleave roll stack tile")
"""Those that move elements to where the source is not: what is written there later does not change it."""
SAME_ORDER = _names("flatten reshape squeeze unflatten _unsafe_view unsqueeze view view_as reshape_as")
"""Give the same elements, in the same order, another shape."""
UNCHANGED = _names("alias clone contiguous detach to _to_copy")

PARTS = _names("chunk split split_with_sizes unsafe_chunk unsafe_split unsafe_split_with_sizes")

SIZED = STRUCTURAL - _names("""
    adjoint cat concat flatten flip mH mT moveaxis movedim permute squeeze stack swapaxes swapdims t transpose unsqueeze
""")
"""Those that may have sizes among their arguments, which a forward may have hard-coded."""

POOLING = _names("""
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool2d max_pool1d max_pool2d max_pool2d_with_indices
    max_pool3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d
""")
PADDING = _names(
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"
)
"""Windows over space: channel by channel."""

REDUCTIONS = _names("all amax amin any argmax linalg_vector_norm logsumexp max mean min norm prod std sum var")
AVERAGES = _names("amax amin linalg_vector_norm max mean min norm std var")
"""Reductions that span an axis as a norm does: what is left of it is averaged on."""
SOFTMAXES = _names("cumsum log_softmax softmax _softmax")

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
PRODUCTS = frozenset({"bmm", "matmul", "mm"})
SUMS = _names("add sub")

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RECURRENT = _GATES | {f"{name}_cell": gates for name, gates in _GATES.items()}
"""Recurrent layers and their cells, with how many rows of a weight compute one hidden unit."""

PIECEWISE_LINEAR = (
    _names("""
    abs alias clamp clamp_max clamp_min clone contiguous detach dropout feature_dropout float hardtanh leaky_relu
    maximum minimum neg prelu _prelu_kernel relu relu6 rsub threshold to _to_copy
    batch_norm linear mean sum
""")
    | (POOLING - _names("lp_pool2d"))
    | SUMS | STRUCTURAL | PADDING | CONVOLUTIONS | TRANSPOSED
)  # fmt: skip
"""Functions whose result is, almost everywhere, linear in the activations that enter."""

KEEP_ZERO = POOLING | _names(
    "alias clone contiguous detach dropout gelu hardswish leaky_relu mish relu relu6 silu tanh"
)
"""Functions of one tensor that map a channel of zeros to a channel of zeros."""

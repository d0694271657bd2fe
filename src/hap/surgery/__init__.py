"""Carries a plan out on a model, without asking whether that is right: `hap.verification` does.

Start reading at `cut.py`: tensors are cut through `.data`, attributes such as `out_channels` follow, and `rebuild_`
gives a fresh model the shape of a pruned one. `additions.py` builds and attaches what a plan adds: implants, zeros
around branches and heads, parts of tables. `rotate_heads.py` changes the basis of heads before they are narrowed,
`multihead_attention.py` lets nn.MultiheadAttention lose heads.

Import from the modules.
"""

"""Carries a plan out on a model, without asking whether that is right: `hap.verification` does.

Start reading at `cut.py`: tensors are cut through `.data`, attributes such as `out_channels` follow, and what a plan
adds is attached by `hooks.py`: implants, zeros around a branch, parts of tables. `build.py` builds implants and gives
a fresh model the shape of a pruned one. `rotate_heads.py` changes the basis of heads before they are narrowed,
`multihead_attention.py` lets nn.MultiheadAttention lose heads, and `scatter_in_forward.py` reaches layers that a
forward uses without calling them.

Import from the modules.
"""

"""What a trace finds: which indices of which parameters live and die together.

`groups.py` has the result of `hap.trace` and its copies: relabelled, restricted, with more to rewire. `types.py` has
the records in it: start reading there. `components.py` joins labels into classes; `transformer_blocks.py` tells heads
from hidden neurons (`hap.heads`, `hap.mlps`, `hap.only`); `unprunable_summary.py` says in one sentence what cannot
shrink; `drawing.py` draws all of it.

Import from the modules. Nothing here knows a model: only names, shapes and classes.
"""

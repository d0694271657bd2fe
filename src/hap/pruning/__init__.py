"""The verbs that put the steps together: trace, score, plan, change the model, check, measure.

Start reading at `prune.py`: `hap.prune_` is the whole sequence in one function, and below it stands what it does with
models that torch.export cannot capture as a whole. `apply.py` carries out a plan and proves it, `compensate.py`
adjusts what reads removed units before. `prune_blocks.py` has budgets on heads and hidden neurons of transformers,
`narrowable_heads.py` finds heads that can do with less width. `latency.py` times models, and `plan_for_latency.py`
plans for measured time. `order.py` scores once for all budgets.

Import from the modules.
"""

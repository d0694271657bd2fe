"""Attention heads removed from an encoder that is fine-tuned on GLUE, as in the paper.

`job` says what is run, `campaign` runs it, `tuning` fine-tunes, `data` reads the tasks, `head_costs` and
`head_latency` time scores and pruned models, and `page` makes the page of results. Start with `campaign`.
"""

"""Trials run pruned copies of a model to learn what its operator graph does not tell.

A graph does not tell whether `view(n, 64)` was written with a constant, computed, or read from an attribute such as
`num_heads`. So parts of all groups are removed from copies of the model, and what these return is compared.

May be imported from elsewhere: `find_unprunable`, `run_round.Subject`, `repeated_blocks.find_repeats` and
`removal_rounds.rounds_of`. Start reading at `find_unprunable.py`: the groups that a model does not run
without. `find_size_attributes.py` finds the attributes, such as `num_heads`, that must follow. Then
`run_round.RoundRunner` runs one round and `run_round.reasons` puts what was seen into words, `removal_rounds` says what
goes in a round, `attribute_reads` notes which attributes a forward reads, and `repeated_blocks` finds blocks that need
not be tried twice.
"""

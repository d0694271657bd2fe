"""The graph of operators that torch.export captures of a model, and what can be asked of it.

Nothing here knows of labels, units or groups. `capture` gets the graph; `partition` finds the parts of a model that
can be captured where the whole cannot; `index` answers what the graph and the model say of a node; `nodes` has what
is asked of a node alone; `operator_families` declares every operator that has a rule, with its traits. The others
look for one thing each: axes that are merely expanded, and tables that modules share.

Import functions from their modules, such as `from hap.graph.capture import capture`. Start with `capture`, then
`index`.
"""

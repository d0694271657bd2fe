"""The graph of operators that torch.export captures of a model, and what can be asked of it.

Nothing here knows of labels, units or groups. `capture` gets the graph; `partition` finds the parts of a model that
can be captured where the whole cannot; `index` answers what the graph and the model say of a node, and finds the
tables that modules share; `nodes` has what is asked of a node alone; `operator_families` declares every operator that
has a rule, with its traits; `broadcast_axes` looks for axes that are merely expanded.

Import functions from their modules, such as `from hap.graph.capture import capture`. Start with `capture`, then
`index`.
"""

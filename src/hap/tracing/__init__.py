"""trace: from a model and an example to the groups of units that can be removed together.

Every index of every parameter axis has a label (`labels`); those that share one fate are a class (`label_classes`).
`trace.walk` lets labels go through the captured graph, operator by operator, as the rules in `rules` say; these write
through `context.RuleContext`. `build_groups` makes `Groups` of classes, and finds why something stays. `trace` puts
this together and has removal tried (`hap.trials`).

Beside that: weights that are computed or views (`weight_views`), heads that zeros stand in for (`zero_padding`),
branches that run in training alone, and `rewrite`. Import `hap.trace`, `hap.rewrite` and `hap.rules`; start to read
with `trace`.
"""

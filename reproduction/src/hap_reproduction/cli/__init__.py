"""The commands that this package adds to `hap`: `reproduce`, `glue` and `zoo`, one module for each.

`hap.cli.app` finds them by the entry points in this package's pyproject.toml. The work itself is done in
`hap_reproduction.cifar10`, `.glue` and `.zoo_sweep`; a command reads its options and says what comes of it.
"""

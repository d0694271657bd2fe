"""The commands that this package adds to `hap`: reproduce, glue and zoo. They are named in pyproject.toml."""

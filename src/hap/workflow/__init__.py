"""Experiments: train a dense network, prune it in several ways, fine-tune, and leave result files.

`config` says what an experiment is and reads it from TOML. `run` carries it out, step by step, and skips what is
finished. `steps` has the steps that commands share. `results` has the files that the report reads. `networks` finds
networks and data by name. `provenance` records revision and hardware. Import from these modules; start with `run`.
"""

"""The paper's CIFAR-10 experiments: many trainings as jobs that are resumed and recorded one by one.

`job` says what a job is, `jobs` lists them all, `campaign` trains them side by side, `starting` prunes the networks
that they start from. `masking`, `trimming` and `stacking` train pruned networks in a shape that a GPU likes.
`eigendamage` is a peer. `sensitivity` and `removal` compare scores with the measured loss increase of removing units.
"""

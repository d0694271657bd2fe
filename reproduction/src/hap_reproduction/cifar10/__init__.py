"""The paper's CIFAR-10 experiments: many trainings as jobs that are resumed and recorded one by one.

`job` says what a job is, `jobs` lists them all, `campaign` works them off, `starting` prunes the networks that they
start from. `training` trains several networks side by side; `masking`, `trimming` and `stacking` train pruned ones in a
shape that a GPU likes.
`eigendamage` is a peer. `sensitivity` and `removal` compare scores with the measured loss increase of removing units.
"""

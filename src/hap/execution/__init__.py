"""Running a user's model: with examples, batches and weights of many kinds, and leaving it as it was.

`calling.py` calls a model on an example; `input_checks.py` refuses what cannot be worked with; `model_outputs.py` knows
which outputs hold tensors. `calibration.py` runs a model over batches and gathers moments of what layers read.
`fast_copy.py`, `masked_execution.py`, `sampled_convolution.py` and `compare_outputs.py` hold two models against each
other at the price of the small one. `module_hooks.py` runs functions beside modules for a while.

Imports nothing above `hap.utils`. Start reading at `calling.py`.
"""

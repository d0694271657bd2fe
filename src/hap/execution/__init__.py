"""Running a user's model: with examples, batches and weights of many kinds, and leaving it as it was.

`calling.py` calls a model on an example, in a mode or with hooks that last for a while; `input_checks.py` refuses what
cannot be worked with; `model_outputs.py` knows which outputs hold tensors, and compares them. `calibration.py` runs a
model over batches and gathers moments of what layers read. `fast_copy.py`, `masked_execution.py` and
`sampled_convolution.py` hold two models against each other at the price of the small one.

Imports nothing above `hap.utils`. Start reading at `calling.py`.
"""

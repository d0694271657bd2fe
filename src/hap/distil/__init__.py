"""Distillation: minutes of training towards what the dense model returns, on calibration inputs and without labels.

Start reading at `distil.py`. `samples.py` draws mini-batches and keeps what the dense model returns for them,
`objective.py` says how far the outputs of both models are apart, and `descent.py` finds a learning rate and follows it,
with an eye on the samples that are held out. Import from here `distil_` and `Distillation`.
"""

from hap.distil.distil import MINUTES, Distillation, check_minutes, distil_

__all__ = ["MINUTES", "Distillation", "check_minutes", "distil_"]

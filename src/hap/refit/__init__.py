"""A refit: every layer of a pruned model solved anew against the dense one, by least squares, without training.

Start reading at `refit.py`, the whole way on one page. `flow.py` reads off the graphs of both models which layers
there are, in which order, and what each is to match. `calibration.py` runs both models on the same inputs in step
(`graph_run.py`) and gathers what a layer reads and is to return. `fit_layer.py` fits one layer with the least squares
of `ridge_regression.py`, on the matrices that `rows.py` and `parameters.py` make of its weights.
`norms.py` estimates statistics of batch normalisations again. Import from here `refit_`, `Refit` and `estimate_norms_`.
"""

from hap.refit.norms import estimate_norms_
from hap.refit.refit import Refit, refit_, refit_layers_

__all__ = ["Refit", "estimate_norms_", "refit_", "refit_layers_"]

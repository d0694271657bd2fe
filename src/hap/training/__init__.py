"""Training and evaluation: one loop that is readable from top to bottom, for one model or several side by side.

`loop.py` is the loop, `update.py` one step on fixed buffers, `run.py` a model with its history, `graph.py` how steps
are recorded, `checkpoint.py` the state of a training in a file, `recipes.py` every number that decides how it goes.
Import `train`, `evaluate` and the recipes from here or from `hap`. Start reading at `loop.py`.

On CUDA the whole step (forward, loss, backward, update) is recorded once as a CUDA graph and replayed, which
removes the cost of launching hundreds of small kernels. Several models are recorded on parallel branches of
one graph, so that networks too small to fill the device share it.
"""

from hap.training.evaluation import Evaluation, evaluate
from hap.training.loop import train, train_many
from hap.training.run import History

__all__ = ["Evaluation", "History", "evaluate", "train", "train_many"]

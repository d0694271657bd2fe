"""Training and evaluation: one loop that is readable from top to bottom.

`loop.py` is the loop, `run.py` a network in training with its step on fixed buffers, `cuda_graph.py` how steps are
recorded on CUDA, `resume.py` the state of a training in a file, `evaluation.py` accuracy and loss, `recipes.py`
every number that decides how a training goes. Import `train`, `evaluate` and the recipes from here or from `hap`. Start
reading at `loop.py`.
"""

from hap.training.evaluation import Evaluation, evaluate
from hap.training.loop import train
from hap.training.run import History

__all__ = ["Evaluation", "History", "evaluate", "train"]

"""Training and evaluation.

On CUDA the whole step (forward, loss, backward, update) is recorded once as a CUDA graph and replayed, which
removes the cost of launching hundreds of small kernels. Several models are recorded on parallel branches of
one graph, so that networks too small to fill the device share it.
"""

from hap.training.evaluation import Evaluation, evaluate
from hap.training.loop import train, train_many
from hap.training.run import History

__all__ = ["Evaluation", "History", "evaluate", "train", "train_many"]

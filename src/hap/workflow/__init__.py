"""Experiments: train, prune in several ways, fine-tune, and leave result files that the report reads."""

from hap.workflow.config import DenseStep, Experiment, FinetuneStep, PruneStep, read_config
from hap.workflow.demo import demo_experiment
from hap.workflow.results import Measured, Result, read_results, write_result
from hap.workflow.run import forget, run

__all__ = [
    "DenseStep",
    "Experiment",
    "FinetuneStep",
    "Measured",
    "PruneStep",
    "Result",
    "demo_experiment",
    "forget",
    "read_config",
    "read_results",
    "run",
    "write_result",
]

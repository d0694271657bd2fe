"""HAP: make trained neural networks smaller and faster by Hessian-aware structured pruning with neural implants.

groups = hap.trace(model, example)                                     # what can be removed, and what goes together
scores = hap.score(model, groups, batches, loss, hap.HessianTrace())   # equation 6 of the paper, one value per unit
plan = hap.plan(groups, scores, hap.Budget(flops=0.4), implant=hap.Pointwise(ratio=0.2))
hap.apply_(model, plan, example=example)                               # physical, checked by running it
hap.train(model, data, recipe)
hap.save("pruned.safetensors", model, plan)
"""

from hap import data, models, recipes, rules, zoo
from hap.block_pruning import plan_blocks, prune_blocks_
from hap.blocks import heads, mlps, only
from hap.checkpoint import load, read, save
from hap.compensation import compensate_
from hap.cost import cost
from hap.errors import HapError
from hap.exporting import export
from hap.implants import DepthwiseSeparable, Implant, LowRank, NarrowHeads, Pointwise, SpatialLowRank
from hap.latency import compare_latency, latency
from hap.narrowing import narrowable
from hap.parts import parts
from hap.planning import Budget, Limits, plan
from hap.plans import Plan, draft
from hap.pruning import prune_
from hap.recipes import Recipe
from hap.rewriting import rewrite
from hap.scoring import (
    L1,
    OBD,
    BNScale,
    Criterion,
    DiagonalFisher,
    GateCurvature,
    GateGradient,
    GeometricMedian,
    HessianTrace,
    JointTrace,
    Magnitude,
    Random,
    Reversed,
    Scores,
    Taylor,
    Whole,
    score,
)  # fmt: skip
from hap.surgery import apply_
from hap.timed_planning import plan_for_latency
from hap.tracing import trace
from hap.training import evaluate, train

__version__ = "0.1.0"

__all__ = [
    "L1", "OBD", "BNScale", "Budget", "Criterion", "DepthwiseSeparable", "DiagonalFisher", "GateCurvature",
    "GateGradient", "GeometricMedian", "HapError", "HessianTrace", "Implant", "JointTrace", "Limits", "LowRank",
    "Magnitude", "NarrowHeads", "Plan", "Pointwise", "Random", "Recipe", "Reversed", "Scores", "SpatialLowRank",
    "Taylor", "Whole", "apply_", "compare_latency", "compensate_", "cost", "data", "draft", "evaluate", "export",
    "heads", "latency", "load", "mlps", "models", "narrowable", "only", "parts", "plan", "plan_blocks",
    "plan_for_latency", "prune_", "prune_blocks_", "read", "recipes", "rewrite", "rules", "save", "score", "trace",
    "train", "zoo",
]  # fmt: skip

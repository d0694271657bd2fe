"""HAP: make trained neural networks smaller and faster by Hessian-aware structured pruning with neural implants.

groups = hap.trace(model, example)                                     # what can be removed, and what goes together
scores = hap.score(model, groups, batches, loss, hap.HessianTrace())   # equation 6 of the paper, one value per unit
plan = hap.plan(groups, scores, hap.Budget(flops=0.4), implant=hap.Pointwise(ratio=0.2))
hap.apply_(model, plan, example=example)                               # physical, checked by running it
hap.train(model, data, recipe)
hap.save("pruned.safetensors", model, plan)
"""

from hap import data, models
from hap.distil import Distillation, distil_
from hap.errors import HapError
from hap.graph.partition import parts
from hap.groups.transformer_blocks import heads, mlps, only
from hap.implants import DepthwiseSeparable, Implant, LowRank, NarrowHeads, Pointwise, SpatialLowRank
from hap.io.checkpoint import load, read, save
from hap.io.export import export
from hap.models import pretrained as zoo
from hap.planning.assemble import draft
from hap.planning.budget import Budget, Limits
from hap.planning.choose_units import plan
from hap.planning.cost import cost
from hap.planning.order import Order
from hap.planning.plan import Plan
from hap.pruning.apply import apply_
from hap.pruning.compensate import compensate_
from hap.pruning.latency import compare_latency, latency
from hap.pruning.narrowable_heads import narrowable
from hap.pruning.order import order
from hap.pruning.plan_for_latency import plan_for_latency
from hap.pruning.prune import prune_
from hap.pruning.prune_blocks import plan_blocks, prune_blocks_
from hap.refit import Refit, refit_
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
    Reconstruction,
    Reversed,
    Scores,
    Taylor,
    Whole,
    score,
)  # fmt: skip
from hap.tracing import rules
from hap.tracing.rewrite import rewrite
from hap.tracing.trace import trace
from hap.training import evaluate, recipes, train
from hap.training.recipes import Recipe

__version__ = "0.1.0"

__all__ = [
    "L1", "OBD", "BNScale", "Budget", "Criterion", "DepthwiseSeparable", "DiagonalFisher", "Distillation",
    "GateCurvature", "GateGradient", "GeometricMedian", "HapError", "HessianTrace", "Implant", "JointTrace", "Limits",
    "LowRank", "Magnitude", "NarrowHeads", "Order", "Plan", "Pointwise", "Random", "Recipe", "Reconstruction", "Refit",
    "Reversed", "Scores", "SpatialLowRank", "Taylor", "Whole", "apply_", "compare_latency", "compensate_", "cost",
    "data", "distil_", "draft", "evaluate", "export", "heads", "latency", "load", "mlps", "models", "narrowable",
    "only", "order", "parts", "plan", "plan_blocks", "plan_for_latency", "prune_", "prune_blocks_", "read", "recipes",
    "refit_", "rewrite", "rules", "save", "score", "trace", "train", "zoo",
]  # fmt: skip

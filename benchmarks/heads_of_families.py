"""In how many attention layers of each Hugging Face family heads can be removed, and whether it is right.

    python benchmarks/heads_of_families.py results/heads/families.json

Small models from configurations, as in the sweep. Attention layers are modules that run a softmax over scores, or the
fused operator. Half of the heads go at random, five times, and the outputs are held against those of the dense model in
which the layers that read these heads, and so the outputs of attention, get zeros in their place.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hap
from hap.execution.calling import run
from hap.graph.capture import capture
from hap.graph.nodes import short_name
from hap.groups.groups import Groups
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.zoo_sweep.hugging_face import HUGGING_FACE
from hap_reproduction.zoo_sweep.models import build

PLANS = 5
"""How many times half of the heads go, other ones each time."""
FAINT = 1e-5
"""Heads that change outputs by less, relative to their size, show little when they go."""


def attention_layers(model: nn.Module, example: Any) -> list[str]:
    """The modules that turn scores into weights. A softmax of its own belongs to the module that has it."""
    found = {}
    for node in (n for n in capture(model, example).program.graph.nodes if n.op == "call_function"):
        scores = short_name(node) in ("softmax", "_softmax") and node.meta["val"].ndim > 2
        if scores or short_name(node) == "scaled_dot_product_attention":
            name, kind = [*(node.meta.get("nn_module_stack") or {"": ("", "")}).values()][-1]
            name = name.partition("@")[0]
            found[name.rpartition(".")[0] if "Softmax" in str(kind) else name] = None
    return list(found)


def measure(name: str) -> dict[str, Any]:
    model, example = build(f"hf:{name}")
    for parameter in model.parameters():  # so that a head makes a difference
        parameter.data += 0.02 * torch.randn_like(parameter)
    layers, groups = attention_layers(model, example), hap.trace(model, example)
    names = hap.heads(groups)
    owners = {m.rpartition(".")[0] for n in names for m in groups[n].modules}
    missed = [
        layer
        for layer in layers
        if not any(f"{o}.".startswith(f"{layer}.") or f"{layer}.".startswith(f"{o}.") for o in owners)
    ]
    record = {
        "family": name,
        "layers": len(layers),
        "found": len(layers) - len(missed),
        "missed": missed,
        "heads": sum(len(groups[n]) for n in names),
        "stand_ins": sum(groups.pads(n) for n in names),
    }
    if names:
        heads = hap.only(groups, names)
        gaps, effects = [], []
        for seed in range(PLANS):
            scores = hap.score(model, heads, None, None, hap.Random(seed=seed))
            plan = hap.plan(heads, scores, hap.Budget(channels=0.5))
            pruned = hap.apply_(copy.deepcopy(model), plan, example)
            gaps.append(gap(run(pruned, example), masked(model, heads, plan, example)))
            effects.append(gap(run(pruned, example), run(model, example)))
        record |= {
            "kept": sum(map(len, plan.kept.values())),
            "exact": plan.exact,
            "masks": plan.masks,
            "plans": PLANS,
            "gap": max(gaps),
            "effect": min(effects),
        }
    return record


def masked(model: nn.Module, heads: Groups, plan: hap.Plan, example: Any) -> Any:
    """What the dense model returns when layers read zeros in place of heads that went. All heads are computed."""
    dense = copy.deepcopy(model)
    tensors = dict(dense.named_parameters())
    for name, group in heads.items():
        gone = group.classes[plan.removed[name]]
        for weight, dim in group.consumers:
            dead = [i for i, c in enumerate(heads.axes[weight, dim].tolist()) if c in gone]
            tensors[weight].data.index_fill_(dim, torch.tensor(dead, dtype=torch.int64), 0)
    return run(dense, example)


def gap(a: Any, b: Any) -> float:
    """The largest difference between two outputs, relative to the outputs' size where that exceeds one."""
    pairs = [(x, y) for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True) if isinstance(x, Tensor)]
    return max(float((x - y).abs().max()) / max(1.0, float(x.abs().max())) for x, y in pairs if x.numel())


def table(rows: list[dict[str, Any]]) -> str:
    """The families by what can be done, for the manual."""
    kinds: dict[str, list[str]] = {
        "in place": [],
        "zeros stand in (in how many layers)": [],
        "some layers keep theirs (in how many heads go)": [],
    }
    for row in (r for r in rows if r["layers"]):
        place = 2 if row["missed"] else 1 if row["stand_ins"] else 0
        share = f" ({row['stand_ins'] if place == 1 else row['found']} of {row['layers']})" if place else ""
        [*kinds.values()][place].append(row["family"] + share)
    lines = [
        "| heads go | families |",
        "| --- | --- |",
        *(f"| {kind} | {', '.join(sorted(names))} |" for kind, names in kinds.items()),
    ]
    lines.append("")
    for masks in (True, False):
        some = [r for r in rows if r.get("masks", True) is masks]
        which = "" if masks else f" of {', '.join(r['family'] for r in some)}, where a norm spans all heads"
        worst, heads = max((r.get("gap", 0) for r in some), default=0), sum(r["heads"] for r in some)
        lines.append(
            f"Over {heads} heads{which}, the largest difference from the masked models is {worst:.0e} of the outputs."
        )
    if faint := [r["family"] for r in rows if r.get("effect", 1) < FAINT]:
        lines.append(
            f"Heads of {', '.join(faint)}, untrained as it is, make next to no difference, so it shows little."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="*", default=list(HUGGING_FACE))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in options.families:
            rows.append(measure(name))
            print(rows[-1], flush=True)
    write_json(options.out, {"rows": rows} | provenance())
    print(table(rows))


if __name__ == "__main__":
    main()

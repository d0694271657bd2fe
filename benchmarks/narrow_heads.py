"""Narrow heads against removed ones at equal FLOPs: how near a sentence encoder stays to itself, without any training.

    python benchmarks/narrow_heads.py OUT.json --model runs/mpnet --data data/glue

Heads are ranked on pairs of sentences that mean the same (MRPC's training set), by the gradient of gates under the loss
that such encoders are trained with: each sentence has to find its partner among the others. For each share of heads
left, a plan with narrow heads is held to the same FLOPs. The figure is the mean cosine between the embeddings of the
pruned and the dense encoder on sentences of the development set.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.groups.transformer_blocks import units_of
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.glue.campaign import load_transformers
from hap_reproduction.glue.data import read

SHARES = (0.8, 0.6, 0.5, 0.4)
IMPLANTS = [hap.NarrowHeads(ratio, rank) for ratio in (0.3, 0.5) for rank in (0.25, 0.5)]
PAIRS, SENTENCES = 32, 64


def embedded(output: Any, mask: Tensor) -> Tensor:
    """Sentences as unit vectors: the mean over their tokens."""
    weights = mask[..., None]
    return F.normalize((output.last_hidden_state * weights).sum(1) / weights.sum(1), dim=-1)


def partners(output: Any, mask: Tensor) -> Tensor:
    """How badly each sentence of the first half finds its partner in the second."""
    first, second = embedded(output, mask).chunk(2)
    return F.cross_entropy(20 * first @ second.t(), torch.arange(len(first)))


def measure(model: nn.Module, tokens: Any, data: Path) -> list[dict[str, Any]]:
    corpus = read(data, "mrpc")
    same = [i for i, label in enumerate(corpus.train.labels) if label][:PAIRS]
    pairs = corpus.train.pick(same)
    calibration, held_out = tokens([*pairs.first, *(pairs.second or ())]), tokens(list(corpus.dev.first[:SENTENCES]))
    example = {name: values[:2] for name, values in held_out.items()}
    heads = hap.narrowable(model, units_of(hap.trace(model, example), "heads"), example)
    batches = [(calibration, calibration["attention_mask"])]
    scores = hap.score(model, heads, batches, partners, hap.GateGradient(per_layer=False))

    @torch.no_grad()
    def nearness(plan: hap.Plan) -> float:
        pruned, mask = hap.apply_(copy.deepcopy(model), plan, example), held_out["attention_mask"]
        return float((embedded(pruned(**held_out), mask) * embedded(model(**held_out), mask)).sum(-1).mean())

    rows = []
    for share in SHARES:
        removed = hap.plan(heads, scores, hap.Budget(channels=share))
        flops = removed.after.macs / removed.before.macs
        plans = [removed, *(hap.plan(heads, scores, hap.Budget(flops=flops), implant) for implant in IMPLANTS)]
        for implant, plan in zip([None, *IMPLANTS], plans, strict=True):
            rows.append(
                {
                    "heads": share,
                    "implant": implant and implant.to_dict(),
                    "cosine": nearness(plan),
                    "macs_left": plan.after.macs / plan.before.macs,
                    "params_left": plan.after.params / plan.before.params,
                    "kept": sum(map(len, plan.kept.values())),
                    "narrowed": sum(map(len, plan.implanted.values())),
                }
            )
            print(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--revision")
    given = parser.parse_args()
    library = load_transformers()
    tokenizer = library.AutoTokenizer.from_pretrained(given.model)
    model = library.AutoModel.from_pretrained(given.model).float().eval()

    def tokens(texts: list[str]) -> dict[str, Tensor]:
        made = tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
        return {name: made[name] for name in ("input_ids", "attention_mask")}

    rows = measure(model, tokens, given.data)
    about = {"kind": "hap-narrow-heads", "model": Path(given.model).name, "pairs": PAIRS, "sentences": SENTENCES}
    write_json(
        given.out, about | {"criterion": hap.GateGradient(False).to_dict(), "rows": rows} | provenance(given.revision)
    )


if __name__ == "__main__":
    main()

"""Heads of an encoder-decoder: a small BART learns to spell numbers (4 0 7 2 -> four thousand seventy two), then loses
half of its self- and cross-attention heads, and is trained on.

    python examples/encoder_decoder.py                # a minute or two on one core; writes results/heads
"""

from __future__ import annotations

import argparse
import copy
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

import hap
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
VOCABULARY = ["<s>", "<pad>", "</s>", *"0123456789", *ONES, *TENS, "hundred", "thousand"]
TOKEN = {word: i for i, word in enumerate(VOCABULARY)}
START, PAD, END, IGNORED = 0, 1, 2, -100
Batch = tuple[dict[str, Tensor], Tensor]


def spell(n: int) -> list[str]:
    """A number below 10,000 in words."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if n >= size:
            return [*spell(n // size), name, *(spell(n % size) if n % size else [])]
    if n < 20:
        return [ONES[n]]
    return [TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])]


def batch(numbers: list[int]) -> Batch:
    """Digits to read, words to write, shifted by one for the decoder's input."""
    sources = [[TOKEN[d] for d in str(n)] + [END] for n in numbers]
    targets = [[TOKEN[w] for w in spell(n)] + [END] for n in numbers]
    ids, labels = _padded(sources, PAD), _padded(targets, IGNORED)
    shifted = torch.cat([torch.full((len(numbers), 1), START), labels[:, :-1].where(labels[:, :-1] >= 0, PAD)], 1)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "decoder_input_ids": shifted}, labels


def _padded(rows: list[list[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def loss_of(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return BartForConditionalGeneration(BartConfig(
        vocab_size=len(VOCABULARY), d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=24, dropout=0.0,
        pad_token_id=PAD, bos_token_id=START, eos_token_id=END, decoder_start_token_id=START, use_cache=False,
    ))  # fmt: skip


def train(model: nn.Module, numbers: list[int], steps: int, lr: float, seed: int) -> None:
    draw, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    for _ in range(steps):
        inputs, labels = batch(draw.sample(numbers, 64))
        loss_of(model(**inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


@torch.no_grad()
def spelled_right(model: nn.Module, numbers: list[int]) -> float:
    """Share of numbers of which every word is right: as greedy decoding would write them."""
    inputs, labels = batch(numbers)
    right = (model(**inputs).logits.argmax(-1) == labels) | (labels == IGNORED)
    return float(right.all(1).double().mean())


def experiment(seed: int, steps: int, share: float, probes: int = 30) -> list[dict[str, Any]]:
    numbers = random.Random(seed).sample(range(10_000), 10_000)
    seen, held_out = numbers[:4000], numbers[4000:5000]
    dense = build(seed)
    train(dense, seen, steps, 3e-3, seed)
    rows = [{"seed": seed, "criterion": "dense", "heads": 1.0, "accuracy": spelled_right(dense, held_out)}]
    batches = [batch(seen[:64]), batch(seen[64:128])]
    example = batches[0][0]
    groups = hap.trace(dense, example)
    heads = hap.only(groups, hap.heads(groups))
    for name, criterion in {
        "hessian": hap.JointTrace(probes=probes, seed=seed), "gradient": hap.GateGradient(),
        "magnitude": hap.Whole(hap.Magnitude()), "random": hap.Random(seed),
    }.items():  # fmt: skip
        plan = hap.plan(heads, hap.score(dense, heads, batches, loss_of, criterion), hap.Budget(channels=share))
        model = hap.apply_(copy.deepcopy(dense), plan, example)
        before = spelled_right(model, held_out)
        train(model, seen, steps // 8, 1e-3, seed)
        rows.append({
            "seed": seed, "criterion": name, "heads": share, "before_tuning": before,
            "accuracy": spelled_right(model, held_out), "heads_left": {n: len(k) for n, k in plan.kept.items()},
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--share", type=float, default=0.5, help="of the heads that is LEFT")
    parser.add_argument("--out", type=Path, default=Path("results/heads/encoder-decoder.json"))
    given = parser.parse_args()
    rows = []
    for seed in range(given.seeds):
        for row in experiment(seed, given.steps, given.share):
            rows.append(row)
            shot = f", {row['before_tuning']:.1%} before tuning" if "before_tuning" in row else ""
            print(f"seed {seed}  {row['criterion']:<10} {row['heads']:.0%} of the heads  {row['accuracy']:.1%}{shot}")
    record = {"kind": "hap-heads-example", "format": 1, "task": "spelling numbers", "steps": given.steps, "rows": rows}
    write_json(given.out, record | provenance())


if __name__ == "__main__":
    main()

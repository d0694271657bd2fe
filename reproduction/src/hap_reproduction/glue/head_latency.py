"""How much faster an encoder is without half of its heads, on the device at hand."""

import copy
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

import hap
from hap.groups.transformer_blocks import units_of
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.glue.campaign import load_transformers

KIND, FORMAT = "hap-head-latency", 2
BACKENDS = {"cpu": ("eager", "onnxruntime"), "cuda": ("eager", "compile")}
PRECISION = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROUNDS = {1: 30, 32: 10}
"""How often each of the two networks is timed, by the number of texts in a batch."""


def measure(
    source: str | Path,
    out: Path,
    device: torch.device,
    share: float = 0.5,
    length: int = 128,
    revision: str | None = None,
) -> dict[str, Any]:
    """Time a dense encoder and one without heads of lowest magnitude in turns, and write both down.

    On the CPU as it is and in onnxruntime, on a GPU in bf16 as it is and compiled.
    """
    transformers = load_transformers()
    torch.manual_seed(0)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(str(source), num_labels=2)
    dense = network.float().eval()
    vocabulary = dense.config.vocab_size

    def example(rows: int, size: int, where: torch.device) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, vocabulary, (rows, size), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids.to(where), "attention_mask": torch.ones_like(ids).to(where)}

    small = example(2, 16, torch.device("cpu"))
    heads = units_of(hap.trace(dense, small), "heads")
    scores = hap.score(dense, heads, None, None, hap.Whole(hap.Magnitude()))
    plan = hap.plan(heads, scores, hap.Budget(channels=share))
    precision = PRECISION[device.type]
    pruned = hap.apply_(copy.deepcopy(dense), plan, small).to(device, precision)
    dense = dense.to(device, precision)
    record: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "heads": share,
        "length": length,
        "precision": str(precision).removeprefix("torch."),
        "heads_left": {n: len(units) for n, units in plan.kept.items()},
        "macs_left": plan.after.macs / plan.before.macs,
        "params_left": plan.after.params / plan.before.params,
        "rows": [],
        "device": str(device),
    } | provenance(revision)
    for backend, (size, runs) in product(BACKENDS[device.type], ROUNDS.items()):
        inputs = example(size, length, device)
        before, after = hap.compare_latency([dense, pruned], inputs, runs, warmup=2, backend=backend)
        times = {"dense": asdict(before), "pruned": asdict(after), "faster": before.ratio_to(after)}
        record["rows"].append({"backend": backend, "batch": size, **times})
        write_json(out, record)  # compiling takes minutes: what is there is kept
    return record

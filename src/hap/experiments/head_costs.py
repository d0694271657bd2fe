"""What the scores of heads cost, beside the fine-tuning that they follow: time and memory, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hap.experiments.glue import Campaign, Job, fast_products
from hap.files import write_json
from hap.provenance import provenance

KIND, FORMAT = "hap-head-costs", 1
MEASURED = (("gauss-newton", 8), ("gauss-newton", 16), ("gauss-newton", 32), ("gradient", 16), ("hessian", 16))
"""Criteria, and how many texts they look at together, which their memory depends on."""


def measure(campaign: Campaign, task: str, out: Path) -> dict[str, Any]:
    """Fine-tune a network on the task, score its heads in several ways, and write down what each took."""
    with fast_products(campaign.device):
        model, dense = campaign.train_dense(Job(task, MEASURED[0][0], 0))
        rows = []
        for criterion, size in MEASURED:
            taken = campaign.score(Job(task, criterion, 0), model, size)[1]
            memory = taken["peak_memory"] and taken["peak_memory"] / dense["step_memory"]
            ratios = {"of_an_epoch": taken["seconds"] / dense["seconds_per_epoch"], "of_a_step": memory}
            rows.append({"criterion": criterion, **taken, **ratios})
    record = {
        "kind": KIND, "format": FORMAT, "task": task, "model": campaign.model_facts(), "dense": dense, "rows": rows,
        "tuning": campaign.settings.dense.to_dict(), "device": str(campaign.device),
    } | provenance(campaign.revision)  # fmt: skip
    write_json(out, record)
    return record

"""What the scores of heads cost, beside the fine-tuning that they follow: time and memory, in one run."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.glue.campaign import Campaign
from hap_reproduction.glue.data import Encoded
from hap_reproduction.glue.device_use import use_of
from hap_reproduction.glue.job import Job
from hap_reproduction.glue.tuning import Tuning, precision_of, tune

KIND, FORMAT = "hap-head-costs", 1
MEASURED = (
    ("gauss-newton", 16),
    ("gauss-newton", 32),
    ("gauss-newton", 64),
    ("gradient", 16),
    ("gradient", 32),
    ("hessian", 16),
    ("hessian", 64),
)
"""Criteria, and how many texts they look at together, which their memory depends on."""


def measure(campaign: Campaign, task: str, out: Path) -> dict[str, Any]:
    """Fine-tune a network on the task, score its heads in several ways, and write down what each took.

    Time is held against an epoch of that fine-tuning, which on CUDA is recorded and so as fast as it gets, and against
    one of plain steps; memory against the most that a plain step of that epoch needs.
    """
    first = Job(task, MEASURED[0][0], 0)
    model, dense = campaign.train_dense(first)
    tuning = campaign.settings.tuning("dense", first)
    plain = plain_epoch(model, campaign.training_set(task), tuning)
    rows = []
    for criterion, size in MEASURED:
        taken = campaign.score(Job(task, criterion, 0), model, size, warm_up=True)[1]
        memory = taken["peak_memory"] and taken["peak_memory"] / plain["step_memory"]
        epochs = {"of_an_epoch": dense["seconds_per_epoch"], "of_a_plain_epoch": plain["seconds_per_epoch"]}
        ratios = {name: taken["seconds"] / seconds for name, seconds in epochs.items()}
        rows.append({"criterion": criterion, **taken, **ratios, "of_a_step": memory})
    record = {
        "kind": KIND,
        "format": FORMAT,
        "task": task,
        "model": campaign.model_facts(),
        "dense": dense,
        "plain": plain,
        "rows": rows,
        "tuning": tuning.to_dict(),
        "probes": campaign.settings.probes,
        "device": str(campaign.device),
        "precision": precision_of(campaign.device),
    } | provenance(campaign.revision)
    write_json(out, record)
    return record


def plain_epoch(model: nn.Module, data: Encoded, tuning: Tuning) -> dict[str, Any]:
    """An epoch of steps that are not recorded, or as much of it as the tuning allows, on a copy that is thrown away:
    its seconds, and the memory that its largest step needs, None where that is not counted."""
    device, held = data.labels.device, sum(p.numel() * p.element_size() for p in model.parameters())
    with use_of(device) as use:
        tuned = tune([copy.deepcopy(model)], data, replace(tuning, epochs=1), graphs=False)[0]
    memory = None if use.peak_memory is None else use.peak_memory - held  # the model itself is there as well
    epoch = tuned.seconds / tuned.steps * (len(data) // tuning.batch)
    return {"seconds_per_epoch": epoch, "steps": tuned.steps, "step_memory": memory}

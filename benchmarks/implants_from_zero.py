"""How many implants of the trained ResNet56 networks are still exactly zero, and what they have in common.

    python benchmarks/implants_from_zero.py

An implant that starts at zero puts out zeros, which BatchNorm turns into its bias. Where that is negative and a ReLU
follows, zeros go on and no gradient comes back, so neither the implant nor the bias ever changes sign. Reads the
networks with implants that are in zoo/, where `hap reproduce implants` puts them, and writes
results/cifar10/implants-from-zero.json. What that says of networks that are not in zoo/ any more stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hap.io.checkpoint import load, read
from hap.utils.atomic_files import write_json
from hap.workflow.config import PruneStep
from hap.workflow.networks import new_network
from hap.workflow.provenance import provenance
from hap_reproduction.cifar10.job import Folders, Job
from hap_reproduction.cifar10.jobs import jobs
from hap_reproduction.files import read_record

FOLDERS = Folders(Path("results/cifar10"), Path("zoo"), Path("runs/cifar10"))
OUT = FOLDERS.results / "implants-from-zero.json"


def count(job: Job) -> dict[str, Any]:
    """Implants of a trained network: all, those still zero, those behind which the dense BatchNorm has a bias below
    zero, and those that are both."""
    assert job.dense is not None and isinstance(job.prune, PruneStep)
    path = FOLDERS.network(job.name)
    trained, dense = (load(file, new_network(job.model, 10)) for file in (path, FOLDERS.dense(job.dense)))
    plan = read(path).plan
    assert plan is not None
    zero, negative = [], []
    for graft in plan.grafts:
        bias = dense.get_parameter(graft.module.replace("conv", "bn") + ".bias")
        implant = trained.get_submodule(graft.module + ".implant")
        zero.append((implant.conv.weight == 0).flatten(1).all(1))  # type: ignore[operator, union-attr]
        negative.append(bias[list(graft.rows)] < 0)
    still, below = torch.cat(zero), torch.cat(negative)
    return {
        "network": job.name,
        "init": job.prune.implant_init,
        "implants": len(still),
        "zero": int(still.sum()),
        "negative_bias": int(below.sum()),
        "zero_and_negative_bias": int((still & below).sum()),
    }


def known() -> dict[str, dict[str, Any]]:
    """The rows of the last time by the name of their network."""
    if not OUT.exists():
        return {}
    return {row["network"]: row for row in read_record(OUT, ("rows",), "delete it to count anew")["rows"]}


def main() -> None:
    wanted = [job for job in jobs() if job.model == "resnet56" and "-paper-implant" in job.name]
    found = known() | {job.name: count(job) for job in wanted if FOLDERS.network(job.name).exists()}
    order = {job.name: place for place, job in enumerate(wanted)}
    rows = sorted(found.values(), key=lambda row: order.get(row["network"], len(order)))
    write_json(OUT, {"kind": "hap-implants-from-zero", "format": 1, "rows": rows} | provenance())
    for row in rows:
        dead = f"{row['zero']} of {row['implants']} implants are zero"
        print(f"{row['network']}: {dead}, {row['zero_and_negative_bias']} of them behind a negative bias")


if __name__ == "__main__":
    main()

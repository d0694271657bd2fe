"""Prune many models of other libraries, one process each, and write down what became of each.

python -m hap.experiments.zoo tv:resnet18        # one model: prints its record as JSON
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hap
from hap.errors import HapError
from hap.files import write_json
from hap.provenance import provenance

Record = dict[str, Any]


def build(spec: str) -> tuple[nn.Module, Tensor]:
    """A randomly initialised model and an example: `tv:NAME` (torchvision), `timm:NAME` or `hap:NAME`."""
    family, _, name = spec.partition(":")
    torch.manual_seed(0)
    if family == "tv":
        tv = import_torchvision()
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return tv.models.get_model(name, weights=None, **options).eval(), torch.randn(1, 3, *_side(name))
    if family == "timm":
        import_torchvision()
        import timm

        model = timm.create_model(name).eval()
        return model, torch.randn(1, *model.pretrained_cfg["input_size"])
    if family == "hap":
        return hap.models.build(name).eval(), torch.randn(1, *hap.models.info(name).input_shape)
    raise HapError(f"model is {spec!r}; expected tv:NAME, timm:NAME or hap:NAME")


def _side(name: str) -> tuple[int, int]:
    return (299, 299) if name == "inception_v3" else (224, 224)


def import_torchvision() -> Any:
    """torchvision, also where its compiled operators do not fit this torch: then their names alone are declared."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(50):
        try:
            import torchvision

            return torchvision
        except RuntimeError as error:
            if (missing := re.search(r"torchvision::(\w+) does not exist", str(error))) is None:
                raise
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
    raise HapError("torchvision cannot be imported: too many operators are missing")


def measure(spec: str, flops: float) -> Record:
    """Prune one model by magnitude to a share of its FLOPs, checked by running it; seconds are of one thread."""
    torch.set_num_threads(1)
    model, example = build(spec)
    record: Record = {"model": spec, "flops": flops, "revision": provenance()["revision"]}
    times = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = work()
        times[name] = time.perf_counter() - begun
        return result

    try:
        with torch.no_grad():
            timed("export", lambda: torch.export.export(model, (example,), strict=False))
        groups = timed("trace", lambda: hap.trace(model, example))
        scores = hap.score(model, groups, None, None, "magnitude")
        plan = timed("plan", lambda: hap.plan(groups, scores, hap.Budget(flops=flops)))
        timed("apply", lambda: hap.apply_(model, plan, example=example))
        count = hap.cost(model, example)
        record |= {
            "verified": True, "groups": len(groups), "units": groups.units, "exact": plan.exact,
            "params": [plan.before.params, plan.after.params], "macs": [plan.before.macs, plan.after.macs],
            "counted": [count.params, count.macs], "frozen": [f"{f.what}: {f.why}" for f in groups.frozen][:20],
        }  # fmt: skip
    except Exception as error:  # whatever a foreign model raises is the record's reason
        record |= {"verified": False, "why": f"{type(error).__name__}: {str(error).strip()}"[:400]}
    return record | {"seconds": times}


def sweep(specs: Sequence[str], out: Path, flops: float = 0.5, processes: int = 1, seconds: float = 120,
          say: Callable[[str], None] = print) -> list[Record]:  # fmt: skip
    """Measure every model in a process of its own; what is in `out` already is not done again."""
    known: dict[str, Record] = {}
    if out.exists():
        known = {r["model"]: r for r in json.loads(out.read_text(encoding="utf-8"))["models"] if r["flops"] == flops}

    def one(spec: str) -> Record:
        return known[spec] if spec in known else _in_process(spec, flops, seconds)

    with ThreadPoolExecutor(processes) as pool:
        for record in pool.map(one, specs):
            known[record["model"]] = record
            say(f"{'ok  ' if record['verified'] else 'FAIL'} {record['model']} {record.get('why', '')}")
            done = [known[s] for s in specs if s in known]
            write_json(
                out,
                {"kind": "hap-zoo", "format": 1, "flops": flops, "limit_seconds": seconds, "models": done}
                | provenance(),
            )
    return [known[s] for s in specs]


def _in_process(spec: str, flops: float, seconds: float) -> Record:
    command = [sys.executable, "-m", "hap.experiments.zoo", spec, str(flops)]
    record = {"model": spec, "flops": flops, "verified": False}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    except subprocess.TimeoutExpired:
        return record | {"why": f"took longer than {seconds:.0f} s"}
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        return record | {"why": (run.stderr.strip().splitlines() or ["no output"])[-1][:400]}
    return json.loads(lines[-1])


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.5)))

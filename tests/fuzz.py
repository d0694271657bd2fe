"""Every promise on random modules: `python tests/fuzz.py --count 2000 --start 0`, which writes results/fuzz.json.

A module is traced in two ways, pruned by random plans, and each plan is carried out, compared with the module whose
removed slices are zero, counted, and written to JSON and back. A failure names its seed:
`python tests/fuzz.py --start SEED --count 1` runs that one again and shows where it went wrong.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import hap
from checks import check_pruned, random_plan, run
from hap.graph.capture import capture
from hap.tracing.trace import trace_captured
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from random_modules import make

OUT = Path(__file__).parents[1] / "results" / "fuzz.json"


def settings(seed: int) -> list[tuple[str, bool]]:
    """The two ways in which a module is traced: both couplings, one of them with the residual stream."""
    return [("joint", seed % 2 == 0), ("union", seed % 2 == 1)]


def check_seed(seed: int) -> dict[str, int]:
    """All promises on one module. Says how many units were found, plans tried, and plans whose equality is promised.
    It is captured once for both traces, which takes longer than all else of them."""
    model, example = make(seed)
    assert all(x.isfinite().all() for x in run(model, example)), "the module of this seed is not finite"
    seen = {"units": 0, "plans": 0, "exact": 0}
    captured = capture(model, example)
    for coupling, stream in settings(seed):
        groups = trace_captured(captured, model, example, coupling, (), stream)
        seen["units"] += groups.units
        for share in (0.3, 0.8):
            plan = random_plan(groups, seed, share, hap.Pointwise(init="center") if share == 0.3 else None)
            check_pruned(model, groups, plan, example)
            assert hap.Plan.from_json(plan.to_json()) == plan, "the plan is another one after JSON"
            seen["plans"] += 1
            seen["exact"] += plan.exact
    return seen


def failure(seed: int, error: BaseException) -> dict[str, Any]:
    """What went wrong, in a line, and how to see it again."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if "hap" in f.filename or "tests" in f.filename), frames[-1])
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return {
        "seed": seed,
        "blocks": make(seed)[0].blocks,
        "error": f"{type(error).__name__}: {lines[0]}",
        "where": f"{Path(where.filename).name}:{where.lineno} {where.name}",
        "again": f"python tests/fuzz.py --start {seed} --count 1",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Check random modules.")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=2000, help="how many seeds")
    parser.add_argument("--out", type=Path, default=OUT, help="where the result goes, if of more than one seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, failures = time.perf_counter(), []
    done = {"start": options.start, "count": 0, "units": 0, "plans": 0, "exact": 0}
    for seed in range(options.start, options.start + options.count):
        try:
            for name, number in check_seed(seed).items():
                done[name] += number
        except Exception as error:  # whatever it is, it is a finding
            failures.append(failure(seed, error))
            print(failures[-1], flush=True)
            if options.count == 1:
                raise
        done["count"] += 1
        record = {**done, "failures": failures, "seconds": round(time.perf_counter() - began, 1)}
        if options.count > 1 and done["count"] in (options.count, *range(0, options.count, 100)):  # may be cut short
            write_json(options.out, record | provenance())
    print(f"{done['count']} modules, {len(failures)} failures, {time.perf_counter() - began:.0f} s, {done}")


if __name__ == "__main__":
    main()

"""Prune many models of other libraries, one process each, and write down what became of each.

python -m hap.experiments.zoo tv:resnet18 0.5 hap       # one model: prints its record as JSON
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hap
from hap.errors import HapError
from hap.examples import call_arguments, run
from hap.experiments.zoo_models import build
from hap.experiments.zoo_peer import measure_peer
from hap.files import write_json
from hap.groups import Groups
from hap.parts import captures, parts
from hap.provenance import provenance

Record = dict[str, Any]
PEER = "torch_pruning"
EXPORT = "exported"


_WAYS: dict[str, Callable[[nn.Module, Any], tuple[nn.Module, Groups]]] = {
    "in place": lambda model, example: (model, hap.trace(model, example)),
    "as a graph": hap.rewrite,
    "with its stream": lambda model, example: (model, hap.trace(model, example, stream=True)),
}


def measure(spec: str, flops: float, export: bool = False) -> Record:
    """Prune one model by magnitude to a share of its FLOPs, checked by running it; seconds are of one thread.

    A model that torch.export cannot capture is pruned by its parts, and one that cannot be pruned that far in place as
    the graph that hap.rewrite makes of it, or else with its residual stream. With `export`, it also says how equal the
    pruned model's outputs are after export.
    """
    torch.set_num_threads(1)
    model, example = build(spec)
    record: Record = {"model": spec, "flops": flops, "revision": provenance()["revision"]}
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return work()
        finally:
            seconds[name] = time.perf_counter() - begun

    subject, inputs = model, example
    try:
        outline = None
        if not timed("export", lambda: captures(model, *call_arguments(example))):
            outline = _outline(run(model, example))
            subject = timed("parts", lambda: parts(model, example))
            record["parts"], inputs = list(dict.fromkeys(subject.names)), subject.example
            timed("export", lambda: captures(subject, *call_arguments(inputs)))
        for how, trace in _WAYS.items():
            record["how"] = how
            subject, groups = timed("trace", partial(trace, subject, inputs))
            scores = hap.score(subject, groups, None, None, "magnitude")
            try:
                plan = timed("plan", partial(hap.plan, groups, scores, hap.Budget(flops=flops)))
                break
            except HapError as error:
                record["why_not_in_place"] = str(error)
                seconds["ways_that_did_not_do"] = seconds.get("ways_that_did_not_do", 0) + seconds["trace"]
                if how == list(_WAYS)[-1]:
                    raise
        timed("apply", lambda: hap.apply_(subject, plan, example=inputs))
        count = hap.cost(subject, inputs)
        record |= {
            "verified": True, "groups": len(groups), "units": groups.units, "exact": plan.exact,
            "params": [plan.before.params, plan.after.params], "macs": [plan.before.macs, plan.after.macs],
            "counted": [count.params, count.macs], "frozen": [f"{f.what}: {f.why}" for f in groups.frozen][:20],
        }  # fmt: skip
        if record["counted"] != [plan.after.params, plan.after.macs]:
            record |= {"verified": False, "why": "counted costs are not those planned"}
        if outline is not None and _outline(run(model, example)) != outline:
            record |= {"verified": False, "why": "the outputs of the whole model are of another kind"}
    except Exception as error:  # whatever a foreign model raises is the record's reason
        record |= {"verified": False, "why": f"{type(error).__name__}: {str(error).strip()}"[:400]}
    record["seconds"] = seconds
    if export and record["verified"]:
        record["exported"] = exported(subject, inputs)
        if any(isinstance(gap, str) for gap in record["exported"].values()):  # is it the pruning, or the model?
            dense, example = build(spec)
            dense = parts(dense, example) if "parts" in record else dense
            record["exported_dense"] = exported(dense, dense.example if "parts" in record else example)
    return record


def exported(model: nn.Module, example: Any) -> Record:
    """How far outputs after export are from those of the pruned model, relative to their size; or why not."""
    args, kwargs = call_arguments(example)
    wanted = [x for x in pytree.tree_leaves(run(model, example)) if isinstance(x, Tensor)]
    found: Record = {}

    def gap(outputs: Sequence[Tensor]) -> float:
        pairs = [(a.double(), b.double()) for a, b in zip(wanted, outputs, strict=True) if a.numel()]
        return float(torch.stack([(a - b).abs().max() / a.abs().max().clamp_min(1e-12) for a, b in pairs]).max())

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for ending, outputs in ((".pt2", _program_outputs), (".onnx", _onnx_outputs)):
            try:
                path = hap.export(Path(folder) / f"model{ending}", model, example, dynamic_batch=False)
                found[ending] = gap(outputs(path, args, kwargs))
            except Exception as error:  # whatever keeps a foreign model from it is the record's reason
                found[ending] = f"{type(error).__name__}: {str(error).strip()}"[:300]
    return found


def _program_outputs(path: Path, args: Any, kwargs: Any) -> list[Tensor]:
    outputs = torch.export.load(path).module()(*args, **kwargs)
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def _onnx_outputs(path: Path, args: Any, kwargs: Any) -> list[Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    names = [i.name for i in session.get_inputs()]
    feeds = dict(zip(names, (x.numpy() for x in given), strict=True))
    return [torch.from_numpy(x) for x in session.run(None, feeds)]


def _outline(outputs: Any) -> Any:
    """What stays the same whatever the values are: a detector finds more or fewer boxes, but boxes."""
    leaves, structure = pytree.tree_flatten(outputs)
    return structure, [(x.dtype, x.ndim) if isinstance(x, Tensor) else type(x) for x in leaves]


def sweep(specs: Sequence[str], out: Path, flops: float = 0.5, processes: int = 1, seconds: float = 120,
          retry: bool = False, say: Callable[[str], None] = print) -> list[Record]:  # fmt: skip
    """Measure every model in a process of its own; then torch-pruning on each, where that is installed; then export.

    What is in `out` already is not done again; with `retry`, what failed there is.
    """
    known = _known(out, flops, specs if retry else ())

    def ours(spec: str) -> Record:
        return known.get(spec) or _in_process(spec, flops, seconds)

    def with_peer(spec: str) -> Record:
        record = known[spec]
        if PEER in record:
            return record
        peer = _in_process(spec, flops, seconds, PEER)
        return record | {PEER: {k: v for k, v in peer.items() if k not in ("model", "flops")}}

    def with_export(spec: str) -> Record:
        record = known[spec]
        if EXPORT in record or not record["verified"]:
            return record
        found = _in_process(spec, flops, seconds, EXPORT)
        return record | {EXPORT: found.get("why"), **{k: v for k, v in found.items() if k.startswith(EXPORT)}}

    for work in (ours, with_peer, with_export) if _has_peer() else (ours, with_export):
        with ThreadPoolExecutor(processes) as pool:
            for done in as_completed([pool.submit(work, spec) for spec in specs]):
                record = done.result()
                known[record["model"]] = record
                say(f"{_verdict(record)} {record['model']} {record.get('why', '')}")
                write_json(
                    out,
                    {"kind": "hap-zoo", "format": 2, "flops": flops, "limit_seconds": seconds, "processes": processes}
                    | {
                        "models": [known[s] for s in dict.fromkeys((*specs, *known)) if s in known],
                        "versions": _versions(),
                    }
                    | provenance(),
                )
    return [known[s] for s in specs]


def _has_peer() -> bool:
    return importlib.util.find_spec(PEER) is not None


def _known(out: Path, flops: float, again: Sequence[str]) -> dict[str, Record]:
    """Records of an earlier sweep, without failures of models that are to be tried again."""
    if not out.exists():
        return {}
    records = json.loads(out.read_text(encoding="utf-8"))["models"]
    return {r["model"]: r for r in records if r["flops"] == flops and (r["verified"] or r["model"] not in again)}


def _verdict(record: Record) -> str:
    peer = record.get(PEER)
    beside = "" if peer is None else " beside ok  " if peer["verified"] else " beside FAIL"
    return ("ok  " if record["verified"] else "FAIL") + beside


def _versions() -> dict[str, str]:
    """The libraries whose models were built."""
    names = ("torchvision", "timm", "transformers", "torch_pruning")
    return {n: importlib.metadata.version(n) for n in names if importlib.util.find_spec(n)}


def _in_process(spec: str, flops: float, seconds: float, tool: str = "hap") -> Record:
    command = [sys.executable, "-m", "hap.experiments.zoo", spec, str(flops), tool]
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


def main(spec: str, flops: str, tool: str) -> None:
    torch.compiler.set_stance("force_eager")  # parts of torchvision compile themselves where their kernels are missing
    if tool == PEER:
        torch.set_num_threads(1)
        record = measure_peer(lambda: build(spec), float(flops))
    else:
        record = measure(spec, float(flops), export=tool == EXPORT)
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])

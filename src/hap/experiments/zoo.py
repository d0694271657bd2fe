"""Prune many models of other libraries, one process each, and write down what became of each."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hap.errors import HapError
from hap.experiments.zoo_summary import EXPORT, PEER, Record, equal, summary
from hap.files import write_json
from hap.provenance import provenance

FORMAT = 3
Job = tuple[str, str]
"""A model and the tool that prunes it: "hap" or "torch_pruning"."""

Found = dict[Job, Record]
ALONE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {
    "CUDA_VISIBLE_DEVICES": ""
}
"""The environment of a process: one thread on the CPU."""


def sweep(specs: Sequence[str], out: Path, flops: float = 0.5, processes: int = 1, seconds: float = 120,
          retry: bool = False, revision: str | None = None, say: Callable[[str], None] = print) -> Record:  # fmt: skip
    """Measure every model in a process of its own, and torch-pruning on each in another, where that is installed.

    They start in the order given, so the slowest should come first. What is in `out` already is not done again; with
    `retry`, what failed there is. Returns what it wrote to `out`, which it does after every process that ends.
    """
    specs = list(dict.fromkeys(specs))
    found = _known(out, flops, retry)
    about: Record = {
        "kind": "hap-zoo",
        "format": FORMAT,
        "flops": flops,
        "limit_seconds": seconds,
        "processes": processes,
    }
    about |= {"versions": _versions()} | provenance(revision)
    about["hardware"] |= {"gpu": None, "threads": 1}  # those of a model's process
    tools = ("hap", PEER) if _has_peer() else ("hap",)
    jobs = [(spec, tool) for spec in specs for tool in tools if (spec, tool) not in found]

    def write() -> Record:
        names = [spec for spec in dict.fromkeys((*specs, *(s for s, _ in found))) if (spec, "hap") in found]
        models = [found[s, "hap"] | ({PEER: found[s, PEER]} if (s, PEER) in found else {}) for s in names]
        result = about | {"summary": summary(models, seconds), "models": models}
        write_json(out, result)
        return result

    def done(job: Job, record: Record) -> None:
        spec, tool = job
        if tool == "hap":
            origin = {"revision": about["revision"], "cpu": about["hardware"]["cpu"]}
            record = {"model": spec, "flops": flops} | origin | record
        found[job] = record
        write()
        left = sum(job not in found for job in jobs)
        say(f"{left:4} left  {tool:13}  {'ok  ' if record['verified'] else 'FAIL'} {spec} {record.get('why', '')}")

    asyncio.run(_all(jobs, flops, seconds, processes, done))
    return write()


async def _all(jobs: Iterable[Job], flops: float, seconds: float, processes: int,
               done: Callable[[Job, Record], None]) -> None:  # fmt: skip
    """So many processes at a time. Ctrl-C cancels this, and each job ends its process."""
    gate = asyncio.Semaphore(processes)

    async def one(job: Job) -> None:
        async with gate:
            record = await _in_process(job, flops, seconds)
        done(job, record)

    try:
        async with asyncio.TaskGroup() as group:  # which waits for all of them, also when it is cancelled
            for job in jobs:
                group.create_task(one(job))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _in_process(job: Job, flops: float, seconds: float) -> Record:
    """The last record that the process printed; however it ended, there is one, with a reason."""
    spec, tool = job
    command = (sys.executable, "-W", "ignore", "-m", "hap.experiments.zoo_worker", spec, str(flops), tool, str(seconds))
    patience = 3 * seconds + 300  # it keeps to its limits itself, unless it hangs where nothing can interrupt it
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=errors, env=os.environ | ALONE,
            start_new_session=True,
        )  # fmt: skip
        ending = ""
        try:
            await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            ending = f"did not end in {patience:.0f} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        output.seek(0)
        errors.seek(0)
        record = _last_record(output.read())
        if process.returncode:
            ending = ending or _ending(process.returncode, errors.read())
            record = _cut_short(record, ending)
    return record


def _last_record(output: bytes) -> Record:
    """Libraries may print lines of their own; half a line is none."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "verified" in record:
            return record
    return {"verified": False}


def _cut_short(record: Record, ending: str) -> Record:
    """What is known of a model whose process died: pruned already, it died in its export."""
    if record["verified"]:
        return record | {EXPORT: {".pt2": ending, ".onnx": ending}}
    return record | {"why": ending}


def _ending(code: int, errors: bytes) -> str:
    if code < 0:
        return f"the process was killed: {signal.Signals(-code).name}"
    lines = errors.decode(errors="replace").strip().splitlines()
    return (lines or [f"the process ended with status {code}"])[-1][:400]


def _has_peer() -> bool:
    return importlib.util.find_spec(PEER) is not None


def _known(out: Path, flops: float, retry: bool) -> Found:
    """Records of an earlier sweep with the same libraries, without failures if these are to be tried again."""
    if not out.exists():
        return {}
    before = json.loads(out.read_text(encoding="utf-8"))
    here = {"format": FORMAT, "flops": flops, "versions": _versions()}
    if other := [
        f"{key} {before.get(key)} instead of {value}" for key, value in here.items() if before.get(key) != value
    ]:
        raise HapError(f"{out} is of another sweep, with {', '.join(other)}; choose another --out or move it away")
    found: Found = {}
    for record in before["models"]:
        peer = record.pop(PEER, None)
        if not (retry and (not record["verified"] or not equal(record))):
            found[record["model"], "hap"] = record
        if peer and not (retry and "seconds" not in peer):  # without seconds, its process died
            found[record["model"], PEER] = peer
    return found


def _versions() -> dict[str, str]:
    """The libraries that matter: whose models were built, what pruned beside us, and what ran the exported ones."""
    names = ("torch", "torchvision", "timm", "transformers", PEER, "onnx", "onnxscript", "onnxruntime")
    return {name: _version(name) for name in names if importlib.util.find_spec(name)}


def _version(name: str) -> str:
    """A package that lies in a plain folder has no metadata; it may know its version itself."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))

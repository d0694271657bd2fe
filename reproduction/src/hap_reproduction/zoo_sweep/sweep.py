"""Prune many models of other libraries, one process each, and write down what became of each."""

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
from hap.utils.atomic_files import write_json
from hap.workflow.provenance import provenance
from hap_reproduction.zoo_sweep.clock import TOO_LARGE
from hap_reproduction.zoo_sweep.summary import EXPORT, PEER, Record, equal, summary

FORMAT = 4
Job = tuple[str, str]
"""A model and the tool that prunes it: "hap" or "torch_pruning"."""

Found = dict[Job, Record]
ALONE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""The environment of a process: one thread on the CPU, and memory that was freed is kept for what comes next: to a
virtual machine a new gigabyte may take seconds to get, more than all that is measured."""


def sweep(
    specs: Sequence[str],
    out: Path,
    flops: float = 0.5,
    processes: int = 1,
    seconds: float = 120,
    memory: float = 16,
    retry: bool = False,
    again: bool = False,
    revision: str | None = None,
    say: Callable[[str], None] = print,
) -> Record:
    """Measure every model in a process of its own, and torch-pruning on each in another, where that is installed.

    They start in the order given, so the slowest should come first. What is in `out` already is not done again; with
    `retry`, what failed there is, and with `again` all that is not of torch-pruning. Returns what it wrote to `out`,
    which it does after every process that ends.
    """
    specs = list(dict.fromkeys(specs))
    found = _known(out, flops, seconds, retry)
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
    every = [(spec, tool) for spec in specs for tool in tools]
    jobs = [job for job in every if job not in found or (again and job[1] == "hap")]
    left = set(jobs)

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
        left.discard(job)
        say(f"{len(left):4} left  {tool:13}  {'ok  ' if record['verified'] else 'FAIL'} {spec} {record.get('why', '')}")

    asyncio.run(_all(jobs, flops, seconds, memory, processes, done))
    return write()


async def _all(
    jobs: Iterable[Job],
    flops: float,
    seconds: float,
    memory: float,
    processes: int,
    done: Callable[[Job, Record], None],
) -> None:
    """Hand out the jobs in turn to so many processes. Ctrl-C cancels this, and every process is killed."""
    waiting = iter(jobs)

    async def work() -> None:
        worker = Worker(flops, seconds, memory)
        try:
            for job in waiting:
                done(job, await worker.measure(job))
        finally:
            await worker.kill()
            worker.errors.close()

    try:
        async with asyncio.TaskGroup() as group:  # which waits for all of them, also when it is cancelled
            for _ in range(processes):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


class Worker:
    """A process that measures models, started when there is something to do and again after it died."""

    def __init__(self, flops: float, seconds: float, memory: float):
        self.flops, self.seconds, self.memory = flops, seconds, memory
        self.patience = 3 * seconds + 300  # it keeps to its limits itself, unless it hangs where nothing can stop it
        self.process: asyncio.subprocess.Process | None = None
        self.errors = tempfile.TemporaryFile("ab+")  # noqa: SIM115 (it goes with the worker)

    async def measure(self, job: Job) -> Record:
        """The last record that the process printed of this model; however it ended, there is one, with a reason."""
        records: list[Record] = [{"verified": False}]
        try:
            async with asyncio.timeout(self.patience):
                code = await self._ask(job, records)
        except TimeoutError:
            await self.kill()
            return _cut_short(records[-1], f"did not end in {self.patience:g} s")
        return _cut_short(records[-1], _ending(code, self._said())) if code else records[-1]

    async def _ask(self, job: Job, records: list[Record]) -> int:
        """Adds what the process prints; returns how it ended."""
        process = self.process = self.process or await self._start()
        assert process.stdin is not None and process.stdout is not None
        spec, tool = job
        self.errors.seek(0)  # the process writes on from there
        self.errors.truncate()
        process.stdin.write(json.dumps([spec, self.flops, tool, self.seconds, self.memory]).encode() + b"\n")
        while line := await process.stdout.readline():
            found = _parsed(line)
            if "ended" in found:
                return int(found["ended"])
            if "verified" in found:
                records.append(found)
        self.process = None
        return await process.wait() or 1

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "ignore",
            "-X",
            "faulthandler",
            "-m",
            "hap_reproduction.zoo_sweep.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | ALONE,
            start_new_session=True,
            limit=2**24,
        )

    def _said(self) -> list[str]:
        """The lines that the process wrote to its standard error since it was asked last."""
        self.errors.seek(0)
        return [line for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]

    async def kill(self) -> None:
        """End the process and what it has forked."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _parsed(line: bytes) -> Record:
    """Libraries may print lines of their own; those are none."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _cut_short(record: Record, ending: str) -> Record:
    """What is known of a model whose process died: pruned already, it died in its export; else its seconds are not."""
    if record["verified"]:
        return record | {EXPORT: {".pt2": ending, ".onnx": ending}}
    return {key: value for key, value in record.items() if key != "seconds"} | {"why": ending}


def _ending(code: int, said: Sequence[str] = ()) -> str:
    """How a process ended, and what it said last: the line before Python's report of where it was, and the first."""
    if code == TOO_LARGE:
        return "needed more memory than it may have"
    fatal = next((i for i, line in enumerate(said) if line.startswith("Fatal Python error")), len(said))
    where = [line.strip() for line in said[fatal:] if line.lstrip().startswith("File ")]
    how = f"was killed: {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"the process {how}" + "".join(f" ({line[:300]})" for line in (*said[:fatal][-1:], *where[:1]))


def _has_peer() -> bool:
    return importlib.util.find_spec(PEER) is not None


def _known(out: Path, flops: float, seconds: float, retry: bool) -> Found:
    """Records of an earlier sweep with the same libraries and limits, and no failures if these are tried again."""
    if not out.exists():
        return {}
    before = json.loads(out.read_text(encoding="utf-8"))
    here = {"format": FORMAT, "flops": flops, "limit_seconds": seconds, "versions": _versions()}
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

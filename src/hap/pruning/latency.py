"""latency: how long models take on an example, measured where they will run: eager, compiled or in onnxruntime."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.errors import Argument, HapError, optional_package
from hap.execution.calling import call_arguments, eval_mode
from hap.io.export import capture, export

Call = Callable[[], Any]
IN_A_ROW = 10
"""Calls between two waits for a GPU, as in a program that keeps it busy: waiting for each one would be timed too."""


@dataclass(frozen=True)
class Latency:
    """Milliseconds per call: `median` of the `times`, one from each of `runs` rounds after `warmup` uncounted ones,
    and `spread`, the distance between their quartiles. Figures of different runs are not for comparing."""

    median: float
    spread: float
    runs: int
    warmup: int
    threads: int
    device: str
    backend: str
    times: tuple[float, ...] = field(repr=False)

    def ratio_to(self, other: Latency) -> float:
        """This time divided by that of a model timed in the same run: the median of the ratios of the rounds.

        What slows the machine down for a while slows both in that round, so the ratio is steadier than the times.
        """
        return statistics.median(self.ratios_to(other))

    def ratios_to(self, other: Latency) -> list[float]:
        if len(self.times) != len(other.times):
            raise HapError(f"{len(self.times)} rounds against {len(other.times)}: time both with hap.compare_latency")
        return [mine / theirs for mine, theirs in zip(self.times, other.times, strict=True)]


def latency(
    model: nn.Module,
    example: Any,
    runs: int = 50,
    warmup: int = 10,
    *,
    backend: str = "eager",
    threads: int | None = None,
) -> Latency:
    """Time the model in eval mode on the example.

    >>> hap.latency(nn.Linear(4, 2), torch.randn(1, 4), runs=5).runs
    5

    Arguments: `runs` rounds are timed after `warmup` others. `backend`: "eager", the model as it is; "compile",
    exported with BatchNorms folded and compiled; "onnxruntime", exported the same way to ONNX, on the CPU. `threads`:
    of the CPU; None leaves torch's number.
    Returns: milliseconds per call. Those of different runs are not for comparing: `hap.compare_latency` is.
    """
    return compare_latency([model], example, runs, warmup, backend=backend, threads=threads)[0]


def compare_latency(
    models: Sequence[nn.Module],
    example: Any,
    runs: int = 50,
    warmup: int = 10,
    *,
    backend: str = "eager",
    threads: int | None = None,
) -> list[Latency]:
    """Time several models in turns, so that a change in the machine's load meets them all.

    >>> wide, narrow = nn.Linear(500, 2000), nn.Linear(500, 5)
    >>> slow, fast = hap.compare_latency([wide, narrow], torch.randn(64, 500), runs=5)
    >>> slow.ratio_to(fast) > 1
    True

    Arguments: those of `hap.latency`.
    Returns: one `Latency` for each model. `slow.ratio_to(fast)` says how many times faster the second is.
    """
    with Stopwatch(example, backend, threads) as watch:
        return watch.time([watch.add(model) for model in models], runs, warmup)


class Stopwatch(ExitStack):
    """Times models on one example. A context: inside it the models added are in eval mode, and torch has `threads`."""

    def __init__(self, example: Any, backend: str = "eager", threads: int | None = None):
        if backend not in BACKENDS:
            raise HapError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
        if threads is not None and threads < 1:
            raise HapError(Argument("threads", threads), "; expected at least 1, or None for torch's number")
        super().__init__()
        self.example, self.backend, self.threads = example, backend, threads or torch.get_num_threads()
        tensors = (leaf for leaf in pytree.tree_leaves(call_arguments(example)) if isinstance(leaf, Tensor))
        self.device = next((t.device for t in tensors), torch.device("cpu"))

    def __enter__(self) -> Self:
        self.enter_context(with_threads(self.threads))
        self.enter_context(torch.no_grad())
        return self

    def add(self, model: nn.Module) -> Call:
        """The model, made ready to be called on the example."""
        if any(module.training for module in model.modules()):
            self.enter_context(eval_mode(model))
        return BACKENDS[self.backend](model, self)

    def time(self, calls: Sequence[Call], runs: int, warmup: int) -> list[Latency]:
        """Time what was added, in turns."""
        if runs < 2 or warmup < 0 or not calls:
            raise HapError(f"runs={runs}, warmup={warmup}, {len(calls)} models; expected at least 2, 0 and 1")
        found, how = [], (runs, warmup, self.threads, str(self.device), self.backend)
        for times in zip(*_rounds(calls, self.device, runs, warmup), strict=True):
            low, median, high = statistics.quantiles(times, n=4)
            found.append(Latency(median, high - low, *how, times))
        return found


def _rounds(calls: Sequence[Call], device: torch.device, runs: int, warmup: int) -> list[list[float]]:
    """Milliseconds of each call in each round; every other round goes backwards, so that none is always first. A call
    that comes after another model's is preceded by one that is not counted: it finds the caches as they were."""
    taken = []
    for number in range(warmup + runs):
        times = [0.0] * len(calls)
        for i in range(len(calls))[:: 1 if number % 2 else -1]:
            if len(calls) > 1:
                calls[i]()
            times[i] = _once(calls[i], device)
        taken.append(times)
    return taken[warmup:]


def _once(call: Call, device: torch.device) -> float:
    cuda = device.type == "cuda"
    wait: Call = partial(torch.cuda.synchronize, device) if cuda else lambda: None
    calls = IN_A_ROW if cuda else 1
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) * 1e3 / calls


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """So many threads of torch's inside, as many as before after."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- backends: how a model is called ------------------------------------------------------------------------


def _eager(model: nn.Module, watch: Stopwatch) -> Call:
    args, kwargs = call_arguments(watch.example)
    return torch.inference_mode()(lambda: model(*args, **kwargs))


def _compiled(model: nn.Module, watch: Stopwatch) -> Call:
    """The exported graph, compiled. A graph of its own for each model: torch.compile gives up on a class whose
    instances differ in more than a few ways. On CUDA its kernels are recorded and replayed, since starting them one by
    one takes longer than many of them run; the first calls record."""
    args, kwargs = call_arguments(watch.example)
    cuda = watch.device.type == "cuda"
    graph = capture(model, watch.example).module(check_guards=False)
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, mode="reduce-overhead" if cuda else None)
    try:
        for _ in range(3 if cuda else 1):
            compiled(*args, **kwargs)
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        raise HapError(f"torch.compile fails on {type(model).__name__}: {why}; use another backend") from error
    return lambda: compiled(*args, **kwargs)


def _onnxruntime(model: nn.Module, watch: Stopwatch) -> Call:
    with optional_package("backend 'onnxruntime' needs that package", "export"):
        import onnxruntime
    if watch.device.type != "cpu":
        raise HapError(f"backend 'onnxruntime' times on the CPU, not on {watch.device}; move the model and the example")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = watch.threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or idle sessions slow the one that is timed
    with tempfile.TemporaryDirectory() as folder:
        path = export(Path(folder) / "model.onnx", model, watch.example, dynamic_batch=False)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    tensors = [leaf.numpy() for leaf in pytree.tree_leaves(call_arguments(watch.example)) if isinstance(leaf, Tensor)]
    if len(names) != len(tensors):
        raise HapError(f"the ONNX file reads {len(names)} inputs, but the example has {len(tensors)} tensors")
    feeds = dict(zip(names, tensors, strict=True))
    return lambda: session.run(None, feeds)


BACKENDS: dict[str, Callable[[nn.Module, Stopwatch], Call]] = {
    "eager": _eager,
    "compile": _compiled,
    "onnxruntime": _onnxruntime,
}

"""A process that prunes one model after another for a sweep, each in a fork of itself, so that libraries load once.

It reads jobs from standard input, one JSON line each: model, share of FLOPs, "hap" or "torch_pruning", and the limits
in seconds and GiB. It prints what is known of the model, a line whenever more is known, and at last how its fork ended.
"""

import gc
import importlib
import importlib.util
import json
import os
import resource
import select
import sys
import threading
from typing import Any

import torch

from hap_reproduction.zoo_sweep.clock import TOO_LARGE, failure
from hap_reproduction.zoo_sweep.models import build, import_torchvision
from hap_reproduction.zoo_sweep.ours import measure, warm_up
from hap_reproduction.zoo_sweep.peer import measure_peer

LIBRARIES = ("torchvision", "timm", "transformers", "onnxscript", "torch_pruning")


def main() -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # parts of torchvision compile themselves where their kernels are missing
    _load()
    warm_up()
    gc.freeze()  # what is loaded by now is never garbage, and looking through it would be counted as some model's time
    while line := sys.stdin.readline():
        if not (child := os.fork()):
            _child(*json.loads(line))
        _, status = os.waitpid(child, 0)
        _print({"ended": os.waitstatus_to_exitcode(status)})


def _load() -> None:
    """What a model may need, where it is installed."""
    for name in LIBRARIES:
        if importlib.util.find_spec(name):
            import_torchvision() if name == "torchvision" else importlib.import_module(name)


def _child(spec: str, flops: float, tool: str, limit: float, memory: float) -> None:
    threading.Thread(target=_watch, args=(memory,), daemon=True).start()
    try:
        for record in measure(spec, flops, limit) if tool == "hap" else measure_peer(lambda: build(spec), flops, limit):
            _print(record | {"peak_gib": round(_peak_gib(), 2)})
    except BaseException as error:
        _print(failure(error))
    os._exit(0)


def _watch(memory: float) -> None:
    """End when this needs too much memory, or when the sweep has ended: then standard input does, which it holds."""
    while not select.select([0], [], [], 0.2)[0]:
        if _peak_gib() > memory:
            os._exit(TOO_LARGE)
    os._exit(1)


def _print(record: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{json.dumps(record)}\n")  # on a line of its own, whatever a library has printed before
    sys.stdout.flush()


def _peak_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


if __name__ == "__main__":
    main()

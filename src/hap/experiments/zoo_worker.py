"""One model in a process of its own: prints what is known of it as JSON, a line whenever more is known.

python -m hap.experiments.zoo_worker tv:resnet18 0.5 hap 200
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading

import torch

from hap.experiments.zoo_models import build
from hap.experiments.zoo_ours import measure
from hap.experiments.zoo_peer import measure_peer


def main(spec: str, flops: str, tool: str, limit: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # parts of torchvision compile themselves where their kernels are missing
    limits = float(flops), float(limit)
    for record in measure(spec, *limits) if tool == "hap" else measure_peer(lambda: build(spec), *limits):
        print(json.dumps(record | {"peak_gib": round(_peak_gib(), 2)}), flush=True)


def _end_with_parent() -> None:
    """Standard input is a pipe that only the sweep holds: it ends when the sweep does, however that ends."""
    os.read(0, 1)
    os._exit(1)


def _peak_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


if __name__ == "__main__":
    main(*sys.argv[1:])

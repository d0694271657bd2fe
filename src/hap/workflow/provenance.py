"""Where a result comes from: source revision and hardware."""

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def provenance(revision: str | None = None) -> dict[str, Any]:
    """What every result file carries besides its own configuration."""
    return {
        "revision": revision or _revision(),
        "hardware": {
            "cpu": _cpu_name(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    """Linux tells the model only here; elsewhere the platform module has to do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _revision() -> str:
    """The commit of this source tree, marked when it has changes, or the package's version outside a checkout."""
    folder = Path(__file__).parent
    try:
        if not (folder.parents[2] / ".git").exists():  # installed: a repository around it would not be ours
            raise FileNotFoundError
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        from hap import __version__

        return f"version {__version__}"

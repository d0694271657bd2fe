"""What a training shows while it runs: a progress bar, and TensorBoard scalars when asked for."""

from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hap.errors import HapError
from hap.training.run import Run


class Report:
    """A bar over all steps, with epoch, loss and test accuracy (means over models trained side by side)."""

    def __init__(self, runs: list[Run], first: int, epochs: int, log_dir: str | Path | None, progress: bool) -> None:
        self.runs, self.epochs = runs, epochs
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
        steps = runs[0].steps_per_epoch
        self.task = self.bar.add_task(f"epoch {first}/{epochs}", total=epochs * steps, completed=first * steps)
        self.writer = None if log_dir is None else _tensorboard(log_dir, first)

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        if self.writer is not None:
            self.writer.close()

    def advance(self) -> None:
        self.bar.advance(self.task)

    def epoch(self, epoch: int) -> None:
        """Show and log the last entries of the histories, of epoch `epoch` (from 0)."""
        histories = [run.history for run in self.runs]
        loss = sum(h.loss[-1] for h in histories) / len(histories)
        known = [a for a in (_last_known(h.accuracy) for h in histories) if a is not None]
        text = f"epoch {epoch + 1}/{self.epochs}  loss {loss:.4f}"
        if known:
            text += f"  accuracy {100 * sum(known) / len(known):.2f}%"
        self.bar.update(self.task, description=text)
        if self.writer is not None:
            self._log(self.writer, epoch)

    def _log(self, writer: Any, epoch: int) -> None:
        for index, run in enumerate(self.runs):
            for name, values in run.history.to_dict().items():
                if values[-1] is not None:
                    tag = name if len(self.runs) == 1 else f"{name}/{index}"
                    writer.add_scalar(tag, values[-1], epoch + 1)


def _last_known(values: list[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _tensorboard(log_dir: str | Path, first: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise HapError(
            "logging needs tensorboard, which is missing: pip install 'hessian-aware-pruning[log]'"
        ) from error
    # Entries after the epoch that training resumes from belong to work that was lost.
    return SummaryWriter(str(log_dir), purge_step=first + 1)

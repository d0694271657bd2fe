"""What a training shows while it runs: a progress bar, and TensorBoard scalars when asked for."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hap.errors import HapError
from hap.training.run import Run


class Report:
    """A bar over all steps, with epoch, loss and test accuracy."""

    def __init__(self, run: Run, first: int, log_dir: str | Path | None, progress: bool) -> None:
        self.run, epochs = run, run.recipe.epochs
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
        done = first * run.steps_per_epoch
        self.task = self.bar.add_task(f"epoch {first}/{epochs}", total=run.total, completed=done)
        self.writer = None if log_dir is None else _tensorboard(log_dir, first)

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.writer is not None:
            self.writer.close()

    def advance(self) -> None:
        self.bar.advance(self.task)

    def epoch(self, epoch: int) -> None:
        """Show and log the last entries of the history, of epoch `epoch` (from 0)."""
        history = self.run.history
        text = f"epoch {epoch + 1}/{self.run.recipe.epochs}  loss {history.loss[-1]:.4f}"
        if known := [accuracy for accuracy in history.accuracy if accuracy is not None]:
            text += f"  accuracy {100 * known[-1]:.2f}%"
        self.bar.update(self.task, description=text)
        if self.writer is not None:
            for name, values in history.to_dict().items():
                if values[-1] is not None:
                    self.writer.add_scalar(name, values[-1], epoch + 1)


def _tensorboard(log_dir: str | Path, first: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise HapError(
            "logging needs tensorboard, which is missing: pip install 'hessian-aware-pruning[log]'"
        ) from error
    # Entries after the epoch that training resumes from belong to work that was lost.
    return SummaryWriter(str(log_dir), purge_step=first + 1)

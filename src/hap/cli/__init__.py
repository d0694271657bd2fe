"""The command line: `hap COMMAND`. Errors of the user are one line on stderr and exit status 2."""

from hap import distributed
from hap.cli.app import app
from hap.cli.experiments import demo, report, run
from hap.cli.glue import glue
from hap.cli.inspecting import evaluate, export, info
from hap.cli.pruning import prune, score
from hap.cli.reproduce import reproduce
from hap.cli.training import finetune, train
from hap.cli.zoo import zoo

__all__ = ["app", "main"]

for command, name in (
    (demo, "demo"), (train, "train"), (score, "score"), (prune, "prune"), (finetune, "finetune"), (run, "run"),
    (evaluate, "eval"), (export, "export"), (info, "info"), (report, "report"), (reproduce, "reproduce"), (zoo, "zoo"),
    (glue, "glue"),
):  # fmt: skip
    app.command(name, no_args_is_help=name in ("train", "run", "reproduce", "zoo", "glue"))(command)


def main() -> None:
    """The entry point of `hap`, also for each of the processes that torchrun starts."""
    with distributed.session():
        app()

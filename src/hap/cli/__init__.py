"""The command line: `hap COMMAND`. Errors of the user are one line on stderr and exit status 2.

`app` is the application, how it words errors and how other packages add commands, `options` the options that commands
share, `screen` what is printed. The commands themselves are in `training`, `pruning`, `inspecting` and
`experiments`. Nothing imports from here; start with `pruning`.
"""

from hap.cli.app import add_commands, app
from hap.cli.experiments import demo, report, run
from hap.cli.inspecting import evaluate, export, info
from hap.cli.pruning import order, prune, score
from hap.cli.training import finetune, train
from hap.utils import distributed

__all__ = ["app", "main"]

for command in (demo, train, score, order, prune, finetune, run, evaluate, export, info, report):
    name = "eval" if command is evaluate else command.__name__
    app.command(name, no_args_is_help=command in (train, run))(command)
add_commands()


def main() -> None:
    """The entry point of `hap`, also for each of the processes that torchrun starts."""
    with distributed.session():
        app()

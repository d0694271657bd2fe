"""The application: what all commands share around their work, such as how errors are worded for who typed a command.

Other installed packages add commands to it, such as `hap reproduce` of the package in reproduction/. A package names
them in its pyproject.toml, each with the function that carries it out:

    [project.entry-points."hap.commands"]
    reproduce = "hap_reproduction.cli.reproduce:reproduce"
"""

import sys
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import hap
from hap.cli.screen import error_line
from hap.errors import NO_VALUE, Argument, ForPython, HapError
from hap.utils import distributed


class Commands(TyperGroup):
    """Commands whose users see one line instead of a traceback when they err or press Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HapError as error:
            error_line(f"error: {in_words_of(ctx.invoked_subcommand, error)}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            error_line("interrupted: nothing was written; the same command starts again")
            raise typer.Exit(130) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and (advice := how_to_install(args[0])):
            raise HapError(advice)
        return super().resolve_command(ctx, args)


TOGETHER = ("train", "score", "order", "prune", "finetune", "eval")
"""Commands that several processes of torchrun carry out together."""


app = typer.Typer(
    cls=Commands,
    help="Make trained neural networks smaller and faster: Hessian-aware structured pruning with neural implants.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"hap {hap.__version__}\n")
        raise typer.Exit


@app.callback()
def _hap(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    if distributed.processes() > 1 and (command := ctx.invoked_subcommand) not in TOGETHER:
        raise HapError(
            f"hap {command} runs in one process; start it without torchrun ({', '.join(TOGETHER)} share work)"
        )


# ---- commands of other packages ------------------------------------------------------------------------------

REPRODUCTION = ("reproduce", "glue", "zoo")
"""Commands that the documentation shows and that the package hap-reproduction adds."""


def add_commands() -> None:
    """Add the commands of installed packages, in the order of their names."""
    for entry in sorted(entry_points(group="hap.commands"), key=lambda entry: entry.name):
        app.command(entry.name, no_args_is_help=True)(entry.load())


def how_to_install(command: str) -> str:
    """What to do about a command of a package that is not installed; empty for a name that no package is known for.

    >>> how_to_install("reproduce")
    'hap reproduce comes with the package hap-reproduction, which is not installed: ... in a clone of the repository'
    >>> how_to_install("prune")
    ''
    """
    if command not in REPRODUCTION:
        return ""
    return (
        f"hap {command} comes with the package hap-reproduction, which is not installed: "
        "run pip install ./reproduction in a clone of the repository"
    )


# ---- options instead of arguments in what the library says ---------------------------------------------------

RECIPE_OPTIONS = ("epochs", "lr", "batch", "distill", "seed")
"""The fields of a recipe that have an option of their own."""


def in_words_of(command: str | None, error: HapError) -> str:
    """An error for who typed `hap COMMAND`. `run` reads a file, whose keys are the arguments' own names."""
    return "".join(_typed(piece, command == "run") for piece in error.pieces)


def _typed(piece: Any, file: bool) -> str:
    if isinstance(piece, ForPython):
        return "".join(_typed(p, file) for p in piece.typed)
    if not isinstance(piece, Argument) or _has_no_key(piece, file):
        return str(piece)
    name = piece.name if file else f"--{piece.name.replace('_', '-')}"
    if piece.text or piece.value is NO_VALUE:
        return name
    return f"{name} = {piece.value}" if file else f"{name} {piece.value}"


def _has_no_key(argument: Argument, file: bool) -> bool:
    """Whether there is no option, or no key of a file, that one could name."""
    if argument.text.startswith("recipe field"):
        return file or argument.name not in RECIPE_OPTIONS
    return file and argument.name == "data_root"

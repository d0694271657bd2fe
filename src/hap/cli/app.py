"""The application: what all commands share around their work."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import hap
from hap.cli.plugins import how_to_install
from hap.cli.screen import error_line
from hap.cli.wording import in_words_of
from hap.errors import HapError
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


TOGETHER = ("train", "score", "prune", "finetune", "eval")
"""Commands that several processes of torchrun carry out together."""


def _check_together(command: str | None) -> None:
    if distributed.processes() > 1 and command not in TOGETHER:
        raise HapError(
            f"hap {command} runs in one process; start it without torchrun ({', '.join(TOGETHER)} share work)"
        )


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
    _check_together(ctx.invoked_subcommand)

"""What the commands print: results as tables on stdout, progress and errors on stderr."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hap.planning.plan import Plan
from hap.utils import distributed


def out() -> Console:
    """Stdout as it is now; tests and pipes change it. A pipe has no width, so tables there are not squeezed."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, 120))


def err() -> Console:
    """Stderr, for progress; of several processes that of the first one."""
    return Console(stderr=True, highlight=False, quiet=not distributed.is_first())


def error_line(text: str) -> None:
    """One line on stderr, whatever the message holds."""
    sys.stderr.write(" ".join(text.split()) + "\n")


def say(text: str) -> None:
    """A line of results."""
    out().print(text, markup=False, soft_wrap=True)


def tell_written(path: Path) -> None:
    out().print(f"[green]wrote[/green] {escape(str(path))}", soft_wrap=True)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr for work without a bar; call what it gives to say what is being done."""
    console = err()
    with console.status(escape(text)) as status:

        def update(words: str) -> None:
            status.update(escape(words))
            if not console.is_terminal:
                console.print(words, markup=False, soft_wrap=True)

        yield update


@contextmanager
def resumable(text: str) -> Iterator[None]:
    """Around work that leaves its state on disk: Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        error_line(f"interrupted: {text}")
        raise typer.Exit(130) from error


def tell_step(text: str) -> None:
    err().print(f"[bold cyan]>[/bold cyan] {escape(text)}", soft_wrap=True)


def tell_skipped(text: str) -> None:
    err().print(f"[dim]= {escape(text)}: done before[/dim]", soft_wrap=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, foot: bool = False) -> Table:
    """A table with text on the left of its first column and numbers on the right of the others."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for i, name in enumerate(head):
        made.add_column(name, justify="right" if i else "left", no_wrap=True)
    for i, row in enumerate(rows):
        last = foot and i == len(rows) - 1
        if last:
            made.add_section()
        made.add_row(*map(escape, row), style="bold" if last else None)
    return made


def plan_table(plan: Plan) -> Table:
    """Layers with the number of units before, kept, implanted and removed."""
    rows = []
    for name in plan.kept:
        parts = [len(part[name]) for part in (plan.kept, plan.implanted, plan.removed)]
        rows.append([name, *map(str, (sum(parts), *parts))])
    rows.append(["total", *(str(sum(int(row[i]) for row in rows)) for i in range(1, 5))])
    return table(["layer", "before", "kept", "implanted", "removed"], rows, foot=True)


def share(after: int | float, before: int | float) -> str:
    return f"{100 * after / before:.1f}%" if before else "-"

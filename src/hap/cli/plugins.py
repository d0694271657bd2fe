"""Commands that other installed packages add to `hap`, such as `hap reproduce` of the package in reproduction/.

A package names them in its pyproject.toml, each with the function that carries it out:

    [project.entry-points."hap.commands"]
    reproduce = "hap_reproduction.cli.reproduce:reproduce"
"""

from importlib.metadata import entry_points

import typer

GROUP = "hap.commands"
"""The entry points that name such commands."""
REPRODUCTION = ("reproduce", "glue", "zoo")
"""Commands that the documentation shows and that the package hap-reproduction adds."""


def add_commands(app: typer.Typer) -> None:
    """Add the commands of installed packages to the application, in the order of their names."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
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

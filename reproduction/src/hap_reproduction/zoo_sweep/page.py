"""The figures of docs/architectures.md, from results/zoo.json and from nothing else.

python -m hap_reproduction.zoo_sweep.page      # a test holds the page to the file
"""

import json
from pathlib import Path
from textwrap import fill

from hap.errors import HapError
from hap.utils.atomic_files import write_text
from hap_reproduction.pages.markdown import table
from hap_reproduction.zoo_sweep.summary import (
    ABOVE_HEADS,
    BRIEF,
    EQUAL,
    FAMILY_HEADS,
    TRIALS,
    Record,
    above_rows,
    failures,
    family_rows,
    sentences,
    summary,
)

BEGIN, END = "<!-- from results/zoo.json by python -m hap_reproduction.zoo_sweep.page -->", "<!-- end of it -->"


def figures(result: Record) -> str:
    """The sweep in a table and a few sentences, with a reason for each failure."""
    found = summary(result["models"], result["limit_seconds"])
    opening = (
        f"Pruned by magnitude to {100 * result['flops']:g}% of the FLOPs, without code for single models. *Verified*: "
        "it was run, compared with the dense model in which the same units are zero, at all places of their maps, and "
        "has as many parameters and FLOPs as planned. torch-pruning's bar is lower: something went, and outputs have "
        "the shape they had. *Equal*: "
        f"outputs after export are within {EQUAL:g} of the pruned model's, relative to the largest. {_source(result)}"
    )
    said = "\n".join(f"- {line}" for line in [*sentences(found), *failures(result["models"])])
    above = above_rows(found)
    parts = [fill(opening, 120, break_on_hyphens=False), table(FAMILY_HEADS, family_rows(found)), said]
    return "\n\n".join([*parts, table(ABOVE_HEADS, above)] if above else parts)


def _source(result: Record) -> str:
    hardware, processes = result["hardware"], result["processes"]
    cpus = " and ".join(dict.fromkeys(r.get("cpu", hardware["cpu"]) for r in result["models"]))
    versions = {"torch": hardware["torch"]} | result["versions"]
    with_what = ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions.items())
    brief = sum("trials" in record for record in result["models"])
    again = (
        f" Of {brief} models that take less than {BRIEF} s they are the middle one of {TRIALS} trials." if brief else ""
    )
    return (
        f"Seconds are of one thread on {cpus}, {processes} models at a time, at most {result['limit_seconds']:g} for "
        f"each, in processes that keep the memory they have.{again} With {with_what}."
    )


def rendered(page: str, result: Record) -> str:
    """The page with the figures of this result between its two marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise HapError(f"the page needs the lines {BEGIN!r} and {END!r}, once each")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{figures(result)}\n\n{END}{rest.split(END)[1]}"


def main(root: Path) -> None:
    page = root / "docs" / "architectures.md"
    result = json.loads((root / "results" / "zoo.json").read_text(encoding="utf-8"))
    text = rendered(page.read_text(encoding="utf-8"), result)
    write_text(page, text)


if __name__ == "__main__":
    main(Path.cwd())

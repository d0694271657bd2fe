"""Do tests notice a wrong line? `python tests/mutate.py --sources src/hap/graph --tests tests/graph --count 40`.

Draws small changes of the given modules: another comparison, one more or one less, `and` for `or`, a `not` dropped, a
statement or a constant gone. Each is made in a copy of the tree, on which the given tests run with `-x -n 0`. What they
do not notice has survived: a line without a test, or one that changes nothing. All go into a JSON file. Tests that fail
on the unchanged code, as with another torch, are left out and named there.

With `--root` another checkout is changed, of any layout, so that two revisions can be compared:
`python tests/mutate.py --root ../old --sources src/hap/plans.py --tests tests/test_plan.py`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "reproduction", "examples", "benchmarks", "results", "docs")
COPIED += ("pyproject.toml", "conftest.py", "README.md", "LICENSE")
OTHER = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """The `index`-th change of `kind` in a file, counted in the order of `changes`."""

    file: str
    index: int
    kind: str
    line: int
    before: str
    after: str


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, Any]]:
    """What can be changed: its kind, the node, the field and the value that is put there."""
    silent = {id(n) for node in ast.walk(tree) for n in _not_run(node)}
    for node in ast.walk(tree):
        if id(node) in silent:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
            yield "comparison", node, "ops", [OTHER[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
            yield "arithmetic", node, "op", OTHER[type(node.op)]()
        elif isinstance(node, ast.BoolOp):
            yield "and/or", node, "op", OTHER[type(node.op)]()
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "not", node, "operand", ast.UnaryOp(ast.Not(), node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield "constant", node, "value", not node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield "constant", node, "value", node.value + 1
        for field in ("body", "orelse"):
            statements = getattr(node, field, None)
            for i, statement in enumerate(statements if isinstance(statements, list) else ()):
                if (
                    isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise)
                    and id(statement) not in silent
                ):
                    yield "statement", node, field, [*statements[:i], ast.Pass(), *statements[i + 1 :]]


def _not_run(node: ast.AST) -> Iterator[ast.AST]:
    """Docstrings, annotations, and the text of errors, of which tests say little."""
    parts = [getattr(node, name, None) for name in ("annotation", "returns")]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        parts.append(node)
    if isinstance(node, ast.JoinedStr):
        parts.append(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith(("TYPE_CHECKING", "__name__ == '__main__'")):
        parts.append(node)
    for part in parts:
        yield from ast.walk(part) if part is not None else ()


def mutants_of(root: Path, file: Path) -> Iterator[Mutant]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for index, (kind, node, field, value) in enumerate(changes(tree)):
        old = getattr(node, field)
        if kind == "statement":
            place = next(i for i, (a, b) in enumerate(zip(old, value, strict=True)) if a is not b)
            yield Mutant(str(file.relative_to(root)), index, kind, old[place].lineno, ast.unparse(old[place]), "pass")
        else:
            before, line = ast.unparse(node), node.lineno  # type: ignore[attr-defined]
            setattr(node, field, value)
            yield Mutant(str(file.relative_to(root)), index, kind, line, before, ast.unparse(node))
            setattr(node, field, old)


def mutated(text: str, index: int) -> str:
    """The source with that change. Comments and layout are lost, which no test reads."""
    tree = ast.parse(text)
    _, node, field, value = next(change for i, change in enumerate(changes(tree)) if i == index)
    setattr(node, field, value)
    return ast.unparse(ast.fix_missing_locations(tree))


def command(tests: list[str], *options: str) -> list[str]:
    plain = ["-n", "0", "-q", "--no-header", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *plain, *options, *tests]


def environment(tree: Path) -> dict[str, str]:
    paths = [str(tree / "src"), str(tree / "reproduction" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | own


def failing(tree: Path, tests: list[str]) -> tuple[list[str], float]:
    """Names of the tests that fail on the unchanged tree, and the seconds that all of them take."""
    begun = time.perf_counter()
    ended = subprocess.run(
        command(tests, "-rfE"), cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=3600
    )
    named = [line.split(" ")[1] for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if ended.returncode and not any("::" in name for name in named):
        sys.exit(f"the tests do not run on the unchanged code: {(ended.stdout + ended.stderr)[-2000:]}")
    return named, time.perf_counter() - begun


def run_tests(tree: Path, tests: list[str], left_out: list[str], seconds: float) -> tuple[str, str]:
    """How the tests end on that tree: survived, killed or timed out; and which one noticed it."""
    options = [f"--deselect={name}" for name in left_out]
    try:
        ended = subprocess.run(
            command(tests, "-x", *options),
            cwd=tree,
            env=environment(tree),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return "timed out", ""
    if ended.returncode == 0:
        return "survived", ""
    named = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "killed", " ".join(named[:1]) or (ended.stdout + ended.stderr)[-300:]


def try_mutant(tree: Path, mutant: Mutant, tests: list[str], left_out: list[str], seconds: float) -> dict[str, Any]:
    """The change is made in `tree`, the tests run on it, and it is taken back."""
    file, begun = tree / mutant.file, time.perf_counter()
    text = file.read_text(encoding="utf-8")
    file.write_text(mutated(text, mutant.index), encoding="utf-8")
    try:
        outcome, by = run_tests(tree, tests, left_out, seconds)
    finally:
        file.write_text(text, encoding="utf-8")
    print(f"{outcome}: {mutant.file}:{mutant.line} {mutant.before!r} -> {mutant.after!r}", flush=True)
    return {**asdict(mutant), "outcome": outcome, "by": by, "seconds": time.perf_counter() - begun}


def copy_tree(root: Path, tree: Path) -> None:
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
        elif (root / name).exists():
            shutil.copy(root / name, tree / name)


def revision_of(root: Path) -> str:
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Change the code and see whether tests notice.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout; it is copied and left as it is")
    parser.add_argument("--revision", help="of that checkout, where git cannot tell")
    parser.add_argument("--sources", nargs="+", required=True, help="files or folders of it that are changed")
    parser.add_argument("--tests", nargs="+", required=True, help="files or folders of it that are run")
    parser.add_argument("--count", type=int, default=40, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--processes", type=int, default=1, help="how many changes are tried at a time")
    parser.add_argument(
        "--slowest", type=float, default=4.0, help="times the unchanged tests' time: more is a time-out"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mutants.json"), help="where the outcome goes")
    options = parser.parse_args()
    root = options.root.resolve()
    revision = options.revision or revision_of(root)
    files = [
        f for s in options.sources for f in (sorted((root / s).rglob("*.py")) if (root / s).is_dir() else [root / s])
    ]
    found = [mutant for file in files for mutant in mutants_of(root, file)]
    drawn = random.Random(options.seed).sample(found, min(options.count, len(found)))
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for index in range(options.processes):
            tree = Path(folder) / str(index)
            tree.mkdir()
            copy_tree(root, tree)
            trees.put(tree)
        left_out, alone = failing(tree, options.tests)
        if left_out:
            outcome, why = run_tests(tree, options.tests, left_out, 3600)
            if outcome != "survived":
                sys.exit(f"the tests fail on the unchanged code: {why}")
        print(f"{len(found)} changes in {len(files)} files; the unchanged tests take {alone:.1f} s", flush=True)

        def on_a_free_tree(mutant: Mutant) -> dict[str, Any]:
            tree = trees.get()
            try:
                return try_mutant(tree, mutant, options.tests, left_out, max(60.0, options.slowest * alone))
            finally:
                trees.put(tree)

        outcomes: list[dict[str, Any]] = []
        with ThreadPoolExecutor(options.processes) as pool:
            for result in as_completed([pool.submit(on_a_free_tree, mutant) for mutant in drawn]):
                outcomes.append(result.result())
                record = {
                    "revision": revision,
                    "sources": options.sources,
                    "tests": options.tests,
                    "left_out": left_out,
                    "seed": options.seed,
                    "torch": version("torch"),
                    "possible": len(found),
                    "drawn": len(drawn),
                    "seconds_unchanged": alone,
                    "counts": Counter(o["outcome"] for o in outcomes),
                    "mutants": outcomes,
                }
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(dict(Counter(o["outcome"] for o in outcomes)) if drawn else "nothing to change")


if __name__ == "__main__":
    main()

"""The limits that CONTRIBUTING.md sets: what is above them is hard to read, and grows from there."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "reproduction" / "src").rglob("*.py"))]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in MODULES:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def test_modules_functions_and_classes_are_small() -> None:
    assert len(MODULES) > 100
    for path, module in parsed():
        assert (ROOT / path).read_text(encoding="utf-8").count("\n") <= 450, path
        for node in ast.walk(module):
            if isinstance(node, FUNCTIONS):
                assert node.end_lineno - node.lineno < 60, f"{node.name} in {path} is longer than 60 lines"
                assert branches(node) <= 15, f"{node.name} in {path} has {branches(node)} branches"
            if isinstance(node, ast.ClassDef):
                assert len(attributes(node)) <= 20, f"{node.name} in {path} has {len(attributes(node))} attributes"


def test_docstrings_stand_by_themselves() -> None:
    for path, module in parsed():
        for node in ast.walk(module):
            if isinstance(node, FUNCTIONS | ast.ClassDef | ast.Module):
                assert not (ast.get_docstring(node) or "").startswith(("The same", "As above", "See above")), path


def test_packages_open_by_saying_what_lives_in_them() -> None:
    for path, module in parsed():
        if path.endswith("__init__.py"):
            assert len((ast.get_docstring(module) or "").splitlines()) >= 3, path


def test_the_glossary_is_short() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The words")[2].partition("\n## ")[0]
    words = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert 5 < len(words) <= 25


def test_the_formatter_is_rarely_told_to_stay_away() -> None:
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    assert sum(path.read_text(encoding="utf-8").count("# fmt: " + "skip") for path in files) <= 20


def branches(function: ast.AST) -> int:
    """Ways that a function can go, without those of functions inside it."""
    found, waiting = 0, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, FUNCTIONS | ast.Lambda | ast.ClassDef):
            found += isinstance(node, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.match_case)
            waiting += ast.iter_child_nodes(node)
    return found


def attributes(kind: ast.ClassDef) -> set[str]:
    """The fields of a class and what its methods set on self."""
    return {*_fields(kind), *_set_on_self(kind)}


def _fields(kind: ast.ClassDef) -> Iterator[str]:
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _set_on_self(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        on_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if on_self and isinstance(node.ctx, ast.Store):
            yield node.attr

"""Sizes that keep the house readable: of files, classes, constructors and the names of tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import npt

PACKAGE = Path(npt.__file__).parent
ROOT = PACKAGE.parent
FILE_LINES, CLASS_LINES, CONSTRUCTOR_ARGUMENTS, NAME_LETTERS = 450, 300, 7, 60


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def refuse_large(sizes: Iterator[tuple[str, int]], most: int) -> None:
    found = [f"{name} has {size}" for name, size in sizes if size > most]
    assert not found, f"at most {most} are wanted:\n" + "\n".join(found)


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sources("npt"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(ROOT)}: {node.name}", node


def test_no_file_is_longer_than_can_be_read_at_once() -> None:
    lengths = (
        (str(path.relative_to(ROOT)), len(path.read_text(encoding="utf-8").splitlines()))
        for path in sources("npt", "benchmarks", "debug", "examples")
    )
    refuse_large(lengths, FILE_LINES)


def test_no_class_does_everything() -> None:
    lengths = ((name, (node.end_lineno or 0) - node.lineno + 1) for name, node in classes())
    refuse_large(lengths, CLASS_LINES)


def test_no_constructor_has_a_long_list_of_arguments() -> None:
    counts = (
        (name, len(method.args.args) + len(method.args.kwonlyargs) - 1)
        for name, node in classes()
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    )
    refuse_large(counts, CONSTRUCTOR_ARGUMENTS)


def test_names_of_tests_are_read_at_a_glance() -> None:
    lengths = (
        (f"{path.relative_to(ROOT)}: {name}", len(name))
        for path in sources("tests")
        for name in re.findall(r"^ *def test_(\w+)", path.read_text(encoding="utf-8"), re.M)
    )
    refuse_large(lengths, NAME_LETTERS)

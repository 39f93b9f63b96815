"""Docstrings say what a function does ("Return") or name a thing, and open with no question."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPENINGS = re.compile(r"(?:What|Where|How|Whether|Until|Since|Which|Who|When)\b")


def openings(text: str) -> list[int]:
    """Return the lines of docstrings of functions and classes that open so."""
    if not re.search(rf'"""\s*{OPENINGS.pattern}', text):  # parsing all files takes seconds
        return []
    return [
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and OPENINGS.match(ast.get_docstring(node) or "")
    ]


def test_docstrings_say_what_is_done() -> None:
    files = [p for d in ("npt", "tests", "benchmarks", "debug") for p in (ROOT / d).rglob("*.py")]
    lines = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in openings(path.read_text("utf-8"))
    ]
    assert lines == []


@pytest.mark.parametrize("opening", ["What", "Where", "How", "When"])
def test_an_opening_is_found(opening: str) -> None:
    for kind in ("def f():", "class C:"):
        assert openings(f'{kind}\n    """{opening} it is."""') == [2]
    assert openings('def f():\n    """Return it, if it is set."""') == []

"""Plain English: habits of wording that slow a reader stay out of code, tests and documents."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHECKED = (
    "npt",
    "tests",
    "benchmarks",
    "debug",
    "docs",
    "examples",
    "notebooks",
    "README.md",
    "CONTRIBUTING.md",
)

TICS = {
    r"\bbehind\b": "after",
    r"\bin front of\b": "before",
    r"\bstands?\b": "is, lies",
    r"\bbeside\b": "with, next to",
    r"\b(?:go|goes|going|gone|went) on\b": "continue",
    r"\bis there\b": "exists",
    r"\b(?:has|have|had) to\b": "must",
    r"\bone for each\b(?=[.\"')]|$)": "one per ...",
    r"\bwhere \w+ (?:is|are|was|has|have|does)\b": "if ... is",
}
"""Wordings, and what to write in their place."""

OPENINGS = r"(?:What|Where|How|Whether|Until|Since|Which|Who|When)\b"
"""How no docstring opens: it says what a function does ("Return") or names a thing."""

ANY_TIC = re.compile("|".join(TICS))
ANY_OPENING = re.compile(rf'"""\s*{OPENINGS}')
_BREAK = re.compile(r"""["']\s*\n\s*[a-zA-Z]?["']|(?<=\n)\s*#+ """)


def offences(text: str, name: str) -> list[str]:
    """Return every habit in a file's text, with its line and the cure."""
    flat = " ".join(_BREAK.sub("", text).split())
    if not ANY_TIC.search(flat) and not ANY_OPENING.search(text):
        return []  # most files: to parse one takes a hundred times as long
    pieces = python_prose(text) if name.endswith(".py") else paragraphs(text)
    found = [
        f"{name}:{line}: {match[0]!r} (write: {cure})"
        for line, words in pieces
        for tic, cure in TICS.items()
        for match in re.finditer(tic, words)
    ]
    if name.endswith(".py"):
        found += [
            f"{name}:{node.body[0].lineno}: a docstring opens with {said.split()[0]!r}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and re.match(OPENINGS, said := ast.get_docstring(node) or "")
        ]
    return found


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the words of each paragraph."""
    line = 1
    for part in re.split(r"(\n\s*\n)", text):
        yield line, " ".join(part.split())
        line += part.count("\n")


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each string and comment, one in several pieces as a whole."""
    line, kind, words = 0, None, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        # up to Python 3.11 a formatted string is one token
        is_text = token.type == tokenize.STRING or "FSTRING" in tokenize.tok_name[token.type]
        now = "text" if is_text else "comment" if token.type == tokenize.COMMENT else None
        if now != kind or now is None:
            if kind is not None:
                yield line, " ".join(words.split())
            line, kind, words = token.start[0], now, ""
        if now == "comment":
            words += token.string.lstrip("#") + " "
        elif now == "text":
            words += re.sub(r"^[a-zA-Z]*(\"\"\"|'''|\"|')(.*)\1$", r"\2", token.string, flags=re.S)


def files() -> list[Path]:
    """Return all checked files."""
    found: list[Path] = []
    for name in CHECKED:
        path = ROOT / name
        inside = path.rglob("*") if path.is_dir() else [path]
        found += [p for p in inside if p.suffix in (".py", ".md", ".j2", ".html")]
    names = {path.relative_to(ROOT).as_posix(): path for path in found}
    own = Path(__file__).relative_to(ROOT).as_posix()
    return [names[n] for n in sorted(names) if "/assets/" not in n and not n.startswith(own)]


def test_prose_is_plain() -> None:
    found = [
        offence
        for path in files()
        for offence in offences(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "words",
    [
        "the batch behind it",
        "in front of a window",
        "a number stands there",
        "a file beside it",
        "the run goes on",
        "a file that is there",
        "it has to be right",
        "devices, one for each",
        "where x is None",
    ],
)
def test_each_tic_is_found_in_strings_comments_and_documents(words: str) -> None:
    first, rest = words.rsplit(" ", 1)
    for text in (f'"""{words}."""', f"x = 1  # {words}", f'f("{first} "\n  f"{rest}")'):
        assert len(offences(text, "a.py")) == 1, text
    assert len(offences(f"# Title\n\nSo {first}\n{rest}.", "a.md")) == 1


@pytest.mark.parametrize("opening", OPENINGS[3:-3].split("|"))
def test_each_opening_of_a_docstring_is_found(opening: str) -> None:
    assert offences(f'def f():\n    """{opening} it is."""', "a.py") != []
    assert offences(f'class C:\n    """{opening} it is."""', "a.py") != []


def test_names_and_plain_words_pass() -> None:
    text = (
        'behind = where = 1  # a standard name\n\n\ndef f():\n    """Return it, if it is set."""\n'
    )
    assert offences(text, "a.py") == []

"""`--dataset_name builtin-prose`: English prose from this machine's Python, without a download.

The documents are the topics of `help()` (`pydoc_data/topics.py`, the language reference) and the
long docstrings of each module of the standard library, about 380,000 tokens in Python 3.11. Texts
differ between Python versions, so compare figures within one. A hash of its name assigns a document
to a split; files that `builtin` holds out are held out here too. The embedded model was trained on
`builtin`, whose code contains most of these texts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from npt.batch import is_heldout
from npt.config import DataConfig
from npt.data.readers import library, source_files
from npt.data.source import Record
from npt.errors import DataError

TOPICS = "pydoc_data/topics.py"
HELDOUT_ONE_IN = 10
LONG = 200
"""Fewest characters of a docstring; a module's own is always used."""
LEAST = 500
"""Fewest characters of a document."""
REPEATED = 80
"""Fewest characters of a paragraph that may occur in only one topic."""

_LISTING = re.compile(r"^\s*(?:>>> |\+[-=]{3}|\|)", re.MULTILINE)
_Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def read_prose(name: str, config: DataConfig) -> Iterator[Record]:
    return ({"text": text, "id": name} for name, text in prose(config.dataset_split))


def prose(split: str, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the documents of one split: topics, then modules, sorted by name."""
    root = library() if root is None else root

    def chosen(name: str) -> bool:
        return is_heldout(name, HELDOUT_ONE_IN) == (split == "heldout")

    for topic, text in sorted(_topics(root / TOPICS).items()):
        name = f"topic {topic}"
        if chosen(name) and len(text) >= LEAST:
            yield name, text
    for path, source in source_files(root, chosen):
        if path == TOPICS:
            continue
        text = _docstrings(source)
        if len(text) >= LEAST:
            yield path, text


def _topics(path: Path) -> dict[str, str]:
    """Return the topics of `help()` by name. Chapters repeat their sections: a long paragraph stays
    only in the shortest topic that has it, so that no two splits share one."""
    try:
        assignment = path.read_text(encoding="utf-8").partition("topics = ")[2]
        topics: dict[str, str] = ast.literal_eval(assignment)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"builtin-prose needs the topics of Python's help(), but {path} is missing or damaged;"
            " pass --dataset_name FILE"
        ) from error
    shortened: dict[str, str] = {}
    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        new = [p for p in _paragraphs(topics[name]) if p not in seen]
        seen.update(p for p in new if len(p) >= REPEATED)
        shortened[name] = "\n\n".join(new)
    return shortened


def _docstrings(source: str) -> str:
    """Return a module's docstring and the long ones in it, in order; "" if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    inside = [node for node in ast.walk(tree) if isinstance(node, _Documented)]
    inside.sort(key=lambda node: node.lineno)
    texts: dict[str, None] = {}  # a set in order; some classes have the same docstring
    for node in (tree, *inside):
        text = "\n\n".join(_paragraphs(ast.get_docstring(node) or ""))
        if text and (node is tree or len(text) >= LONG):
            texts[text] = None
    return "\n\n".join(texts)


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text that hold no interpreter session or table."""
    paragraphs = re.split(r"\n[ \t]*\n", text.strip("\n"))
    return [p for p in paragraphs if p.strip() and not _LISTING.search(p)]

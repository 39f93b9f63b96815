"""Places in a text, such as docs/results/speed.md, that a benchmark fills with its tables.

A place lies between the line `<!-- NAME -->` and the next `<!-- end -->`.
"""

from __future__ import annotations

from pathlib import Path

from npt.errors import ConfigError

END = "<!-- end -->\n"


def mark(name: str) -> str:
    """Return the line that a place begins with."""
    return f"<!-- {name} -->\n"


def check_place(path: Path, name: str) -> None:
    """Refuse a text that has no place of this name, before anything is measured.

    Raises:
        ConfigError: no such file, or no such place in it.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if mark(name) not in text or END not in text.partition(mark(name))[2]:
        raise ConfigError(
            f"--fill is {path}, which has no lines {mark(name).strip()!r} and {END.strip()!r} for"
            " the tables to go between"
        )


def filled(text: str, name: str, tables: str) -> str:
    """Return the text with these tables in the place of this name."""
    before, start, rest = text.partition(mark(name))
    return f"{before}{start}\n{tables}\n{END}{rest.partition(END)[2]}"

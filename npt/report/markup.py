"""HTML out of text that anybody may have written: escaped, bounded, without control characters and without what looks like a secret."""

from __future__ import annotations

import html
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

TEXT = 300
"""Letters that are shown of a text."""

_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s]+(?=@)"), "…"),  # user and password in front of a host
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[bp]-|AKIA)[A-Za-z0-9_-]{12,}"), r"\1…"),
    (re.compile(r"(?i)\b((?:api[_-]?key|access[_-]?token|token|password|secret)=)[^\s&]+"), r"\1…"),
)


def text(value: Any, limit: int = TEXT) -> str:
    """A value as HTML text, also fit for an attribute in double quotes."""
    shown = value if isinstance(value, str) else "null" if value is None else str(value)
    for pattern, instead in _SECRETS:
        shown = pattern.sub(instead, shown[: 16 * limit])
    if len(shown) > limit:
        shown = shown[: limit - 1] + "…"
    return html.escape("".join(map(_visible, shown)))


def _visible(letter: str) -> str:
    """Control characters and those that turn the direction of a line would make it say something else; halves of characters no encoding has."""
    if letter in "\n\t":
        return " "
    if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return f"\\u{ord(letter):04x}"
    return letter


def link(path: Path, page: Path, shown: str) -> str:
    """A link from the page, which lies at `page`, to a file or folder beside it, by a relative address."""
    where = Path(os.path.relpath(path, page.parent)).as_posix()
    address = quote(where.encode("utf-8", "surrogateescape")) + ("/" if path.is_dir() else "")
    return f'<a href="./{html.escape(address)}">{text(shown)}</a>'


def number(value: float | None, digits: int = 4) -> str:
    """A number for reading: a few digits of it, a long one by its power of ten."""
    if value is None or not math.isfinite(value):
        return "–" if value is None or math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return re.sub(r"e([+-])0*", lambda e: "e−" if e[1] == "-" else "e", f"{value:.{digits - 1}g}").replace("-", "−")
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def plus_minus(value: float | None, error: float | None) -> str:
    """A figure with its standard error, both to the error's second digit; an error that is nothing but rounding is left out."""
    if value is None or not math.isfinite(value) or error is None or not math.isfinite(error) or error <= 1e-6 * abs(value):
        return number(value)
    digits = max(0, min(9, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """A table that scrolls by itself where it is wider than the screen. Cells are HTML already; a star before a heading makes its
    column one of numbers, a tilde one of names."""
    kinds = [{"*": "n", "~": "name"}.get(name[:1], "") for name in head]

    def cell(tag: str, kind: str, content: str) -> str:
        return f'<{tag} class="{kind}">{content}' if kind else f"<{tag}>{content}"

    heads = "".join(cell("th scope=col", kind, name.lstrip("*~")) for kind, name in zip(kinds, head, strict=True))
    body = "\n".join("<tr>" + "".join(cell("td", kind, x) for kind, x in zip(kinds, row, strict=True)) for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0"><table class="list"><caption>{text(caption)}</caption>'
        f"<thead><tr>{heads}</thead>\n<tbody>{body}</tbody></table></div>"
    )


def details(summary: str, content: str, open_: bool = False) -> str:
    return f"<details{' open' if open_ else ''}><summary>{summary}</summary>\n{content}\n</details>"

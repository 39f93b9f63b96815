"""Values as words that a page may show: bounded, without control characters and without what looks
like a secret. Templates escape them.
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from markupsafe import Markup

from npt.evaluation.formatting import FIGURES
from npt.report.logs import as_number

TEXT = 300  # letters that are shown of a text
SHOWN = 200  # items that are listed one by one: refusals, events, checkpoints
ALARM = Markup('<span class="alarm">{}</span>')

Item = TypeVar("Item")

_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s]+(?=@)"), "…"),  # user and password before a host
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[bp]-|AKIA)[A-Za-z0-9_-]{12,}"), r"\1…"),
    (re.compile(r"(?i)\b((?:api[_-]?key|access[_-]?token|token|password|secret)=)[^\s&]+"), r"\1…"),
)


def clean(value: Any, limit: int = TEXT) -> str:
    """Return a value as plain text of so many letters at most, all of which can be seen."""
    shown = value if isinstance(value, str) else "none" if value is None else str(value)
    for pattern, instead in _SECRETS:
        shown = pattern.sub(instead, shown[: 16 * limit])
    if len(shown) > limit:
        shown = shown[: limit - 1] + "…"
    return shown if shown.isprintable() else "".join(map(_visible, shown))


def _visible(letter: str) -> str:
    """Return a letter, or its number if it would not show or would turn the line's direction."""
    if letter in "\n\t":
        return " "
    if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return f"\\u{ord(letter):04x}"
    return letter


def address(path: Path, page: Path) -> str:
    """Return the relative address of a file or folder, for a link on the page at `page`."""
    where = Path(os.path.relpath(path, page.parent)).as_posix()
    return f"./{quote(where.encode('utf-8', 'surrogateescape'))}{'/' if path.is_dir() else ''}"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number for reading: a few digits of it, a long one by its power of ten. None and NaN
    are no number; infinite is one that was not finite.
    """
    if value is None or not math.isfinite(value):
        return "–" if value is None or math.isnan(value) else "not finite"
    shown = f"{value:.{digits}g}"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        shown = re.sub(r"e([+-])0*", lambda e: "e" + e[1].strip("+"), shown)
    elif abs(value) >= 10 ** (digits - 1):
        shown = f"{value:,.0f}"
    return shown.replace("-", "−")


def plus_minus(value: float | None, error: float | None) -> str:
    """Return a figure with its standard error to two digits, unless that is mere rounding."""
    known = all(x is not None and math.isfinite(x) for x in (value, error))
    if not known or value is None or error is None or error <= 1e-6 * abs(value):
        return number(value)
    digits = max(0, min(9, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def figure(values: Mapping[str, Any], key: str) -> str:
    """Return one of a model's figures with its standard error; null in a file is a number that was
    not finite.
    """
    if key in values and values[key] is None:
        return number(math.inf)
    value, error = as_number(values.get(key)), as_number(values.get(f"{key}_se"))
    if value is None or key not in FIGURES:
        return plus_minus(value, error)
    return FIGURES[key].write(value, math.nan if error is None else error)


def flat(value: Any, depth: int = 0) -> str:
    """Return a value of a JSON file on one line."""
    if isinstance(value, dict) and depth < 3:
        entries = list(value.items())[:30]
        return ", ".join(f"{key} {flat(entry, depth + 1)}" for key, entry in entries)
    if isinstance(value, list) and depth < 3:
        shown = ", ".join(flat(entry, depth + 1) for entry in value[:60])
        return shown + " …" * (len(value) > 60)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)[:2000]


def both_ends(items: Sequence[Item]) -> Sequence[Item]:
    """Return all, or the first and the last of them, SHOWN together."""
    return items if len(items) <= SHOWN else [*items[: SHOWN // 2], *items[-SHOWN // 2 :]]


def cut(items: Sequence[Any], what: str) -> str:
    """Return the caption of a table of what `both_ends` left."""
    some = f"the first and last {SHOWN // 2} of " if len(items) > SHOWN else ""
    return f"{what}, {some}{len(items):,}"

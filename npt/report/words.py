"""Values as text for a page: bounded, without control characters or likely secrets. Templates
escape it.
"""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from npt.figures import FIGURES

TEXT = 300  # the most characters shown of a text

_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s]+(?=@)"), "…"),  # user and password before a host
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[bp]-|AKIA)[A-Za-z0-9_-]{12,}"), r"\1…"),
    (re.compile(r"(?i)\b((?:api[_-]?key|access[_-]?token|token|password|secret)=)[^\s&]+"), r"\1…"),
)


def clean(value: Any, limit: int = TEXT) -> str:
    """Return a value as text of at most `limit` characters, with invisible ones spelled out."""
    shown = "none" if value is None else str(value)
    for pattern, instead in _SECRETS:
        shown = pattern.sub(instead, shown[: 16 * limit])
    if len(shown) > limit:
        shown = shown[: limit - 1] + "…"
    return shown if shown.isprintable() else "".join(map(_visible, shown))


def _visible(letter: str) -> str:
    """Return a character, or its code point if it is invisible or reverses the text."""
    if letter in "\n\t":
        return " "
    if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return f"\\u{ord(letter):04x}"
    return letter


def address(path: Path, page: Path) -> str:
    """Return the address of a file or folder relative to the page at `page`."""
    where = Path(os.path.relpath(path, page.parent)).as_posix()
    return f"./{quote(where.encode('utf-8', 'surrogateescape'))}{'/' if path.is_dir() else ''}"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with a few digits, a very large or small one as a power of ten. None and NaN
    give a dash; infinity stands for a value that was not finite.
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "not finite"
    if value == 0:
        return "0"
    shown = f"{value:.{digits}g}"
    if not 1e-4 <= abs(value) < 1e6:
        shown = re.sub(r"e([+-])0*", lambda e: "e" + e[1].strip("+"), shown)
    elif abs(value) >= 10 ** (digits - 1):
        shown = f"{value:,.0f}"
    return shown.replace("-", "−")


def as_number(values: Mapping[str, Any], key: str) -> float:
    """Return a number from a JSON object: NaN if it is missing or not one; infinity for null, which
    stands for a value that was not finite.
    """
    if key in values and values[key] is None:
        return math.inf
    try:
        value = float(values[key])
    except (LookupError, OverflowError, TypeError, ValueError):
        return math.nan
    return value if math.isfinite(value) else math.inf


def figure(values: Mapping[str, Any], key: str) -> str:
    value = as_number(values, key)
    error = as_number(values, f"{key}_se")
    if key in FIGURES and abs(value) < 1e6:
        return FIGURES[key].write(value, error)
    return number(value) + (f" ± {number(error, 2)}" if math.isfinite(error) else "")


def flat(value: Any) -> str:
    if isinstance(value, str):
        return value
    shown = json.dumps(value, ensure_ascii=False).replace('"', "")
    return shown[1:-1] if isinstance(value, dict | list) else shown

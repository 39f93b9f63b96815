"""Values that are written as text: lists, steps, sizes in bytes."""

from __future__ import annotations

import re
from typing import Any

from npt.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgt", 1)
    for tail, base in (("b", 1000), ("ib", 1024))
}


def parse_steps(text: str, flag: str = "--trace_steps") -> tuple[range, ...]:
    """Return steps, counted from 1, as ranges: `1,2,3`, `1-5` (both ends included) or `1-5,8`.

    Raises:
        ConfigError: not of that form; `flag` is what the message calls it.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                f"{flag} is {text!r}; write steps from 1 on as a list 1,2,3, a range 1-5 or a mix"
                " 1-5,8"
            )
        found.append(range(first, last + 1))
    return tuple(found)


def parse_bytes(text: str) -> int:
    """Return the bytes of `10GiB` (1024 each), `10GB` (1000 each), likewise K, M and T, or of a
    plain number of bytes.

    Raises:
        ConfigError: not of that form, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]{0,3})\s*", text, re.IGNORECASE)
    unit = None if match is None else _UNITS.get(match[2].lower())
    found = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if found < 1:
        raise ConfigError(
            f"--max_memory is {text!r}; write a size like 10GiB, 800MB or a number of bytes"
        )
    return found


def joined(given: Any) -> Any:
    """Return the items of a list as `a,b`; anything else as it is."""
    return ",".join(map(str, given)) if isinstance(given, list | tuple | range) else given


def joined_or_number(given: Any) -> Any:
    """Return `joined`, and the text of a whole number, which is what YAML makes of a lone 3."""
    whole = isinstance(given, int) and not isinstance(given, bool)
    return str(given) if whole else joined(given)


def words(given: Any) -> Any:
    """Return the words of `a,b`, or of a list of such, as a tuple; anything else as it is."""
    parts = [given] if isinstance(given, str) else given
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return given
    return tuple(word.strip() for part in parts for word in part.split(",") if word.strip())

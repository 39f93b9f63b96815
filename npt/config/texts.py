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
    steps = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                f"{flag} is {text!r}; write steps from 1 on as a list 1,2,3, a range 1-5 or a mix"
                " 1-5,8"
            )
        steps.append(range(first, last + 1))
    return tuple(steps)


def parse_bytes(text: str) -> int:
    """Return the bytes of `10GiB` (1024 each), `10GB` (1000 each), likewise K, M and T, or of a
    plain number of bytes.

    Raises:
        ConfigError: not of that form, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]{0,3})\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get(match[2].lower(), 0)) if match else 0
    if size < 1:
        raise ConfigError(
            f"--max_memory is {text!r}; write a size like 10GiB, 800MB or a number of bytes"
        )
    return size


def as_text(value: Any) -> Any:
    """Return the items of a list as `a,b`, and a whole number, which is what YAML makes of a lone
    3, as its text; anything else as it is.
    """
    if isinstance(value, list | tuple | range):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def words(value: Any) -> Any:
    """Return the words of `a,b`, or of a list of such, as a tuple; anything else as it is."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(word.strip() for part in parts for word in part.split(",") if word.strip())

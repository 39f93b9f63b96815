"""Values that are written as text: lists and steps."""

from __future__ import annotations

import re
from typing import Any

from npt.errors import ConfigError


def parse_steps(text: str, flag: str = "--trace_steps") -> tuple[range, ...]:
    """Return steps, counted from 1, as ranges: `1,2,3`, `1-5` (both ends included), `/100` (every
    hundredth) or a mix of these; ConfigError, by `flag`, if it is not of that form.
    """
    steps = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?|\s*/\s*(\d{1,18})\s*", part)
        first, last, every = (int(n) if n else 0 for n in match.groups()) if match else (0, 0, 0)
        last = last or first
        if every:
            steps.append(range(every, 10**18, every))
        elif 1 <= first <= last:
            steps.append(range(first, last + 1))
        else:
            raise ConfigError(
                f"{flag} is {text!r}; write steps from 1 on as a list 1,2,3, a range 1-5, /100 for"
                " every hundredth, or a mix 1-5,8"
            )
    return tuple(steps)


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

"""Reading a .jsonl file that may still be written to, may end in half a line, and may come from
somebody else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINE_BYTES = 1 << 20
"""What a line may be long: one of a model of a thousand layers is a tenth of it."""


class Lines:
    """The objects of a .jsonl file, one for each line that is one.

    Attributes:
        unreadable: lines so far that were no JSON object. One without an end is not counted: it is
            about to be written, or was when its writer was killed.
    """

    def __init__(self, path: Path):
        self._path = path
        self.unreadable = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """
        Raises:
            OSError: the file is missing or cannot be read.
        """
        with self._path.open("rb") as stream:
            while line := stream.readline(LINE_BYTES):
                value = None
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(line)
                if isinstance(value, dict):
                    yield value
                elif line.strip() and line.endswith(b"\n"):
                    self.unreadable += 1


def number(value: Any) -> float | None:
    """A number of a JSON file as a float; None where it is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def count(value: Any) -> int | None:
    """A step or another count of a JSON file; None where it is something else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53:
        return value
    return None

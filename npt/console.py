"""The consoles that the program writes to."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from rich.console import Console

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""All but tab and newline; with what turns the direction of text around."""


def printable(text: str, one_line: bool = False) -> str:
    """Return text with its control characters written out, as Python writes them.

    Names, records and templates come from outside, and a terminal obeys what it is sent: an escape
    could hide a line, a newline forge one.

    Args:
        one_line: newlines are written out too.
    """
    text = _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
    return text.replace("\n", "\\n") if one_line else text


def put(text: str, end: str = "\n") -> None:
    """Write a result to standard output at once: JSON, a text. It ends quietly if nobody reads any
    more, as in `npt ... | head`.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _abandon(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from error


def complain(line: str) -> None:
    """Write a line to standard error, if that can be written to."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)


def _abandon(stream: Any) -> None:
    """Let nothing that is still written to the stream fail: Python flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class QuietConsole(Console):
    """A console that falls silent when nobody reads it any more, as in `npt pretrain | head`, or
    its disk is full: printing never ends a run. (rich ends the program on a broken pipe.)
    """

    def print(self, *objects: Any, **named: Any) -> None:
        """Print; see `printable` for what becomes of text."""
        objects = tuple(printable(each) if isinstance(each, str) else each for each in objects)
        try:
            super().print(*objects, **named)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _abandon(self.file)

    def say(self, *lines: str) -> None:
        """Print each line as it is: neither wrapped nor read as markup."""
        for line in lines:
            self.print(line, markup=False, highlight=False, soft_wrap=True)


def silent_console() -> QuietConsole:
    """Return a console that prints nothing."""
    return QuietConsole(quiet=True)


def make_console(stderr: bool = False) -> QuietConsole:
    """Return a console that prints text as it is (a path may hold square brackets), and 120 columns
    wide if the output is no terminal: a table's rows stay on one line.
    """
    console = QuietConsole(stderr=stderr, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 120
    return console

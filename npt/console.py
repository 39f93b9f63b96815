"""Consoles for the program's output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.segment import Segment

from npt.errors import printable


def put(text: str, end: str = "\n") -> None:
    """Write a result to standard output and flush it. A closed pipe, as in `npt ... | head`, is
    ignored; any other failure, as on a full disk, is an OSError.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _abandon(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from error


def complain(line: str) -> None:
    """Write a line to standard error; ignore a failure."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)


def _abandon(stream: Any) -> None:
    """Redirect the stream to /dev/null: Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class QuietConsole(Console):
    """A console that goes silent if writing fails, as in `npt pretrain | head` or on a full disk:
    printing never ends a run. rich alone would end the program.
    """

    def print(self, *objects: Any, **named: Any) -> None:
        try:
            super().print(*objects, **named)
        except OSError:
            self.on_broken_pipe()

    def render(self, renderable: RenderableType, options: Any = None) -> Iterable[Segment]:
        """Render as `Console` does, but make all text `printable`, in tables and bars too."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _abandon(self.file)

    def say(self, *lines: str) -> None:
        say(self, *lines)


def say(console: Console, *lines: str) -> None:
    """Print each line unwrapped, without markup, and with its newlines escaped."""
    for line in lines:
        line = printable(line, one_line=True)
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def silent_console() -> QuietConsole:
    """Return a console that prints nothing."""
    return QuietConsole(quiet=True)


def make_console(stderr: bool = False) -> QuietConsole:
    """Return a console without markup (a path may hold square brackets), 120 columns wide without a
    terminal.
    """
    console = QuietConsole(stderr=stderr, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 120
    return console

"""The consoles that the program writes to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.segment import Segment

from npt.errors import printable


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
        try:
            super().print(*objects, **named)
        except OSError:
            self.on_broken_pipe()

    def render(self, renderable: RenderableType, options: Any = None) -> Iterable[Segment]:
        """Render as `Console` does, with text made `printable`: that of tables and bars too."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _abandon(self.file)

    def say(self, *lines: str) -> None:
        say(self, *lines)


def say(console: Console, *lines: str) -> None:
    """Print each line as it is, neither wrapped nor read as markup; a newline in one is written
    out.
    """
    for line in lines:
        line = printable(line, one_line=True)
        console.print(line, markup=False, highlight=False, soft_wrap=True)


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

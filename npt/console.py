"""Consoles for the program's output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.segment import Segment

from npt.errors import printable

STDOUT = "standard output"
"""The name of the file in an error of `put`."""


def put(text: str, end: str = "\n") -> None:
    """Write a result to standard output and flush it. A closed pipe, as in `npt ... | head`, is
    ignored; any other failure, as on a full disk, is an OSError.
    """
    try:
        _write(sys.stdout, text + end)
    except OSError as error:
        _abandon(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, STDOUT) from error


def complain(line: str) -> None:
    """Write a line to standard error; ignore a failure."""
    try:
        _write(sys.stderr, line + "\n")
    except OSError:
        _abandon(sys.stderr)


class Escaping:
    """A stream that writes the characters that its encoding lacks as Python escapes them: "±" in
    ASCII, and in UTF-8 the surrogates of a name that is not UTF-8.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> Any:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write(stream: Any, text: str) -> None:
    """Write text and flush it, on a terminal with control characters escaped. The stream is None if
    the program was started without it, as by `>&-`.
    """
    if stream is None:
        return
    Escaping(stream).write(printable(text) if stream.isatty() else text)
    stream.flush()


def _abandon(stream: Any) -> None:
    """Redirect the stream to /dev/null: Python flushes it again at exit."""
    # a stream of Python's, as in a notebook, has no file number
    with contextlib.suppress(AttributeError, OSError, ValueError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


class QuietConsole(Console):
    """A console that goes silent if writing fails, as in `npt pretrain | head` or on a full disk:
    printing never ends a run. rich alone would end the program.
    """

    def __exit__(self, *raised: Any) -> None:
        """Write what was printed, also by bars and spinners."""
        try:
            super().__exit__(*raised)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.on_broken_pipe()

    @property
    def file(self) -> Any:
        return Escaping(super().file)

    @file.setter
    def file(self, stream: Any) -> None:
        self._file = stream

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

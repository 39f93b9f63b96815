"""Write lines to standard output and standard error, without a console."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

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
        abandon(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, STDOUT) from error


def complain(line: str) -> None:
    """Write a line to standard error; ignore a failure."""
    try:
        _write(sys.stderr, line + "\n")
    except OSError:
        abandon(sys.stderr)


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


def abandon(stream: Any) -> None:
    """Redirect the stream to /dev/null: Python flushes it again at exit."""
    # a stream of Python's, as in a notebook, has no file number
    with contextlib.suppress(AttributeError, OSError, ValueError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())

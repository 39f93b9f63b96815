"""Consoles for the program's output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.segment import Segment

from npt.errors import printable
from npt.streams import Escaping, abandon
from npt.streams import complain as complain
from npt.streams import put as put


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
        abandon(self.file)

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

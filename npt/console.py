"""The consoles that the program writes to."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class QuietConsole(Console):
    """A console that falls silent when nobody reads it any more, as in `npt pretrain | head`:
    printing never ends a run. (rich ends the program on a broken pipe.)
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Python flushes stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

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

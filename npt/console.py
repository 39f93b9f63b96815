"""Where the program speaks: a rich console that can neither end a run nor misread a path."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class QuietConsole(Console):
    """A console that falls silent when nobody reads it any more, as in `npt pretrain | head`:
    printing never ends a run.

    rich's own answer to a broken pipe is to exit the program.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # what Python flushes at exit goes there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def silent_console() -> Console:
    """A console of a process that does not speak."""
    return QuietConsole(quiet=True)


def make_console(stderr: bool = False) -> Console:
    """A console that prints text as it is (a path may hold square brackets); where the output is no
    terminal it is wide enough for a table's rows to stay on one line."""
    console = QuietConsole(stderr=stderr, markup=False, highlight=False)
    return (
        console
        if console.is_terminal
        else QuietConsole(stderr=stderr, markup=False, highlight=False, width=120)
    )

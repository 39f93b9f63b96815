"""Processes forked from this one, with the members of subprocess.Popen: killed and signalled alike,
without seconds of imports.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Forked:
    """A process in a group of its own that does `act` and ends with the status that it returns.

    Args:
        act: what it does.
        log: file that it writes to; None for that of the process it is forked from.
        environment: what is set in its environment.
    """

    def __init__(
        self,
        act: Callable[[], int | None],
        log: Path | None = None,
        environment: dict[str, str] | None = None,
        group: bool = True,
    ):
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os._exit(_status(act, log, environment or {}))

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._ended(os.WNOHANG)

    def wait(self) -> int | None:
        """Its exit status; of one that a signal ended that signal's number, negative. A test's own
        limit of time ends what hangs.
        """
        return self.returncode if self.returncode is not None else self._ended(0)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended(self, how: int) -> int | None:
        pid, status = os.waitpid(self.pid, how)
        self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _status(act: Callable[[], int | None], log: Path | None, environment: dict[str, str]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    os.environ.update(environment)
    if log is not None:
        for descriptor in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    status = 1
    try:
        status = act() or 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


def forked_npt(command: Sequence[str], *, env: dict[str, str], process_group: int) -> Forked:
    """`subprocess.Popen` of a command that is Python with `-m npt`."""
    from npt.cli.main import main

    program: list[Any] = [sys.executable, "-m", "npt"]
    assert list(command[:3]) == program and process_group == 0
    return Forked(lambda: main(list(command[3:])), environment=env)

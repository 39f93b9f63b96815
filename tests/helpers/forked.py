"""The program in a process of its own, forked from this one: killed and signalled as any other,
without the seconds that imports take.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from npt.cli.main import main


class Program:
    """`npt ARGUMENTS`, begun. Its standard error goes to the file `errors`; all else nowhere, or,
    if it is `read`, into `out`, a pipe.
    """

    def __init__(self, arguments: list[str], errors: Path, read: bool = False):
        self.errors = errors
        self.out, out = os.pipe() if read else (-1, os.open(os.devnull, os.O_WRONLY))
        self.pid = os.fork()
        if not self.pid:
            status = 70
            try:
                if read:
                    os.close(self.out)  # of which it would be a reader itself
                status = _act(arguments, errors, out)
            finally:
                os._exit(status)  # nothing of the child comes back into the tests
        os.close(out)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit status; of one that a signal ended that signal's number, negative. A test's own
        limit of time ends what hangs.
        """
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def wait_for(self, begun: Callable[[], bool]) -> None:
        """Wait until something exists, which must happen before the program ends."""
        deadline = time.monotonic() + 120
        while not begun():
            assert os.waitpid(self.pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline, (
                self.errors.read_text()
            )
            time.sleep(0.005)


def _act(arguments: list[str], errors: Path, out: int) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        status = 120  # an interpreter's, where it cannot write at its end what is left to write
    return status

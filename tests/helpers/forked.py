"""Processes forked from this one, with the members of subprocess.Popen: killed and signalled as any
other, without the seconds that imports take.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from npt.cli.main import main


class Forked:
    """A process that does `act` and ends with the status that it returns.

    Args:
        act: what it does.
        log: file that it writes to; None for that of the process it is forked from.
        environment: what is set in its environment.
        out: descriptor of its standard output; None for the log.
    """

    def __init__(
        self,
        act: Callable[[], int | None],
        log: Path | None = None,
        environment: dict[str, str] | None = None,
        out: int | None = None,
    ):
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            status = 70
            try:
                status = _status(act, log, environment or {}, out)
            finally:
                os._exit(status)  # nothing of the child comes back into the tests

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

    def wait_for(self, begun: Callable[[], bool]) -> None:
        """Wait until something exists, which must happen before the process ends."""
        deadline = time.monotonic() + 120
        while not begun():
            assert self.poll() is None and time.monotonic() < deadline, self.returncode
            time.sleep(0.005)

    def _ended(self, how: int) -> int | None:
        pid, status = os.waitpid(self.pid, how)
        self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _status(
    act: Callable[[], int | None], log: Path | None, environment: dict[str, str], out: int | None
) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if log is not None:
        for descriptor in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    if out is not None:
        os.dup2(out, 1)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    status = 1
    try:
        status = act() or 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        status = 120  # an interpreter's, where it cannot write at its end what is left to write
    return status


def status_of(act: Callable[[], int | None]) -> int:
    """Do this in a fork that leaves nothing behind here, and return its exit status: negative for
    the signal that ended it, 70 for an exception.
    """
    pid = os.fork()
    if not pid:
        status = 70
        try:
            status = act() or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Program(Forked):
    """`npt ARGUMENTS`, begun. Its standard error goes to the file `errors`; all else nowhere, or,
    if it is `read`, into `out`, a pipe.
    """

    def __init__(self, arguments: Sequence[str], errors: Path, read: bool = False):
        self.errors = errors
        self.out, out = os.pipe() if read else (-1, os.open(os.devnull, os.O_WRONLY))

        def act() -> int:
            if read:
                os.close(self.out)  # of which it would be a reader itself
            return main(list(arguments))

        super().__init__(act, errors, out=out)
        os.close(out)


def forked_npt(command: Sequence[str], *, env: dict[str, str], process_group: int) -> Forked:
    """`subprocess.Popen` of a command that is Python with `-m npt`."""
    assert list(command[:3]) == [sys.executable, "-m", "npt"] and process_group == 0
    return Forked(lambda: main(list(command[3:])), environment=env)

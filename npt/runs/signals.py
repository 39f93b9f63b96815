"""Stopping on a signal: the loop finishes its micro-batch, saves and ends with 128 + the signal's
number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from npt.errors import StoppedError

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)


class StopOnSignal:
    """Within the context, SIGINT, SIGTERM, SIGUSR1 and SIGHUP (a lost terminal) set `number`
    instead of ending the process; a second one ends it as it would have outside, contexts around
    this one included.

    A signal that the process ignores stays ignored: that is how `nohup` asks a run to outlive its
    terminal. Outside the main thread, where Python allows no handlers, the context does nothing.

    Args:
        at_once: raise where the signal arrives instead: for what has nothing to save yet.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.number: int | None = None
        self.at_once = at_once
        self._before: dict[int, Any] = {}
        self._around: StopOnSignal | None = None

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler in (signal.SIG_IGN, None):  # ignored, or somebody's who is not Python
                    continue
                owner = getattr(handler, "__self__", None)
                self._around = owner if isinstance(owner, StopOnSignal) else self._around
                self._before[number] = signal.signal(number, self._note)
        return self

    def check(self) -> None:
        """Raise if a signal came: called where waiting for the end would take long and nothing is
        half done.

        Raises:
            StoppedError: with the signal's number.
        """
        if self.number is not None:
            raise StoppedError(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        context: StopOnSignal | None = self
        # inside out, so that what stands in the end is what stood in front of them all
        while context is not None:
            context._restore()
            context = context._around
        if self.at_once:
            raise StoppedError(number)
        with contextlib.suppress(OSError):  # nobody may be reading any more
            os.write(
                2,
                (
                    f"signal {number}: finishing the micro-batch and saving; once more ends at"
                    " once\n"
                ).encode(),
            )

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()

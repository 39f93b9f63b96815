"""Stop on a signal: the loop finishes its micro-batch, saves and exits with 128 + the signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from npt.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopOnSignal:
    """A context in which SIGINT, SIGTERM, SIGUSR1 and SIGHUP (a lost terminal) set `number` instead
    of ending the process. A second signal ends it as usual.

    An ignored signal stays ignored, so `nohup` works. Outside the main thread, where Python allows
    no handlers, the context has no effect.

    Args:
        at_once: raise StoppedError when the signal arrives, for work that has nothing to save yet.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.number: int | None = None
        self.at_once = at_once
        self._handlers: dict[int, Any] = {}
        self._around: StopOnSignal | None = None

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler in (signal.SIG_IGN, None):  # ignored, or not set by Python
                    continue
                owner = getattr(handler, "__self__", None)
                if isinstance(owner, StopOnSignal):
                    self._around = owner
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def check(self) -> None:
        """Raise StoppedError if a signal came. Call it between the steps of long work."""
        if self.number is not None:
            raise StoppedError(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        context: StopOnSignal | None = self
        # inside out, so that the handlers from before all contexts come last
        while context is not None:
            context._restore()
            context = context._around
        if self.at_once:
            raise StoppedError(number)
        line = f"signal {number}: finishing the micro-batch and saving; repeat to exit at once\n"
        with contextlib.suppress(OSError):  # standard error may be closed
            os.write(2, line.encode())

    def _restore(self) -> None:
        handlers = self._handlers
        self._handlers = {}
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()

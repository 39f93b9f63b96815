"""Stopping on a signal: the loop finishes its micro-batch, saves and ends with 128 + the signal's number."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class StopOnSignal:
    """Within the context, SIGINT, SIGTERM and SIGHUP (a lost terminal) set `number` instead of ending the process; a second
    one ends it as usual.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()
        with contextlib.suppress(OSError):  # nobody may be reading any more
            os.write(2, f"signal {number}: finishing the micro-batch and saving; once more ends at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *_: object) -> None:
        self._restore()

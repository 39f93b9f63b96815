"""A limit to the time of code that somebody else wrote, in Python alone and without a signal.

A thread looks at the clock for all others and raises in the one that takes too long. To run the
code in a thread of its own would cost three times what a chat template takes.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY = 0.2  # seconds between two looks at the clock

_lock = threading.Lock()
_deadlines: dict[int, float] = {}  # by thread; infinite once it is over
_watcher: list[threading.Thread] = []


class TimeLimitError(Exception):
    """Raised in code that did not end within its limit."""

    def __str__(self) -> str:
        return "it does not come to an end"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the context if it takes longer. Contexts do not nest."""
    thread = threading.get_ident()
    with _lock:
        _deadlines[thread] = time.monotonic() + seconds
        if not _watcher or not _watcher[0].is_alive():
            _watcher[:] = [threading.Thread(target=_watch, daemon=True)]
            _watcher[0].start()
    try:
        yield
    finally:
        with _lock:
            if _deadlines.pop(thread) == math.inf:
                _raise_in(thread, None)  # if it ended at that moment


def _watch() -> None:
    """Look at the clock until there is nothing to look after."""
    while True:
        time.sleep(_EVERY)
        with _lock:
            if not _deadlines:
                _watcher.clear()
                return
            now = time.monotonic()
            for thread, deadline in _deadlines.items():
                if now > deadline:
                    _deadlines[thread] = math.inf
                    _raise_in(thread, TimeLimitError)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raise in another thread at its next instruction; None takes that back."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)

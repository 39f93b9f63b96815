"""Heartbeats: a lost process of the run is found while the host waits for a GPU.

A sum over NCCL returns before it has happened. If another process is lost it never happens, and the
host blocks at its next use of that device. So a thread beats for this process in the launcher's
key-value store, reads the others' beats, and aborts the communicators when one is lost. That ends
the kernels that wait, and every host wait returns with numbers that mean nothing: check `lost`
before reading them. Beats show life; progress is bounded by the run's timeout.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

BEAT_SECONDS = 1.0
"""Between two beats; each costs a process two requests to the store."""

SILENT_SECONDS = 20.0
"""Without a beat before a process counts as lost: a busy or swapping host may delay a thread for
some seconds, and ending a healthy run costs more than waiting longer for a broken one."""

ENDED_SECONDS = 3.0
"""From the end of a process until others count it as lost: its last sums arrive by then."""

_BEAT = "npt/beat/"
_ENDED = b"ended"
_ABORTING = threading.Lock()


class Arrival(Protocol):
    """An event on a device, such as a `torch.cuda.Event`."""

    def query(self) -> bool: ...


class Pace(NamedTuple):
    """Seconds: that an arrival may take, between two beats, and without a beat until a process
    counts as lost."""

    timeout: float
    period: float = BEAT_SECONDS
    silence: float = SILENT_SECONDS


class Heartbeat:
    """A thread that beats for this process and watches the others.

    on_loss: called once, in the thread, after `lost` is set; ends the waits for the others. device:
    that arrivals are on.
    """

    def __init__(
        self,
        store: dist.Store,
        index: int,
        size: int,
        pace: Pace,
        on_loss: Callable[[], None],
        device: torch.device | None = None,
    ):
        self.lost: str | None = None
        """Why waiting is useless, once it is."""
        self._store, self._index, self._device = store, index, device
        self._timeout, self._period = pace.timeout, pace.period
        self._silence = min(pace.silence, pace.timeout)
        self._on_loss = on_loss
        self._others = [other for other in range(size) if other != index]
        # the last beat of each other process, and when it was first read
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._awaited: deque[tuple[Arrival, float]] = deque()
        self._no_store: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="npt-heartbeat", daemon=True)

    def start(self) -> None:
        """Start to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Write a last beat that says so, and stop."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(5 * self._period)

    def expect(self, arrival: Arrival) -> None:
        """Watch the others until this has arrived."""
        self._awaited.append((arrival, time.monotonic()))

    def wait_for(self, arrival: Arrival) -> bool:
        """Wait for an arrival while signal handlers run; return False if a process was lost."""
        self.expect(arrival)
        pause, until = 1e-4, time.monotonic() + self._timeout + 2 * self._silence
        while self.lost is None and not arrival.query():
            if time.monotonic() > until:  # the thread is stuck, or it would have said so
                self.lost = f"Timed out after {self._timeout:g} s"
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return self.lost is None

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            # a query in this thread must not make a context on another GPU
            torch.cuda.set_device(self._device)
        beats = 0
        while True:
            ended = self._stop.wait(self._period if beats else 0.0)
            if self._no_store is None and (not ended or reachable(self._store)):
                self._beat(_ENDED if ended else str(beats).encode())
            if ended:
                return
            beats += 1
            waiting = self._waiting()
            if waiting is not None and self.lost is None:
                self.lost = self._no_store or self._judge(waiting)
                if self.lost is not None:
                    self._on_loss()

    def _beat(self, value: bytes) -> None:
        """Write a beat and read those of the others."""
        try:
            self._store.set(f"{_BEAT}{self._index}", value.decode())
            for other in self._others:  # reading a key that is not there would wait for it
                if other not in self._seen and self._store.check([f"{_BEAT}{other}"]):
                    self._seen[other] = b"", time.monotonic()
            known = list(self._seen)
            for other, beat in zip(
                known, self._store.multi_get([f"{_BEAT}{other}" for other in known]), strict=True
            ):
                if self._seen[other][0] != beat:
                    self._seen[other] = bytes(beat), time.monotonic()
        except (RuntimeError, ValueError) as error:
            self._no_store = (
                f"the launcher's store does not answer: {str(error).splitlines()[0][:200]}"
            )

    def _waiting(self) -> float | None:
        """Return since when the oldest missing arrival is awaited, or None."""
        while self._awaited:
            arrival, since = self._awaited[0]
            try:
                if not arrival.query():
                    return since
            except RuntimeError:  # the device is broken; the main thread will notice
                pass
            self._awaited.popleft()
        return None

    def _judge(self, waiting_since: float) -> str | None:
        """Return why a process counts as lost, if one does.

        Only those that have beaten are judged: a process may still be loading its base.
        """
        now = time.monotonic()
        ages = {other: now - since for other, (_, since) in self._seen.items()}
        for other, (beat, _) in self._seen.items():
            if beat == _ENDED and ages[other] > min(ENDED_SECONDS, self._silence):
                return f"process {other} has ended"
        oldest = max(ages, key=ages.__getitem__, default=None)
        if oldest is not None and ages[oldest] > self._silence:
            return f"no heartbeat of process {oldest} for {ages[oldest]:.0f} s"
        if now - waiting_since > self._timeout:
            return f"Timed out after {self._timeout:g} s"
        return None


def reachable(store: dist.Store | None) -> bool:
    """Return whether a store's process still runs; the store itself would print a page of stack."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    if not hasattr(inner, "port"):
        return inner is not None
    try:
        with socket.create_connection((inner.host, inner.port), timeout=1.0):
            return True
    except OSError:
        return False


def abort_groups(seconds: float) -> bool:
    """Abort all process groups without waiting for their kernels; return whether it is done.

    NCCL's abort may hang.
    """
    return ended_within(seconds, _abort_groups)


def ended_within(seconds: float, act: Callable[[], object]) -> bool:
    """Return whether `act` ends within these seconds; else it is left to a daemon thread."""
    thread = threading.Thread(target=act, name="npt-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _abort_groups() -> None:
    from torch.distributed import distributed_c10d

    # if NCCL cannot, nothing more can be done here
    with _ABORTING, contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            distributed_c10d._abort_process_group()

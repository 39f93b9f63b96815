"""Heartbeats of the processes of a run: a lost one is found while the host waits for a GPU, which
runs no Python meanwhile.

A sum over NCCL returns before it has happened. If another process is lost it never happens, and the
host blocks at whatever it does next on that device: reading a result, or merely launching kernels
once the queue of launches is full. So a thread of its own beats for this process in the launcher's
key-value store, reads the beats of the others, and aborts the communicators when one of them is
lost, which ends the kernels that wait for it. Every host wait returns then, with numbers that mean
nothing; whoever waited asks `lost` before reading them.

A beat proves that a process is alive, not that it makes progress: progress is bounded by the run's
timeout. Beats are judged only while this process waits for something, and only those of processes
that have beaten before: a process that still loads its base is not lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

BEAT_SECONDS = 1.0
"""Between two beats. Each costs a process two requests to the store."""

SILENT_SECONDS = 20.0
"""Without a beat after which a process counts as lost. Reading a large tensor or a swapped-out host
may keep a thread from running for some seconds; taking a healthy run down costs more than waiting a
little longer for a broken one."""

ENDED_SECONDS = 3.0
"""After which a process that has ended is missed by one that waits: what it still had a part in has
arrived by then.
"""

_BEAT = "npt/beat/"
_ENDED = b"ended"


_ABORTING = threading.Lock()


class Arrival(Protocol):
    """Something that happens on a device, such as a `torch.cuda.Event`."""

    def query(self) -> bool: ...


class Heartbeat:
    """A thread that beats for this process and watches the others.

    Args:
        store: the launcher's, on a connection that nobody else blocks.
        index: of this process.
        size: how many there are.
        timeout: seconds that an arrival may take, of however lively processes.
        on_loss: called once, in the thread, after `lost` has been set; it ends what waits for the
            others.
        device: that arrivals are on.
        period: seconds between two beats.
        silence: seconds without a beat after which a process counts as lost; at most `timeout`.
    """

    def __init__(
        self,
        store: dist.Store,
        index: int,
        size: int,
        timeout: float,
        on_loss: Callable[[], None],
        device: torch.device | None = None,
        *,
        period: float = BEAT_SECONDS,
        silence: float = SILENT_SECONDS,
    ):
        self.lost: str | None = None
        """Why nothing is to be waited for any more, once that is so."""
        self._store, self._index, self._device = store, index, device
        self._timeout, self._period, self._silence = timeout, period, min(silence, timeout)
        self._on_loss = on_loss
        self._others = [other for other in range(size) if other != index]
        # the last beat of each other process, and when it was first read
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._awaited: deque[tuple[Arrival, float]] = deque()
        self._no_store: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="npt-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End the beats, and say that no more are coming."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(5 * self._period)

    def expect(self, arrival: Arrival) -> None:
        """Watch the others until this has happened."""
        self._awaited.append((arrival, time.monotonic()))

    def wait_for(self, arrival: Arrival) -> bool:
        """Wait until this has happened, while Python's signal handlers run.

        Returns:
            Whether it can be relied on; False if a process was lost before.
        """
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
                self.lost = (
                    self._no_store or self._ended() or self._silent() or self._overdue(waiting)
                )
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
        """Since when this process waits for the oldest arrival that has not happened; None if it
        waits for none.
        """
        while self._awaited:
            arrival, since = self._awaited[0]
            try:
                if not arrival.query():
                    return since
            except RuntimeError:  # the device is broken, which the main thread finds out by itself
                pass
            self._awaited.popleft()
        return None

    def _ended(self) -> str | None:
        limit = time.monotonic() - min(ENDED_SECONDS, self._silence)
        ended = [
            other for other, (beat, since) in self._seen.items() if beat == _ENDED and since < limit
        ]
        return f"process {ended[0]} has ended" if ended else None

    def _silent(self) -> str | None:
        now = time.monotonic()
        late = [
            (now - since, other)
            for other, (_, since) in self._seen.items()
            if now - since > self._silence
        ]
        return f"no heartbeat of process {max(late)[1]} for {max(late)[0]:.0f} s" if late else None

    def _overdue(self, since: float) -> str | None:
        return (
            f"Timed out after {self._timeout:g} s"
            if time.monotonic() - since > self._timeout
            else None
        )


def reachable(store: dist.Store | None) -> bool:
    """Whether the process that keeps a store is still there; the store itself would say so with a
    page of stack.
    """
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
    """Abort all process groups without waiting for their kernels, and forget them.

    Args:
        seconds: to wait for this at most. NCCL's own abort may hang; it is left to a daemon thread
            then.

    Returns:
        Whether it is done.
    """
    thread = threading.Thread(target=_abort_groups, name="npt-abort", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _abort_groups() -> None:
    from torch.distributed import distributed_c10d

    # where NCCL cannot, nothing more can be done here
    with _ABORTING, contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            distributed_c10d._abort_process_group()

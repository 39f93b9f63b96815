"""The processes of one run: what they sum and tell one another, and how a failing one ends all.

All processes hold the same adapters and take the same decisions, because they decide on the same
sums. They exchange sums of numbers and JSON, never a pickle.

A process may fail where all expect it (the training loop sends a flag with its sums) or anywhere
else. There it leaves: it writes its reason into the launcher's key-value store and closes its
connections, which wakes whoever waits for it; they look the reason up and end with it. A process
that was killed leaves no reason and is named as the one that does not answer. Over NCCL a dying
process closes nothing, so there `heartbeat.py` watches.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from npt.distributed.heartbeat import Heartbeat, Pace, abort_groups, ended_within, reachable
from npt.errors import ConfigError, NPTError, ProcessError, StoppedError

ANSWER_SECONDS = 5.0
"""How long a process that lost its connections waits for the others to report."""

ABORT_SECONDS = 20.0
"""How long to wait for NCCL's communicators to abort."""

_KEY = "npt/left/"

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class ProcessGroup:
    """The processes of a run, seen from one of them; by default it is alone, which costs nothing.

    index: of this process, from 0. device: that it computes on. store: the launcher's key-value
    store. owned: `close` destroys torch's process group. Exchanges raise ProcessError if another
    process is lost or has left with a reason.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        store: dist.Store | None = None,
        *,
        owned: bool = False,
    ):
        self.index, self.size, self.device = index, size, device
        self.broken = False
        """A process was lost, or this one has left: nothing can be exchanged any more."""
        self.before_sums: Callable[[], None] | None = None
        """Called before every exchange; a sharded base hands out layers there."""
        self._store, self._owned = store, owned
        self._heartbeat: Heartbeat | None = None
        self._known: BaseException | None = None
        self._loss: ProcessError | None = None

    @property
    def main(self) -> bool:
        """True for the process that writes and prints."""
        return self.index == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place, without waiting for a device; NaN stays NaN."""
        if self.size > 1:
            self._collect(lambda: dist.all_reduce(tensor), tensor.device)
        return tensor

    def wait_for(self, arrival: Any) -> None:
        """Wait for a `torch.cuda.Event` or the like while signal handlers run; ProcessError if a
        process was lost and the results on the device mean nothing."""
        if self.broken:
            raise self._end()
        if self._heartbeat is None:
            arrival.synchronize()
        elif not self._heartbeat.wait_for(arrival):
            raise self._lost(RuntimeError(self._heartbeat.lost))

    def watch(self, timeout: float, **settings: float) -> None:
        """Start this process's heartbeat at the `Pace` of these seconds."""
        assert self._store is not None
        own: Any = self._store
        if hasattr(own, "clone"):  # a connection whose requests wait for nobody else's
            own = own.clone()
            own.set_timeout(timedelta(seconds=ANSWER_SECONDS))

        def end() -> None:
            with contextlib.suppress(RuntimeError):
                # others that look for the lost process need not wait for this one
                own.set(f"{_KEY}{self.index}", "{}")
            abort_groups(ABORT_SECONDS)

        self._heartbeat = Heartbeat(
            own, self.index, self.size, Pace(timeout, **settings), end, self.device
        )
        self._heartbeat.start()

    def each(self, value: Tensor) -> Tensor:
        """Return every process's scalar, by process: [W] in fp32, which must hold it exactly."""
        places = torch.zeros(self.size, dtype=torch.float32, device=value.device)
        places[self.index] = value
        return self.sum_(places)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum over all processes of each of these numbers on the host."""
        if self.size == 1:
            return list(numbers)
        on = self.exchange_device
        return self.sum_(torch.tensor(numbers, dtype=torch.float64, device=on)).tolist()

    def gather_json(self, value: Any) -> list[Any]:
        """Return each process's value, by process, through JSON; a lone process's as it is."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.index] = len(own)
        lengths = self.sum_(lengths.to(self.exchange_device)).cpu()
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(own)] = own
        padded = padded.to(self.exchange_device)
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        self._collect(lambda: dist.all_gather(everyone, padded))
        return [
            json.loads(part.cpu()[:length].numpy().tobytes())
            for part, length in zip(everyone, lengths.tolist(), strict=True)
        ]

    def first(self, act: Callable[[], T]) -> T:
        """Call `act` on process 0 and return its value on every process, through JSON elsewhere;
        its error is a ProcessError there."""
        if self.size == 1:
            return act()
        told: dict[str, Any] = {}
        value, failure = None, None
        if self.main:
            try:
                value = act()
                told = {"value": value}
            except Exception as error:
                failure, told = error, reason_of(error)
        said = self.gather_json(told)[0]
        if failure is not None:
            raise self.everywhere(failure)
        if "value" not in said:
            raise self.everywhere(_failed(0, said))
        return value if self.main else said["value"]  # type: ignore[return-value]

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError on all processes if a value, by its name, is not the same on all."""
        everyone = self.gather_json(values)
        for process, theirs in enumerate(everyone):
            for name in everyone[0] | theirs:
                one, other = everyone[0].get(name), theirs.get(name)
                if one != other:
                    one, other = ("unset" if value is None else value for value in (one, other))
                    raise self.everywhere(
                        ConfigError(
                            f"process {process} has {name} {other}, process 0 has {one}; start"
                            " every process with the same settings and files"
                        )
                    )

    def wait(self) -> None:
        """Wait until every process has come here; raises as `sum_`."""
        if self.size > 1:
            self.sum_(torch.zeros((), device=self.exchange_device))

    def everywhere(self, error: E) -> E:
        """Return an error that every process raises at this point, so nobody must be told of it."""
        self._known = error
        return error

    def met_by_all(self, error: BaseException) -> bool:
        """Return whether every process met this error and all can still exchange messages."""
        return self.size == 1 or (error is self._known and not self.broken)

    @contextmanager
    def member(self) -> Iterator[None]:
        """Leave the others, with the reason, on an error that this process alone meets.

        On an error that all meet they wait for one another: a launcher ends all processes when the
        first one fails, and process 0 may still be writing.
        """
        try:
            yield
        except BaseException as error:
            if not self.met_by_all(error):
                self.leave(error)
            else:
                with contextlib.suppress(ProcessError):
                    self.wait()
            raise

    def leave(self, error: BaseException) -> None:
        """Tell the others why this process stops, and close the connections they may wait at."""
        if self.size > 1 and not self.broken:
            self._tell(reason_of(error))
            self._disconnect()

    def close(self) -> None:
        """Destroy torch's process group if it was made here."""
        if not self.broken and self._owned and dist.is_initialized():
            self._owned = False
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._disconnect()

    @property
    def exchange_device(self) -> torch.device:
        """The device that numbers for the host are sent from: the host, if the backend can."""
        with_host = "gloo" in str(dist.get_backend_config())
        return torch.device("cpu") if with_host or self.device is None else self.device

    def _collect(self, collective: Callable[[], Any], device: torch.device | None = None) -> None:
        if self.before_sums is not None:
            self.before_sums()
        self.collect(collective, device)

    def collect(self, collective: Callable[[], Any], device: torch.device | None = None) -> None:
        """Run a collective operation on this device; on a GPU it is only launched."""
        if self.broken:
            raise self._end()
        if self._heartbeat is not None and self._heartbeat.lost is not None:
            raise self._lost(RuntimeError(self._heartbeat.lost))
        try:
            collective()
        except Exception as error:
            # torch raises errors of any class once the heartbeat has aborted the group
            lost = self._heartbeat is not None and self._heartbeat.lost
            if not lost and not isinstance(error, RuntimeError):
                raise
            raise self._lost(RuntimeError(lost) if lost else error) from error  # type: ignore[arg-type]
        if self._heartbeat is not None and device is not None and device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._heartbeat.expect(event)

    def _end(self) -> ProcessError:
        left = f"process {self.index} has left the other processes already"
        return ProcessError(left) if self._loss is None else self._loss

    def _lost(self, error: RuntimeError) -> ProcessError:
        """Leave, and return an error that says who is missing and why, if that can be found."""
        self._tell({})
        self._disconnect()  # whoever waits for this process is woken, and looks as well
        self._loss = self._explain(str(error).splitlines()[0].split("] ", 1)[-1].split(". ", 1)[0])
        return self._loss

    def _explain(self, said: str) -> ProcessError:
        reasons, silent = self._answers()
        for process, reason in reasons.items():
            return _failed(process, reason)
        if self._store is not None and not silent:
            return ProcessError(
                f"the other processes have ended without process {self.index} ({said}); see what"
                " they say"
            )
        names = ", ".join(map(str, silent)) if silent else "unknown"
        return ProcessError(
            f"process {names} does not answer any more ({said}); look at that process, then"
            " continue with --resume auto"
        )

    def _answers(self) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Return the reasons that others left, and the processes silent for a few seconds."""
        silent = [process for process in range(self.size) if process != self.index]
        reasons: dict[int, dict[str, Any]] = {}
        if self._store is None:
            return {}, silent if self.size == 2 else []
        until = time.monotonic() + ANSWER_SECONDS
        while silent and not reasons and time.monotonic() < until:
            left = self._left_by(silent)
            if left is None:
                return {}, [0]  # without a launcher process 0 keeps the store
            silent = [process for process in silent if process not in left]
            reasons = {process: reason for process, reason in left.items() if reason}
            if self.size == 2:
                break
            time.sleep(0.05)
        return reasons, silent

    def _left_by(self, others: Sequence[int]) -> dict[int, dict[str, Any]] | None:
        """Return the reasons that others have left; None if the store does not answer."""
        found: dict[int, dict[str, Any]] = {}

        def look(store: dist.Store) -> None:
            for process in others:
                if store.check([f"{_KEY}{process}"]):
                    found[process] = json.loads(store.get(f"{_KEY}{process}"))

        return dict(found) if self._ask(look) else None

    def _tell(self, reason: dict[str, Any]) -> None:
        self._ask(lambda store: store.set(f"{_KEY}{self.index}", json.dumps(reason)))

    def _ask(self, request: Callable[[dist.Store], object]) -> bool:
        """Ask something of the store; return whether it answers at all.

        The port of a process that was stopped still takes connections, and torch waits for its
        answer for ever.
        """
        store = self._store
        if store is None or not reachable(store):
            return False

        def ask() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                request(store)

        if not ended_within(ANSWER_SECONDS, ask):
            self._store = None  # what waits in it holds its lock
            return False
        return True

    def _disconnect(self) -> None:
        self.broken = self.size > 1
        if self._owned and dist.is_initialized():
            self._owned = False
            # destroying a group waits for its kernels, which may wait for others
            if self._heartbeat is not None:
                abort_groups(ABORT_SECONDS)
            else:
                with contextlib.suppress(RuntimeError):
                    dist.destroy_process_group()
        if self._heartbeat is not None:
            self._heartbeat.stop()


def reason_of(error: BaseException) -> dict[str, Any]:
    """Return what other processes are told of an error, as JSON."""
    text = " ".join(str(error).split())[:500]
    plain = isinstance(error, NPTError | StoppedError)
    return {
        "error": text if plain else f"{type(error).__name__}: {text}",
        "exit_status": exit_status_of(error),
    }


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of the command line on this error."""
    if isinstance(error, NPTError | StoppedError):
        return error.exit_status
    if isinstance(error, torch.OutOfMemoryError):
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def process_failure(reasons: list[dict[str, Any] | None]) -> ProcessError:
    """Return the error of a healthy process, given each process's `reason_of` or None."""
    return next(_failed(process, reason) for process, reason in enumerate(reasons) if reason)


def _failed(process: int, reason: Mapping[str, Any]) -> ProcessError:
    return ProcessError(f"process {process} failed: {reason['error']}", int(reason["exit_status"]))

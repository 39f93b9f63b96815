"""The processes of one run: what they sum and tell one another, and how they end together.

All decide alike, on the same sums. A process may fail where all expect it (the training loop sends
a flag with its sums): the others end with its reason. Anywhere else it says its reason itself and
closes its connections, as a killed one does. Over gloo that ends whoever waits for it; over NCCL
torch's watchdog ends a wait at the timeout, or the launcher before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from npt.errors import ConfigError, ProcessError, is_out_of_memory

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class ProcessGroup:
    """The processes of a run, seen from one of them; by default it is alone, which costs nothing.

    Exchanges raise ProcessError if another process has ended or does not come.

    Args:
        index: of this process, from 0.
        device: that it computes on.
        owned: `close` destroys torch's process group.

    Attributes:
        broken: a process was lost, or this one has left: nothing can be exchanged any more.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        *,
        owned: bool = False,
    ):
        self.index, self.size, self.device = index, size, device
        self.broken = False
        self._owned = owned
        self._met: BaseException | None = None
        self._loss: ProcessError | None = None

    @property
    def main(self) -> bool:
        """True for the process that writes and prints."""
        return self.index == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place, without waiting for a device; NaN stays NaN."""
        if self.size > 1:
            self._collect(lambda: dist.all_reduce(tensor))
        return tensor

    def each(self, value: Tensor) -> Tensor:
        """Return every process's scalar, by process: [W] in fp32, which must hold it exactly."""
        places = torch.zeros(self.size, dtype=torch.float32, device=value.device)
        places[self.index] = value
        return self.sum_(places)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum over all processes of each of these numbers on the host."""
        return [sum(each) for each in zip(*self.gather(numbers), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Return each process's value, by process."""
        everyone = [value] * self.size
        if self.size > 1:
            self._collect(lambda: dist.all_gather_object(everyone, value))
        return everyone

    def first(self, act: Callable[[], T]) -> T:
        """Call `act` on process 0 and return its value on every process; its error is a
        ProcessError elsewhere."""
        if self.size == 1:
            return act()
        value, failure = None, None
        if self.main:
            try:
                value = act()
            except Exception as error:
                failure = error
        self.raise_together(failure)
        return self.gather(value)[0]

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError on all processes if a value, by its name, is not the same on all."""
        first, *others = self.gather(values)
        for process, theirs in enumerate(others, start=1):
            for name in first | theirs:
                pair = first.get(name), theirs.get(name)
                one, other = ("unset" if value is None else value for value in pair)
                if one != other:
                    message = (
                        f"process {process} has {name} {other}, process 0 has {one}; start every"
                        " process with the same settings and files"
                    )
                    raise self.everywhere(ConfigError(message))

    def wait(self) -> None:
        """Wait until every process has come here; raises as `sum_`."""
        self.gather(None)

    def everywhere(self, error: E) -> E:
        """Return an error that every process raises at this point, so nobody must be told of it."""
        self._met = error
        return error

    def raise_together(self, failure: Exception | None) -> None:
        """End every process if one has failed: with `failure` there, a ProcessError elsewhere."""
        if self.size == 1:
            return
        ours = None
        if failure is not None:
            text, status = (
                " ".join(str(failure).split())[:500],
                getattr(failure, "exit_status", None),
            )
            if status is None:  # no error of ours
                text = f"{type(failure).__name__}: {text}"
                status = 2 if is_out_of_memory(failure) else 1
            ours = text, status
        for process, reason in enumerate(self.gather(ours)):
            if reason is not None:
                message, status = reason
                error = ProcessError(f"process {process} failed: {message}", status)
                raise self.everywhere(error if failure is None else failure)

    def met_by_all(self, error: BaseException) -> bool:
        """Return whether every process met this error and all can still exchange messages."""
        return self.size == 1 or (error is self._met and not self.broken)

    @contextmanager
    def member(self) -> Iterator[None]:
        """Leave the others on an error that this process alone meets.

        On an error that all meet they wait for one another: a launcher ends all processes when the
        first one fails, and process 0 may still be writing.
        """
        try:
            yield
        except BaseException as error:
            if not self.met_by_all(error):
                self.leave()
            else:
                with contextlib.suppress(ProcessError):
                    self.wait()
            raise

    def leave(self) -> None:
        """Close the connections that the others may wait at."""
        self.broken = self.size > 1
        self.close()

    def close(self) -> None:
        """Destroy torch's process group if it was made here."""
        # over NCCL this would wait for kernels that wait for the lost; there it is left to the exit
        waits = self.broken and self.device is not None and self.device.type != "cpu"
        if self._owned and dist.is_initialized() and not waits:
            self._owned = False
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self.broken = self.size > 1

    def _collect(self, collective: Callable[[], Any]) -> None:
        """Run a collective operation; on a GPU it is only launched."""
        self.check_unbroken()
        try:
            collective()
        except RuntimeError as error:
            raise self._lost(error) from error

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Name the process that is lost if an exchange of torch's own fails within, as FSDP's."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> ProcessError:
        self.leave()  # whoever waits for this process is woken
        reason = str(error).splitlines()[0].split("] ", 1)[-1].split(". ", 1)[0]
        name = f"process {1 - self.index}" if self.size == 2 else "another process"
        self._loss = ProcessError(
            f"{name} does not answer any more ({reason}); see what it says, then continue with"
            " --resume auto"
        )
        return self._loss

    def check_unbroken(self) -> None:
        """Raise ProcessError if a process was lost: what it had to add may never arrive."""
        if self.broken:
            left = f"process {self.index} has left the other processes already"
            raise ProcessError(left) if self._loss is None else self._loss

"""The processes of one run: how they exchange sums and messages, and how they stop together.

All processes decide alike, from the same sums. If one fails where all expect it (the training loop
sends a flag with its sums), the others stop with its reason. Anywhere else it prints its own reason
and closes its connections, like a killed process. With gloo the waiting processes then stop at
once; with NCCL torch's watchdog stops them at the timeout, unless the launcher does so before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from npt.errors import ConfigError, ProcessError, is_out_of_memory

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

DTENSOR = "torch.distributed.tensor"


def is_joined() -> bool:
    """Return whether torch has a process group."""
    return dist.is_available() and dist.is_initialized()


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, of which this process holds a shard."""
    module = sys.modules.get(DTENSOR)  # None until a DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


class ProcessGroup:
    """The processes of a run, seen from one of them; by default there is only this one.

    Exchanges raise ProcessError if another process has ended or does not respond.

    Args:
        index: this process's index, from 0.
        size: the number of processes.
        device: the device that this process computes on.
        owned: whether `close` destroys torch's process group.

    Attributes:
        broken: whether a process was lost or this one has left, which ends all exchanges.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        *,
        owned: bool = False,
    ):
        self.index = index
        self.size = size
        self.device = device
        self.broken = False
        self._owned = owned
        self._met: BaseException | None = None
        self._loss: ProcessError | None = None

    @classmethod
    def of_torch(cls, device: torch.device, *, owned: bool = False) -> Self:
        """Return the processes of torch's process group."""
        return cls(dist.get_rank(), dist.get_world_size(), device, owned=owned)

    @property
    def main(self) -> bool:
        """True for process 0, which writes and prints."""
        return self.index == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place, without waiting for the device; NaN stays NaN."""
        if self.size > 1:
            self._collect(lambda: dist.all_reduce(tensor))
        return tensor

    def each(self, value: Tensor) -> Tensor:
        """Return every process's scalar: [processes] in fp32, which must hold it exactly."""
        places = torch.zeros(self.size, dtype=torch.float32, device=value.device)
        places[self.index] = value
        return self.sum_(places)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return each of these host numbers summed over all processes."""
        return [sum(each) for each in zip(*self.gather(numbers), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order."""
        everyone = [value] * self.size
        if self.size > 1:
            self._collect(lambda: dist.all_gather_object(everyone, value))
        return everyone

    def first(self, act: Callable[[], T]) -> T:
        """Call `act` on process 0 and return its value everywhere. If it raises, the other
        processes raise ProcessError.
        """
        if self.size == 1:
            return act()
        value = failure = None
        if self.main:
            try:
                value = act()
            except Exception as error:
                failure = error
        self.raise_together(failure)
        return self.gather(value)[0]

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError on all processes if a named value differs between them."""
        first, *others = self.gather({n: value for n, value in values.items() if value is not None})
        for process, theirs in enumerate(others, start=1):
            for name in first | theirs:
                one = first.get(name, "unset")
                other = theirs.get(name, "unset")
                if one != other:
                    message = (
                        f"process {process} has {name} {other}, but process 0 has {one}; start"
                        " every process with the same settings and files"
                    )
                    raise self.everywhere(ConfigError(message))

    def wait(self) -> None:
        """Wait until every process calls this; raises like `sum_`."""
        self.gather(None)

    def everywhere(self, error: E) -> E:
        """Mark and return an error that every process raises here, so none needs to be told."""
        self._met = error
        return error

    def raise_together(self, failure: Exception | None) -> None:
        """If one process has failed, raise `failure` there and ProcessError on the others."""
        if self.size == 1:
            return
        ours = None if failure is None else _reason(failure)
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
        """Leave the other processes on an error that only this one meets.

        If all meet it, they wait for each other first: a launcher stops all processes when one
        fails, and process 0 may still be writing.
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
        """Close the connections that other processes may wait on."""
        self.broken = self.size > 1
        self.close()

    def close(self) -> None:
        """Destroy torch's process group if it was made here."""
        # with NCCL this could wait for a lost process, so it is left to the exit
        waits = self.broken and self.device is not None and self.device.type != "cpu"
        if self._owned and dist.is_initialized() and not waits:
            self._owned = False
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self.broken = self.size > 1

    def _collect(self, collective: Callable[[], Any]) -> None:
        """Run a collective operation; a GPU is not waited for."""
        self.check_unbroken()
        try:
            collective()
        except RuntimeError as error:
            raise self._lost(error) from error

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Raise ProcessError if an exchange inside torch fails in the context, such as FSDP's."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> ProcessError:
        self.leave()  # wakes processes that wait for this one
        # torch puts the place in its source before the reason, and advice after it
        line = str(error).splitlines()[0]
        reason = line.split("] ", 1)[-1].split(". ", 1)[0]
        name = f"process {1 - self.index}" if self.size == 2 else "another process"
        self._loss = ProcessError(
            f"{name} no longer responds ({reason}); see its own message, then continue from the"
            " last checkpoint (npt: --resume auto)"
        )
        return self._loss

    def check_unbroken(self) -> None:
        """Raise ProcessError if a process was lost, since its part may never arrive."""
        if self.broken:
            left = f"process {self.index} has already left the other processes"
            raise ProcessError(left) if self._loss is None else self._loss


def _reason(failure: Exception) -> tuple[str, int]:
    """Return what other processes are told of a failure, and their exit status."""
    text = " ".join(str(failure).split())[:500]
    status = getattr(failure, "exit_status", None)
    if status is not None:
        return text, status
    # not one of npt's errors
    return f"{type(failure).__name__}: {text}", 2 if is_out_of_memory(failure) else 1

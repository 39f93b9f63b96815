"""Work of a start that succeeds on every process or fails on all, and goes on on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from rich.console import Console
from transformers import PreTrainedModel

from npt.adapters.converted import is_sharded
from npt.console import say
from npt.distill.step import free_memory
from npt.distributed.processes import ProcessGroup
from npt.errors import NoMemoryError, NumericalError, first_line, is_out_of_memory

T = TypeVar("T")

HOST = torch.device("cpu")


def together(
    processes: ProcessGroup, act: Callable[[], T], model: PreTrainedModel | None = None
) -> T:
    """Return `act()` if it succeeds on every process; else raise on all of them.

    Args:
        processes: those that call this function.
        act: function without communication.
        model: the model that `act` runs, if any. If its base is sharded, an error is raised at
            once, since the other processes wait for layers.

    Raises:
        torch.OutOfMemoryError: out of memory on any process; all may start again.
        ProcessError: another process raised another error.
    """
    if processes.size == 1:
        return act()
    failure: Exception | None = None
    lack: str | None = None  # of memory
    try:
        with processes.exchanging():
            result = act()
    except Exception as error:
        if model is not None and is_sharded(model):
            _leave_at_once(error)
        if is_out_of_memory(error):
            lack = first_line(error)
        failure = error
    processes.raise_together(failure if lack is None else None)
    for process, line in enumerate(processes.gather(lack)):
        if line is not None:
            other = torch.OutOfMemoryError(f"process {process}: {line}")
            raise processes.everywhere(failure or other)
    return result


def _leave_at_once(error: Exception) -> None:
    """Raise an error with a sharded base, unless its raiser has kept up with the others."""
    if is_out_of_memory(error):
        raise NoMemoryError(
            f"calibration: out of memory with a sharded base ({first_line(error)[:200]}):"
            " lower --batch_size or --max_length, or convert fewer --layers"
        ) from error
    if not isinstance(error, NumericalError):
        raise error


def on_device_or_host(
    compute: Callable[[torch.device], T], device: torch.device, console: Console
) -> T:
    """Return `compute(device)`; if its matrices do not fit or cannot be factorised there, print a
    line and compute with matrices on the host.
    """
    try:
        return compute(device)
    except (RuntimeError, MemoryError) as error:
        # LAPACK and cuSOLVER fail on different matrices
        failed = is_out_of_memory(error) or isinstance(error, torch.linalg.LinAlgError)
        if device == HOST or not failed:
            raise
        reason = first_line(error)[:160]
    free_memory(device)  # only here: inside the handler the error keeps the tensors alive
    say(console, f"calibration: {reason}; retrying with its matrices on the host")
    return compute(HOST)

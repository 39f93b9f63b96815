"""Errors that a user can cause, each with the exit status of the program.

The command line prints the message as one line without a traceback (`--debug` shows it). A message
names the thing, the values and the remedy. A bug in NPT is an `assert` or a plain exception.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from contextlib import suppress

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and marks of text direction."""


def kind_of(value: object) -> str:
    """Return the type of a value with its article, for messages."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def printable(text: str, one_line: bool = False) -> str:
    """Return text with control characters escaped as in Python, with `one_line` newlines too.

    Names, records and templates come from outside; on a terminal an escape sequence could hide a
    line, and a newline could forge one.
    """
    text = _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)
    return text.replace("\n", "\\n") if one_line else text


def printable_lines(lines: Iterable[str]) -> str:
    """Join lines, with control characters and newlines in each of them escaped."""
    return "\n".join(printable(line, one_line=True) for line in lines)


class NPTError(Exception):
    """Base class of all errors for the user. `exit_status` is the exit status of the process."""

    exit_status = 2


class ConfigError(NPTError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class NotSupportedError(ConfigError):
    """A documented setting that is not implemented yet."""


class ModelError(NPTError, ValueError):
    """A base model that cannot be loaded or converted."""


class DataError(NPTError, ValueError):
    """Data that cannot be read or trained on."""


class PrecisionError(NPTError, RuntimeError):
    """A module would compute in a dtype other than the one the policy asks for."""


class NoMemoryError(NPTError, RuntimeError):
    """A single sample does not fit into memory. (Larger micro-batches are split first.)"""


class CardError(NPTError, RuntimeError):
    """A GPU that is unusable after a CUDA error. A run has written a post-mortem bundle."""


class AdapterFileError(NPTError, ValueError):
    """A saved adapter that cannot be used: its files, settings or base are wrong."""

    exit_status = 5


class HubError(NPTError, OSError):
    """A model hub that cannot be reached or refuses a request."""


class BundleError(NPTError, ValueError):
    """A post-mortem bundle that cannot be replayed: its files or base are wrong."""

    exit_status = 5


class CheckpointError(NPTError, ValueError):
    """A checkpoint that cannot be resumed: its files, form or settings are wrong."""

    exit_status = 5


class StoppedError(BaseException):
    """A signal ended the work when nothing was left to save.

    Like KeyboardInterrupt it is not an `Exception`, because the signal may arrive inside a library
    that converts every `Exception` into one of its own.
    """

    def __init__(self, number: int):
        super().__init__(f"stopped by signal {number}")
        self.exit_status = 128 + number


class ProcessError(NPTError, RuntimeError):
    """Another process of the run failed, with this status, or was lost or differs (status 6)."""

    def __init__(self, message: str, exit_status: int = 6):
        super().__init__(message)
        self.exit_status = exit_status


class TooManyRefusalsError(NPTError, RuntimeError):
    """Training stopped after too many refusals. A run has written a post-mortem bundle."""

    exit_status = 3


class SmokeTestError(NPTError, RuntimeError):
    """The smoke test before training failed."""

    exit_status = 4


class NumericalError(NPTError, ArithmeticError):
    """Numbers that cannot be computed with: non-finite values or unknown token ids."""


_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_NOT_INITIALIZED",
)
"""Out-of-memory messages without an error class. NOT_INITIALIZED: a library's state did not fit."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, with the next one if it ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def let_go(error: BaseException) -> None:
    """Clear the variables of a suppressed error's frames, as far as these have ended.

    They keep activations alive, and with torch 2.9 the hooks of a checkpointed forward in place.
    """
    import inspect
    import traceback

    suspends = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_flags & suspends:  # to clear a data loader's generator would end it
            continue
        with suppress(RuntimeError):  # it has not ended
            frame.clear()
            _ = frame.f_locals  # before Python 3.13 a copy, which whoever read it left: renew it


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk or a limit on what one may write."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device, without loading torch."""
    if isinstance(error, NPTError):  # its message may quote such an error
        return False
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)

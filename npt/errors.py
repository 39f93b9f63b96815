"""Errors a user can cause, each with the exit status it ends the program with.

The command line prints their message as one line and no traceback (`--debug` shows it). A message
names the thing, the values and the remedy. Anything that is *our* fault stays an `assert` or a
plain exception and shows its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""All but tab and newline; with what turns the direction of text around."""


def kind_of(value: object) -> str:
    """Return the type of a value with its article, for messages."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def printable(text: str, one_line: bool = False) -> str:
    """Return text with its control characters written out, as Python writes them.

    Names, records and templates come from outside, and a terminal obeys what it is sent: an escape
    could hide a line, a newline forge one.

    Args:
        one_line: newlines are written out too.
    """
    text = _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)
    return text.replace("\n", "\\n") if one_line else text


def printable_lines(lines: Iterable[str]) -> str:
    """Return a text of these lines, each of them one whatever it quotes."""
    return "\n".join(printable(line, one_line=True) for line in lines)


class NPTError(Exception):
    """Base of every error meant for the user; `exit_status` is what the process ends with."""

    exit_status = 2


class ConfigError(NPTError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class NotSupportedError(ConfigError):
    """A documented setting whose part is not built yet: it is refused, never ignored."""


class ModelError(NPTError, ValueError):
    """A base model that cannot be loaded or converted."""


class DataError(NPTError, ValueError):
    """Data that cannot be read, or from which nothing can be trained."""


class PrecisionError(NPTError, RuntimeError):
    """A module would compute in a dtype other than the one the policy asks for."""


class NoMemoryError(NPTError, RuntimeError):
    """One sample at a time does not fit into memory. (If fewer samples fit, fewer are computed at
    once, and nothing is raised.)
    """


class CardError(NPTError, RuntimeError):
    """A card that computes nothing any more, after a CUDA error; runs have left a post-mortem."""


class AdapterFileError(NPTError, ValueError):
    """A saved adapter that does not fit: its file, its settings or its base."""

    exit_status = 5


class HubError(NPTError, OSError):
    """A model hub that cannot be reached, or that refuses what was asked of it."""


class BundleError(NPTError, ValueError):
    """A post-mortem bundle that cannot be replayed: its files, or its base."""

    exit_status = 5


class CheckpointError(NPTError, ValueError):
    """A checkpoint that cannot be resumed from: its files, its form, or the run's settings."""

    exit_status = 5


class StoppedError(BaseException):
    """A signal ended the work before there was anything to save, or after all of it was saved.

    Like KeyboardInterrupt it is no `Exception`: a signal may arrive inside a library that turns all
    of those into its own.
    """

    def __init__(self, number: int):
        super().__init__(f"stopped by signal {number}")
        self.exit_status = 128 + number


class ProcessError(NPTError, RuntimeError):
    """Another process of the run failed, and this one ends as it does; or it was lost, or is no
    longer like the others: status 6.
    """

    def __init__(self, message: str, exit_status: int = 6):
        super().__init__(message)
        self.exit_status = exit_status


class TooManyRefusalsError(NPTError, RuntimeError):
    """Training stopped after too many refusals in a row; runs of NPT have written a post-mortem."""

    exit_status = 3


class SmokeTestError(NPTError, RuntimeError):
    """The one-batch test before the loop failed."""

    exit_status = 4


class NumericalError(NPTError, ArithmeticError):
    """Numbers that nothing can be computed from: not finite, or an unknown id."""


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
"""Messages of torch without an error of their own. A library that finds no room for its own state
is not initialised.
"""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device. (By names: torch need not be loaded.)"""
    if isinstance(error, NPTError):  # which may quote such an error
        return False
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)

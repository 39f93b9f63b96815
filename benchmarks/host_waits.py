"""Count host waits: moments at which the host stops until the device has computed a value.

On CUDA torch reports them (`torch.cuda.set_sync_debug_mode`): reads of values, blocking copies, and
operations whose result size depends on values. It does not report events and explicit calls of
`synchronize`. On a CPU nothing waits; there the operations that would wait on a GPU are reported by
name and arguments, without copies.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

WAITING = frozenset(
    {
        _aten._local_scalar_dense.default,  # item(), int(), bool()
        _aten.equal.default,
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
        _aten.unique_dim.default,
        _aten.unique_consecutive.default,
    }
)
"""Operations that always wait for a GPU."""

_BY_MASK = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
"""Operations that wait if they get a mask instead of indices."""

_REPORT = "called a synchronizing CUDA operation"
"""Beginning of torch's warnings and errors about waits."""


class HostWaitError(RuntimeError):
    """The host would wait for the device."""


class _Reporting(TorchDispatchMode):
    """Call `report` with the name of each operation that would wait for a GPU."""

    def __init__(self, report: Callable[[str], None]):
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING or (func in _BY_MASK and _has_mask(args[1])):
            self._report(str(func))
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
    )


@contextmanager
def no_waits(device: torch.device | str) -> Iterator[None]:
    """Raise a HostWaitError if the host waits for the device in the context, or would wait if the
    device were a GPU. Restore torch's mode afterwards.
    """
    if torch.device(device).type != "cuda":
        with _Reporting(_refuse):
            yield
        return
    with _debug_mode("error"):
        try:
            yield
        except RuntimeError as error:
            if _REPORT in str(error):
                raise HostWaitError(str(error).splitlines()[0]) from error
            raise


@contextmanager
def count_waits(device: torch.device | str) -> Iterator[Counter[str]]:
    """Count the host's waits for the device in the context: by operation, or on CUDA by line of
    Python. The count is complete after the context.
    """
    found: Counter[str] = Counter()
    if torch.device(device).type != "cuda":
        with _Reporting(lambda name: found.update([name])):
            yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _debug_mode("warn"):
            yield found
    for warning in caught:
        if _REPORT in str(warning.message):
            found[f"{warning.filename}:{warning.lineno}"] += 1
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def _refuse(name: str) -> None:
    raise HostWaitError(f"{name} would make the host wait for the device")


@contextmanager
def _debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

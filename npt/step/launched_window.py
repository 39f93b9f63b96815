"""A window between its last micro-batch and its result: device tensors, and the way to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from npt.step.guarded_update import Update
from npt.step.window_result import Refusal, S


@dataclass
class MicroBatchFlags(Generic[S]):
    """A micro-batch of an open window. flag: scalar bool, loss and gradients are finite. norms:
    [P] of the parameters' gradients, to name the bad one. reached: places of the parameters with a
    gradient, None for all.
    """

    sums: S
    flag: Tensor
    norms: Tensor
    index: int
    sample_ids: tuple[str, ...]
    reached: frozenset[int] | None = None


@dataclass
class ClosedWindow:
    """A window's gradient on its way to the optimizer. tokens, loss, norm: scalars over its
    survivors. finite, spike, go: scalar bools. flags, losses: of the micro-batches that ran here.
    """

    tokens: Tensor
    loss: Tensor
    norm: Tensor
    finite: Tensor
    spike: Tensor
    go: Tensor
    flags: Tensor
    losses: Tensor
    across: Tensor


@dataclass
class LaunchedWindow(Generic[S]):
    """A window without further micro-batches. halt: this process's code. fingerprint: of its data.
    limits, describe_spike: of the spike guard. reached: a survivor's backward reached a parameter,
    as far as that is tracked. norms: [P] of the window's gradient, if it was not applied or flags
    are late. record: on the host, in parts of `sizes`, valid once `arrived`; None if nothing ran.
    """

    index: int
    micro_batches: int
    ran: list[MicroBatchFlags[S]]
    refusals: list[Refusal]
    halt: int = 0
    fingerprint: int = 0
    limits: tuple[float, float] = (math.inf, math.inf)
    describe_spike: Callable[[float, float, tuple[float, float]], str] | None = None
    closed: ClosedWindow | None = None
    reached: bool = True
    update: Update | None = None
    norms: Tensor | None = None
    record: Tensor | None = None
    sizes: Sequence[int] = ()
    arrived: Any = None


def stacked(
    scalars: list[Tensor], home: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return [number of scalars], empty for a process without a micro-batch."""
    return torch.stack(scalars) if scalars else torch.zeros(0, dtype=dtype, device=home)


def sent(numbers: Sequence[int], home: torch.device) -> Tensor:
    """Return numbers of the host in fp32 on the device, without waiting for it."""
    values = torch.tensor(numbers, dtype=torch.float32)
    return values.pin_memory().to(home, non_blocking=True) if home.type == "cuda" else values


def to_host(record: Tensor) -> tuple[Tensor, Any]:
    """Return the record on the host, and the event to wait for before it is read."""
    if record.device.type != "cuda":
        return record, None
    pinned = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
    pinned.copy_(record, non_blocking=True)
    arrived = torch.cuda.Event()
    # the current device may be another one
    arrived.record(torch.cuda.current_stream(record.device))
    return pinned, arrived


def send_record(
    window: LaunchedWindow[S],
    closed: ClosedWindow,
    update: Update,
    steps: Tensor,
    rate: Tensor | None,
) -> None:
    """Send the record of a window that was stepped: all on the device, without waiting."""
    home = closed.flags.device
    rate = steps.new_tensor(math.nan, dtype=torch.float32) if rate is None else rate
    of_window = (closed.tokens, closed.loss, closed.norm, closed.finite, closed.spike)
    scalars = (*of_window, update.applied, steps, rate)
    norm_of_each = stacked([torch.linalg.vector_norm(m.norms) for m in window.ran], home)
    reports = [m.sums.report.detach().to(home, torch.float64) for m in window.ran]
    parts = [
        torch.stack([scalar.to(torch.float64) for scalar in scalars]),
        closed.flags,
        closed.losses,
        norm_of_each,
        torch.cat(reports) if reports else closed.flags.new_zeros(0),
        closed.across,
        closed.flags.new_zeros(0) if update.fingerprints is None else update.fingerprints,
    ]
    window.sizes = [part.numel() for part in parts]
    record = torch.cat([part.to(torch.float64) for part in parts])
    window.record, window.arrived = to_host(record)

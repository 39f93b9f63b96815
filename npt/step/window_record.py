"""The record of a window, which the device wrote, read into its result."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from npt.distributed.processes import ProcessGroup
from npt.step.launched_window import LaunchedWindow, MicroBatchFlags
from npt.step.shared_window import AcrossProcesses, gathered
from npt.step.window_result import MicroBatchRecord, Refusal, S, WindowResult, describe_norms, worst

SCALARS = ("tokens", "loss", "norm", "finite_norm", "spike", "applied", "steps", "rate")
"""Figures of a window in its record."""


def read_record(
    window: LaunchedWindow[S],
    names: Sequence[str],
    known_steps: int,
    processes: ProcessGroup,
    history: deque[MicroBatchRecord],
) -> WindowResult[S]:
    """Read a window's record, which has arrived.

    Args:
        window: that was committed.
        names: of the parameters.
        known_steps: applied before it.
        processes: that share the window; with refusals all of them must call this.
        history: receives a record of each of its micro-batches.
    """
    result: WindowResult[S] = WindowResult(
        window.index, window.micro_batches, False, known_steps, 0, 0.0, None, None
    )
    if window.halt and processes.size == 1:
        return replace(result, micro_batches=0, halts={0: window.halt})
    result.refusals, result.limits = list(window.refusals), window.limits
    if window.record is None:
        return result
    values, *parts = (part.tolist() for part in window.record.split(list(window.sizes)))
    flags, losses, norms, reports, across, states = parts
    shared = None
    if processes.size > 1:
        shared = AcrossProcesses(across, states, processes)
        if shared.halts:
            return replace(result, micro_batches=0, refusals=[], halts=shared.halts)
        shared.check(window.index, known_steps)
    for number, micro in enumerate(window.ran):
        loss, index, ids = losses[number], micro.index, micro.sample_ids
        mean = loss / max(1, micro.sums.tokens)
        record = MicroBatchRecord(window.index, index, ids, mean, norms[number])
        history.append(record)
        if flags[number]:
            result.survivors.append(micro.sums)
            result.places.append(index)
            length = len(reports) // len(window.ran)
            result.reports.append(reports[number * length :][:length])
        else:
            result.refusals.append(refusal_of(micro, loss, names, processes.index))
    if shared is not None and shared.refused:
        # All processes come here, since the number refused is a sum over them.
        result.refusals = gathered(result.refusals, Refusal, processes)
    result.refusals.sort(key=lambda r: r.micro_batch or 0)
    scalars = dict(zip(SCALARS, values, strict=True))
    result.tokens, result.rate = int(scalars["tokens"]), scalars["rate"]
    if result.survivors if shared is None else shared.survivors:
        result.loss, result.grad_norm = scalars["loss"], scalars["norm"]
        result.applied = bool(scalars["applied"])
        # survivors without a token, or without a gradient, are nothing to step on, and no fault
        if not result.applied and result.tokens and window.reached:
            result.refusals.append(_window_refusal(window, names, scalars))
    result.update = window.update
    if result.refusals and window.update is not None:
        result.snapshot = window.update.snapshot
    result.steps = int(scalars["steps"])
    return result


def refusal_of(
    micro: MicroBatchFlags[S], loss: float, names: Sequence[str], process: int
) -> Refusal:
    """Return why a micro-batch was refused that ran on this process; its summed loss is given."""
    names = names[: len(micro.norms)]  # more may have joined since
    kind, detail, tensor = "loss", f"loss is {loss}", None
    if not math.isfinite(loss):
        bad = int((~micro.norms.isfinite()).sum())
        detail += f", and {bad or 'none'} of {len(names)} gradients are not finite"
    else:
        kind, detail = "gradient", describe_norms(micro.norms, names)
        tensor = worst(micro.norms, names)
    return Refusal(kind, detail, micro.index, micro.sample_ids, process, tensor)


def _window_refusal(
    window: LaunchedWindow[S], names: Sequence[str], scalars: dict[str, float]
) -> Refusal:
    """Return why a window was refused as a whole."""
    loss, norm = scalars["loss"], scalars["norm"]
    assert window.update is not None
    if not scalars["finite_norm"]:
        assert window.norms is not None
        detail = f"gradient norm of the window is {norm}: {describe_norms(window.norms, names)}"
        return Refusal("norm", detail, tensor=worst(window.norms, names))
    if scalars["spike"]:
        assert window.describe_spike is not None and window.norms is not None
        largest = worst(window.norms, names)
        said = window.describe_spike(loss, norm, window.limits)
        return Refusal("spike", f"{said}; the largest gradient is {largest}'s", tensor=largest)
    bad = window.update.first_bad()
    said = f"{bad} was not finite after the step; the state before it was restored"
    parameter = bad.rpartition(" of ")[2]
    sizes = [
        f"{name} up to {size:.3g}"
        for name, size in window.update.before.items()
        if name in (bad, parameter)
    ]
    if window.norms is not None:
        norm = float(window.norms[names.index(parameter)])
        sizes.insert(0, f"its gradient had norm {norm:.3g}")
    return Refusal("update", f"{said} ({', '.join(sizes)})" if sizes else said, tensor=bad)

"""The faults, the settings in which each makes sense, and the data with and without them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from conformance_guards.run import FEATURES, ROWS, SETTINGS, Batch, Setting, Window

ALL = tuple(SETTINGS)
ACCUMULATED = tuple(name for name, setting in SETTINGS.items() if setting.micro_batches > 1)


@dataclass(frozen=True)
class Fault:
    """A bad batch.

    Attributes:
        name: as in the table; the model plants what the data cannot.
        about: what happens.
        settings: where it makes sense; the other cells are "n/a".
        windows: how many there are.
        bad: the windows that are bad.
        whole: every micro-batch of a bad window is bad.
        undone: the earliest sign is in the window's step, so that the window is to be skipped.
        either: a guard may skip the window or the micro-batch.
        everywhere: it is planted on all processes, not on the first alone.
        batch_norm: the model has running statistics in every setting.
    """

    name: str
    about: str
    settings: Sequence[str] = ALL
    windows: int = 8
    bad: Sequence[int] = (3,)
    whole: bool = False
    undone: bool = False
    either: bool = False
    everywhere: bool = True
    batch_norm: bool = False


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("loss", "the loss is NaN"),
        Fault("gradient", "a gradient has NaN; the loss is finite"),
        Fault("row", "one row of the batch is NaN"),
        Fault("one-process", "the loss is NaN on one of two processes", ("two-processes",),
              everywhere=False),
        Fault("norm", "gradients are finite, but their norm overflows, so that clipping zeroes"
                      " them"),
        Fault("overflow", "a scaled gradient overflows in fp16", ("scaler",)),
        Fault("moments", "the optimizer's step makes a moment Inf", undone=True),
        Fault("buffer", "a running variance becomes Inf; loss and gradients are finite",
              batch_norm=True),
        Fault("exception", "the forward raises FloatingPointError"),
        # what is unusual can only be told after some usual windows
        Fault("spike", "loss and gradients are finite, and 10,000 times too large", windows=30,
              bad=(26,), undone=True, either=True),
        Fault("window", "the loss of every micro-batch of a window is NaN", ACCUMULATED,
              whole=True),
        Fault("many", "six windows in a row have a NaN loss", windows=10, bad=range(2, 8)),
    )
}  # fmt: skip
"""The faults, by name."""

PLANTED = {"one-process": "loss", "window": "loss", "many": "loss"}
"""What the model plants for a fault that differs from another one in its places only."""


Place = tuple[int, int]
"""A micro-batch: the index of its window, and its index there."""
Places = tuple[tuple[Place, ...], ...]
"""The micro-batches of a process, by window."""


def clean(fault: Fault, setting: Setting) -> Places:
    """Return the data of a run without a fault, and without a hole."""
    micros = range(setting.micro_batches)
    return tuple(tuple((window, micro) for micro in micros) for window in range(fault.windows))


def without(fault: Fault, setting: Setting, process: int, whole: bool) -> Places:
    """Return the data of a process without the bad micro-batches.

    whole: without the others of their windows, too. A window of which no process has a micro-batch
    left is not there.
    """
    gone = bad(fault, setting, process)
    whole = whole or fault.whole or setting.micro_batches == 1
    return tuple(
        tuple(place for place in window if place not in gone)
        for index, window in enumerate(clean(fault, setting))
        if not (whole and index in fault.bad)
    )


def bad(fault: Fault, setting: Setting, process: int) -> set[Place]:
    """Return the bad micro-batches of a process."""
    if process > 0 and not fault.everywhere:
        return set()
    micros = range(setting.micro_batches) if fault.whole else (setting.bad,)
    return {(window, micro) for window in fault.bad for micro in micros}


def until_bad(fault: Fault) -> Fault:
    """Return the fault in a run that ends with its last bad window."""
    return replace(fault, windows=fault.bad[-1] + 1)


def batch(place: Place, process: int) -> Batch:
    """Return a micro-batch; it does not depend on which others there are."""
    window, micro = place
    seed = 1 + window + 1000 * micro + 100_000 * process
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    noise = torch.randn(ROWS, 1, generator=generator)
    return {"x": x, "y": x[:, :1] - x[:, 1:2] + 0.1 * noise, "fault": ""}


def spoilt(good: Batch, fault: str) -> Batch:
    """Return a batch with a fault."""
    x = good["x"].clone()
    y = good["y"].clone()
    if fault == "row":
        x[3] = math.nan
    elif fault == "buffer":
        x[3] = 1e20  # its square overflows in the variance
    elif fault == "overflow":
        y *= 1e4
    return {"x": x, "y": y, "fault": PLANTED.get(fault, fault)}


def windows_of(
    places: Places, process: int, fault: str = "", bad_places: Collection[Place] = ()
) -> list[Window]:
    """Return the data of a process, with a fault in some of it."""
    windows = []
    for places_of_window in places:
        window = []
        for place in places_of_window:
            good = batch(place, process)
            window.append(spoilt(good, fault) if place in bad_places else good)
        windows.append(window)
    return windows

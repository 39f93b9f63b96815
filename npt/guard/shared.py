"""A gradient window that several processes share.

One all-reduce sums gradients, losses, token counts and flags in one flat fp32 tensor, so all
processes decide the same. A process that must stop says so in that sum, and the window is void on
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from npt.distributed.processes import ProcessGroup
from npt.errors import DataError, ProcessError

R = TypeVar("R")


def sum_over_processes(
    gradients: list[Tensor], figures: Tensor, codes: Tensor, processes: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum gradients, in place, and the figures that decide on the step.

    Args:
        gradients: flat, of this process.
        figures: [4] its tokens, loss, micro-batches that count, and refusals.
        codes: [2] its code to halt the window, and the fingerprint of its data.
        processes: of the window.

    Returns:
        [2] tokens and loss; values for `AcrossProcesses`; a scalar bool, all allow a step.
    """
    of_each = codes.new_zeros(2, processes.size)
    of_each[:, processes.index] = codes
    parts = [*gradients, figures, of_each.flatten()]
    flat = processes.sum_(torch.cat([part.to(figures.device, torch.float32) for part in parts]))
    *summed, sums, of_processes = flat.split([part.numel() for part in parts])
    for gradient, total in zip(gradients, summed, strict=True):
        gradient.copy_(total)
    halts, fingerprints = of_processes.split(processes.size)
    allowed = (halts == 0).all() & (fingerprints == fingerprints[0]).all()
    return sums[:2], torch.cat([sums[2:], of_processes]), allowed


class AcrossProcesses:
    """A window's figures over all processes, on the host.

    Attributes:
        survivors: micro-batches that count.
        refused: micro-batches that do not.
        halts: by process, the code with which it stopped the window.
    """

    def __init__(self, values: Sequence[float], states: Sequence[float], processes: ProcessGroup):
        self.survivors, self.refused, *of_processes = (int(value) for value in values)
        halts, self._data = of_processes[: processes.size], of_processes[processes.size :]
        self.halts = {process: code for process, code in enumerate(halts) if code}
        self._states, self._processes = states, processes

    def check(self, window: int, steps: int) -> None:
        """Raise if processes had different data in a window, or differ after `steps` alike steps.

        With different data they would train on some twice, on some never. A state is 0 if it is
        not finite.
        """
        data, states = self._data, self._states
        other = next((process for process, mark in enumerate(data) if mark != data[0]), None)
        if other is not None:
            message = (
                f"process {other} reads other data than process 0 in window {window + 1}"
                f" (fingerprints {data[other]} and {data[0]}); give every process the same data in"
                " the same order"
            )
            raise self._processes.everywhere(ProcessError(message, DataError.exit_status))
        bad = [process for process, state in enumerate(states) if not state]
        wrong = bad or [process for process, state in enumerate(states) if state != states[0]]
        if wrong and len(bad) < len(states):
            where = ", ".join(map(str, wrong))
            message = (
                f"every process took step {steps + 1} alike, but what it left on process {where}"
                f" {'is not finite' if bad else 'differs'}; it was taken back: look at the"
                " hardware of these processes, then continue with --resume auto"
            )
            raise self._processes.everywhere(ProcessError(message))


def gathered(records: Iterable[Any], kind: type[R], processes: ProcessGroup) -> list[R]:
    """Return the records of all processes, those of each in their order; all must call it."""
    entries = chain(*processes.gather_json([asdict(record) for record in records]))
    return [
        kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
        for entry in entries
    ]

"""What follows an optimizer's step in a guard's: schedule, scale and counts, none of them alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any

from npt.distributed.processes import ProcessGroup
from npt.guard.holdings import Holdings
from npt.guard.outcome import Outcome
from npt.guard.update import Update
from npt.guard.window import GradientWindow


@dataclass
class Counts:
    """Windows, steps and refusals of a run so far. in_a_row: refusals since the last survivor."""

    windows: int = 0
    steps: int = 0
    refused: int = 0
    in_a_row: int = 0

    def add(self, outcome: Outcome, processes: ProcessGroup | None = None) -> int:
        """Count a window; return the longest run of refusals up to its end.

        processes: whose numbers of micro-batches may differ; every one of them calls this.
        """
        longest = 0
        if outcome.refused:  # the same on all processes
            places = None
            if processes is not None:
                places = chain(*processes.gather_json(outcome.places))
            longest, self.in_a_row = outcome.bad_in_a_row(self.in_a_row, places)
        elif outcome.applied:
            self.in_a_row = 0
        self.windows, self.steps = self.windows + 1, outcome.steps
        self.refused += len(outcome.refused)
        return longest


class Following:
    """A context for a step and what follows it: if an error ends it, none of that has happened.

    Args:
        window: whose optimizer steps.
        owners: of what else changes; None among them are left out. Neither the optimizer nor its
            parameters are copied here, even if an owner holds them.

    Attributes:
        update: of the optimizer, once it is made.
    """

    def __init__(self, window: GradientWindow, owners: Iterable[Any]):
        self.update: Update | None = None
        self._window, self._steps = window, window.known_steps
        update = window.update
        held = [owner for owner in owners if owner is not None]
        self._holdings = Holdings(held, without=[update.optimizer, *update.parameters])

    def __enter__(self) -> Following:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: Any, __: TracebackType | None) -> None:
        if kind is None:
            return
        if self.update is not None:
            self._window.update.take_back(self.update)
        self._holdings.restore()
        self._window.resume_at(self._steps)

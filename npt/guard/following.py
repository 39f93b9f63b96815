"""What follows an optimizer's step in a guard's: schedule, scale and counts, none alone."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from npt.guard.holdings import Holdings
from npt.guard.update import Update
from npt.guard.window import GradientWindow


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

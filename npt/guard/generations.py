"""TRL's Trainers that generate, GRPO's and RLOO's, under a guard.

Their `_prepare_inputs` generates and scores completions for several micro-batches at once, and
hands out one slice at each call, by a count of calls. So a generation is made before the
micro-batch that asks for it is begun: it stands, with what it drew and counted, whatever becomes of
that micro-batch. A refused micro-batch leaves no trace but that: its window is, bit for bit, that
of a Trainer which made the same generations and passed over this slice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from npt.guard.traces import equal_states
from npt.random_state import random_state, set_random_state

COUNTED = ("_entropy_window_stats", "entropy_coef", "_last_world_entropy")
"""Attributes of GRPO's that a forward changes, besides its metrics."""

_KINDS = frozenset({"GRPOTrainer", "RLOOTrainer"})


def generates(trainer: Any) -> bool:
    return not _KINDS.isdisjoint(kind.__name__ for kind in type(trainer).__mro__)


def asks_all_processes(trainer: Any) -> bool:
    """Return whether a forward needs figures of all processes, besides its metrics."""
    asking = ("use_adaptive_entropy", "calculate_KL")  # the latter is KTO's
    quantile = getattr(trainer, "top_entropy_quantile", 1.0)
    return quantile < 1.0 or any(getattr(trainer, name, False) for name in asking)


class Generations:
    """The generations of a Trainer, and the slices of the open window."""

    slice: Any = None  # that `_prepare_inputs` must return as it is; None if it may generate
    calls: int | None = None  # for a forward to see, in place of the Trainer's count of them

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._random: dict[int, Mapping[str, Tensor]] = {}  # by place, if a generation came first

    def take(self, place: int, inputs: Any, counted: Mapping[str, Any]) -> Any:
        """Return the slice of a window's next micro-batch, after a generation if one is due, whose
        metrics are added to what was `counted` before the window.
        """
        trainer = self._trainer
        trainer.model.train()  # as a training step begins
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        earlier = {name: list(values) for name, values in trainer._metrics["train"].items()}
        before, started = random_state(), time.perf_counter()
        taken = trainer._prepare_inputs(inputs)
        trainer._current_train_step_time += time.perf_counter() - started  # TRL counts it too
        after = random_state()
        if not place:
            self._random.clear()
        if not place or not equal_states(before, after):
            self._random[place] = after
        for name, values in trainer._metrics["train"].items():
            if values != earlier.get(name):
                counted["_metrics"]["train"][name] = list(values)
        return taken

    def rewind_to(self, place: int) -> None:
        """Set the random state after the generation that came before this place, if one did."""
        if place in self._random:
            set_random_state(self._random[place])

    @contextmanager
    def computing(self, inputs: Any) -> Iterator[None]:
        """Let the Trainer take a slice as it is, and its count of calls stand, in the context."""
        trainer, calls = self._trainer, self._trainer._step
        trainer._step, self.slice = calls if self.calls is None else self.calls, inputs
        try:
            yield
        finally:
            trainer._step, self.slice, self.calls = calls, None, None

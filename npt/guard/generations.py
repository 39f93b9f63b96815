"""TRL's generating Trainers (GRPO, RLOO) under a guard.

Their `_prepare_inputs` generates and scores completions for several micro-batches at once, and
returns one slice per call. So the guard generates before the micro-batch begins, and a refusal does
not undo it. The window then equals, bit for bit, that of a Trainer that made the same generations
and skipped this slice.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from npt.guard.traces import equal_states
from npt.random_state import random_state, set_random_state

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

Batch = dict[str, Tensor]
"""As transformers has it; a Trainer's own batch may be anything."""

COUNTED = ("_entropy_window_stats", "entropy_coef", "_last_world_entropy")
"""Attributes of GRPOTrainer that a forward changes, besides its metrics."""

_log = logging.getLogger("npt.guard")

_KINDS = frozenset({"GRPOTrainer", "RLOOTrainer"})


def generates(trainer: object) -> TypeGuard[GRPOTrainer | RLOOTrainer]:
    return not _KINDS.isdisjoint(kind.__name__ for kind in type(trainer).__mro__)


def asks_all_processes(trainer: object) -> bool:
    """Return whether a forward gathers from all processes, besides its metrics."""
    asking = ("use_adaptive_entropy", "calculate_KL")  # the second is KTO's
    quantile = getattr(trainer, "top_entropy_quantile", 1.0)
    return quantile < 1.0 or any(getattr(trainer, name, False) for name in asking)


class NoGenerations:
    """The generations of a Trainer that makes none: its batches are used as they come."""

    slice: Batch | None = None  # what `_prepare_inputs` must return; None if it may generate

    def take(self, place: int, inputs: Batch, counted: Mapping[str, object]) -> Batch:
        return inputs

    def advance(self) -> None:
        """Do nothing: there is no position in a generation."""

    def rewind_to(self, place: int) -> None:
        """Do nothing: nothing was drawn between micro-batches."""

    def computing(self, inputs: Batch, calls: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()


class Generations(NoGenerations):
    """A Trainer's generations, and their slices in the open window."""

    def __init__(self, trainer: GRPOTrainer | RLOOTrainer):
        self._trainer = trainer
        self._random: dict[int, Mapping[str, Tensor]] = {}  # random states after a generation

    def take(self, place: int, inputs: Batch, counted: Mapping[str, object]) -> Batch:
        """Return the slice for a window's next micro-batch, and generate first if it is time. The
        generation's metrics are added to what was `counted` before the window.
        """
        trainer = self._trainer
        # as at the start of a training step
        trainer.model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        earlier = {name: list(values) for name, values in trainer._metrics["train"].items()}
        before = random_state()
        started = time.perf_counter()
        taken = trainer._prepare_inputs(inputs)
        trainer._current_train_step_time += time.perf_counter() - started  # TRL counts it too
        after = random_state()
        if not place:
            self._random.clear()
        # a call that only returns the next slice draws nothing
        if not place or not equal_states(before, after):
            self._random[place] = after
        metrics = counted["_metrics"]
        assert isinstance(metrics, dict)
        for name, values in trainer._metrics["train"].items():
            if values != earlier.get(name):
                metrics["train"][name] = list(values)
        if trainer._metrics["train"].get("reward") != earlier.get("reward"):
            self._warn_of_infinite_rewards()
        return taken

    def _warn_of_infinite_rewards(self) -> None:
        """Warn of what TRL may hide: an infinity makes NaN of its group's advantages, then 0. A
        refusal would cost every slice that holds one of the group, since TRL shuffles them.
        """
        by_function = self._trainer._logs["rewards"]
        assert isinstance(by_function, dict)
        for name, rewards in by_function.items():
            if any(map(math.isinf, rewards)):
                _log.warning(
                    "reward function %s returned an infinity, which spoils the advantages of all"
                    " completions of its prompt; return a finite number, or None for no reward",
                    name,
                )

    def advance(self) -> None:
        """Move on in the generation, past refused micro-batches too."""
        self._trainer._step += 1

    def rewind_to(self, place: int) -> None:
        if place in self._random:
            set_random_state(self._random[place])

    @contextmanager
    def computing(self, inputs: Batch, calls: int | None = None) -> Iterator[None]:
        """Within the context, make the Trainer use this slice and not count the call.

        Args:
            calls: replaces the Trainer's count of calls, when survivors are computed again.
        """
        trainer = self._trainer
        counted = trainer._step
        if calls is not None:
            trainer._step = calls
        self.slice = inputs
        try:
            yield
        finally:
            trainer._step = counted
            self.slice = None

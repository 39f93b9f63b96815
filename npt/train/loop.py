"""The training loop: windows through the step; their outcomes are counted, logged and saved."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from npt.adapters.converted import is_sharded
from npt.data.batch import Batch
from npt.data.loader import Position, Window
from npt.distill.step import add_batch, forward_backward, free_memory, oom_message
from npt.distill.strategies import Strategy
from npt.errors import StoppedError
from npt.guard.guard import Guard
from npt.guard.outcome import Outcome
from npt.guard.spikes import SpikeGuard
from npt.guard.update import EXACT
from npt.guard.window import FAILED
from npt.train.observers import StepMetrics, StepRecording
from npt.train.refusals import Refusals
from npt.train.run import Run

if TYPE_CHECKING:
    from npt.evaluation.evaluate import Fidelity

T = TypeVar("T")


class Loop:
    """One run of the training loop.

    Args:
        run: that it trains.
        guard: of the student; makes one step from a window.
        strategy: forward and backward of one micro-batch.

    Attributes:
        failure: the error that stops this process, one of several, at the next step.
        halts: processes that stopped, each with its code.
    """

    def __init__(self, run: Run, guard: Guard, strategy: Strategy):
        self.run, self.setup, self.config = run, run.setup, run.setup.config
        self.guard, self.strategy = guard, strategy
        self.failure: Exception | None = None
        self.halts: dict[int, int] = {}
        self.steps = self.tokens = self.micro_batches = 0
        self.position = Position()
        self.best = math.inf
        self.last_evaluation: int | None = None
        self.refusals = Refusals(run, guard)
        self.metrics = StepMetrics(run)
        records = self.setup.processes.main and self.config.trace_steps is not None
        self.recording = StepRecording(run, self.metrics) if records else None
        self._saved: int | None = None  # micro-batches at the last checkpoint
        self._open: dict[int, Window | None] = {}  # committed, not accounted for; None: data ended
        self._outcomes: deque[Outcome] = deque()  # known, not accounted for
        self._accepted: Window | None = None  # the last window without a refusal
        self._refused: tuple[Window, Outcome] | None = None
        self._ended = False  # the data are used up, or a process stopped

    def train(self, windows: Iterable[Window]) -> None:
        """Train until the windows or `max_steps` are used up, or a signal came to any process.

        Raises:
            TooManyRefusalsError: after the post-mortem was written.
            ProcessError: another process failed, was lost, or differs from this one.
        """
        guard, stop, several = self.guard, self.setup.stop, self.setup.processes.size > 1
        most = math.inf if self.config.max_steps is None else self.config.max_steps
        self.setup.model.eval()
        self._safely(self._evaluate_if_due)  # a signal may have ended this step's evaluation
        coming = iter(windows)
        # Only outcomes end the loop, which all processes have alike and at the same window.
        while not self._ended and self.steps < most:
            window = self._safely(partial(next, coming, None))
            if window is None and stop.number is not None and self.failure is None:
                guard.window.halt(stop.number)
            self._open[guard.window.committed] = window
            if window is not None:
                self._fill(window.batches)
            compared = fingerprint(window.batches) if several and window is not None else 0
            self._account(guard.step(compared))
            # Saving and evaluating must see the state of their own step and no later one, so wait
            # for late outcomes; if that window is refused, the wait was in vain.
            if self._is_boundary(self.steps + guard.window.in_flight):
                self.settle()
        self.settle()
        self.setup.processes.raise_together(self.failure)

    def settle(self) -> None:
        """Wait for the windows whose outcomes are still on their way, and account for them."""
        self._account(self.guard.flush())

    def _fill(self, batches: Sequence[Batch]) -> None:
        """Add this process's micro-batches to the window, until a signal or a failure."""
        place = 0
        while place < len(batches) and self.failure is None:
            if self.setup.stop.number is not None:
                self.guard.window.halt(self.setup.stop.number)
                break
            if place == 0 and self.recording is not None:
                self.recording.open(self._coming_step)
            place = place + 1 if self._add(batches[place], place) else 0
        self.guard.window.place = place  # with those of the other processes

    def _add(self, batch: Batch, place: int) -> bool:
        """Add a micro-batch to the window; False if memory ran out and the window was cleared."""
        setup, lack = self.setup, None
        model, processes = setup.model, setup.processes
        if place % processes.size != processes.index:
            return True
        compute = partial(
            forward_backward,
            model,
            self.strategy,
            config=self.config,
            splitter=setup.splitter,
            observe=None if self.recording is None else self.recording.observer(place),
        )
        try:
            try:
                add_batch(self.guard, batch, compute, model.config.vocab_size, place)
            except (RuntimeError, MemoryError) as error:
                # one that stopped inside a layer of a shared base would be out of step
                lack = None if is_sharded(model) else oom_message(error)
                if lack is None:
                    raise
            if lack is not None:
                self._shrink(batch, lack)
        except Exception as error:
            self._fail(error)
        return lack is None or self.failure is not None

    def _shrink(self, batch: Batch, message: str) -> None:
        """Begin the window again with smaller parts.

        A single sample is tried again while windows in flight hold memory that will be freed.
        """
        run, alone = self.run, self.setup.processes.size == 1
        in_flight = self.guard.window.in_flight if alone else 0
        self.guard.clear()
        free_memory()
        again = self.setup.splitter.samples_of(batch) == 1 and in_flight
        samples = 1 if again else self.setup.splitter.shrink(batch, message)
        step, now = self._coming_step, self.setup.splitter.samples
        run.folder.event(
            "out_of_memory", step=step, samples=samples, samples_at_once=now, message=message
        )
        lack = f"out of memory with {samples} samples at once ({message})"
        run.say(f"step {step}: {lack}; it is begun again with {now}")
        if alone:  # several meet at the reading of results
            self.settle()

    def _fail(self, error: Exception) -> None:
        """Raise the error, or, as one of several processes, stop with it at the next step."""
        if self.setup.processes.size == 1:
            raise error
        if self.failure is None:
            self.failure = error
            self.guard.window.halt(FAILED)

    def _safely(self, act: Callable[[], T]) -> T | None:
        """Do an act that may fail on this process alone, which then stops at the next commit."""
        try:
            return act() if self.failure is None else None
        except Exception as error:
            self._fail(error)
            return None

    def _account(self, outcomes: list[Outcome]) -> None:
        self._outcomes.extend(outcomes)
        # If one ends the loop, the rest stay known: their steps are in the weights all the same.
        while self._outcomes:
            outcome = self._outcomes.popleft()
            window = self._open.pop(outcome.index)
            if outcome.halts or window is None:
                self.halts, self._ended = self.halts or outcome.halts, True
                continue
            self.micro_batches += outcome.micro_batches
            self.position = window.position
            self.refusals.add(window, outcome, self.steps + 1)
            if outcome.refused:
                self._refused = window, replace(outcome, snapshot=None, update=None)
            reason = self.refusals.excess(outcome.longest, self.micro_batches)
            if reason is not None:
                self._give_up(window, outcome, reason)
            if outcome.applied:
                self._accepted = self._accepted if outcome.refused else window
                self._after_step(outcome)

    def _give_up(self, window: Window, outcome: Outcome, reason: str) -> None:
        """Account for every window in flight, then write the post-mortem and raise.

        Later checkpoints bear the step of their weights: that of this window, if it was applied, or
        of the last one after it.
        """
        later = [*self._outcomes, *self.guard.flush()]
        self._outcomes.clear()
        for each in (outcome, *later):
            self.steps += each.applied
            self.tokens += each.tokens if each.applied else 0
        for each in later:
            passed = self._open.pop(each.index)
            self.position = self.position if passed is None or each.halts else passed.position
            self.micro_batches += each.micro_batches
            self.refusals.by_kind.update(refusal.kind for refusal in each.refused)
        last = (window, outcome)
        if not outcome.refused and self._refused is not None:
            last = self._refused  # the share was exceeded at a window without a refusal
        self.refusals.stop(reason, last, self._accepted, self.steps)

    def _after_step(self, outcome: Outcome) -> None:
        c, run = self.config, self.run
        self.steps += 1
        self.tokens += outcome.tokens
        if self.steps % c.log_steps == 0 or self.steps in (1, run.total_steps):
            metrics = self.metrics.line(outcome, self.steps, self.tokens, self.refusals)
            self._safely(partial(self._log, metrics))
            run.say(self.metrics.progress(metrics))
        self._safely(self._evaluate_if_due)
        if c.save_steps and self.steps % c.save_steps == 0:
            self.save()

    def _log(self, metrics: dict[str, Any]) -> None:
        self.run.folder.metrics(metrics)
        self.run.trackers.log(metrics, self.steps)

    def _evaluate_if_due(self) -> None:
        every, done = self.config.eval_steps, (0, self.run.total_steps, self.last_evaluation)
        if not every or self.steps % every or self.steps in done:
            return
        # the loop looks at the signal itself, and saves
        with contextlib.suppress(StoppedError), self.metrics.paused():
            fidelity = self.run.evaluate(self.steps)
            self.last_evaluation = self.steps
            self.keep_if_best(fidelity)

    def keep_if_best(self, fidelity: Fidelity) -> None:
        """Keep the adapters if the figure that judges them is the best so far."""
        figure = getattr(fidelity.aim, self.config.judged_by)
        if figure < self.best:  # never if it is NaN
            self.best = figure
            self.run.save_best(self, fidelity)

    def save(self) -> None:
        """Save everything as it is now."""
        with self.metrics.paused():
            if self.run.save(self):
                self._saved = self.micro_batches

    @property
    def unsaved(self) -> bool:
        """True if anything has happened since the last checkpoint, if only refusals."""
        return self._saved != self.micro_batches

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is the loop's."""
        return {
            "step": self.steps,
            "tokens": self.tokens,
            "micro_batches": self.micro_batches,
            **self.refusals.state(),
            "last_evaluation": self.last_evaluation,
            "strategy": self.config.strategy,
            "best_kl": self.best if math.isfinite(self.best) else None,
            "position": self.position.as_dict(),
        }

    def load_state(self, state: Mapping[str, Any], in_own_folder: bool) -> None:
        """Continue from what `state` returned; the checkpoint may be in another run's folder."""
        self.steps, self.tokens = state["step"], state["tokens"]
        self.micro_batches = state["micro_batches"]
        self.refusals.load_state(state)
        self.last_evaluation = state["last_evaluation"]
        # A new folder has no best yet, whatever the old one had.
        if state["best_kl"] is not None and self.run.folder.has_best:
            self.best = state["best_kl"]
        self.position = Position.from_dict(state["position"])
        self.metrics.logged_tokens = self.tokens
        self._saved = self.micro_batches if in_own_folder else None
        changed = state["strategy"] != self.config.strategy  # whose losses are of another size
        if changed and self.guard.window.spikes is not None:
            self.guard.window.spikes = SpikeGuard()

    @property
    def _coming_step(self) -> int:
        """The step that the open window will be, if it is applied."""
        return self.steps + self.guard.window.in_flight + 1

    def _is_boundary(self, step: int) -> bool:
        c = self.config
        if step == c.max_steps:
            return True
        return any(every and step % every == 0 for every in (c.save_steps, c.eval_steps))


def fingerprint(batches: Sequence[Batch]) -> int:
    """Return a checksum of samples and tokens, from 1 on and below `EXACT`."""
    checksum = 0
    for batch in batches:
        checksum = zlib.crc32("\n".join(batch.sample_ids).encode(), checksum)
        checksum = zlib.crc32(batch.input_ids.numpy().tobytes(), checksum)
    return checksum % (EXACT - 1) + 1

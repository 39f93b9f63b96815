"""The training loop: windows through the step; their results are counted, logged and saved."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from npt.adapters.converted import is_sharded
from npt.data.batch import Batch, find_fault
from npt.data.loader import Loaded, Position, Prefetcher
from npt.distill.splitting import MicroBatchSplitter, free_memory, oom_message
from npt.distill.step import forward_backward, summed
from npt.distill.strategies import Strategy
from npt.distributed.processes import process_failure, reason_of
from npt.errors import StoppedError
from npt.evaluation.evaluate import Fidelity
from npt.guard.guard import Guard
from npt.guard.outcome import Outcome
from npt.guard.spikes import SpikeGuard
from npt.guard.window import FAILED
from npt.runs.signals import StopOnSignal
from npt.train.observers import Divergence, StepMetrics, StepRecording
from npt.train.refusals import Refusals
from npt.train.run_context import RunActions, RunContext, Window

T = TypeVar("T")


def windows_of(coming: Iterator[Loaded], size: int, stop: StopOnSignal) -> Generator[Window]:
    """Yield windows of so many batches; closing ends the thread that prepares them.

    Windows continue from one epoch into the next; the last one of all may be shorter.
    """
    with contextlib.closing(Prefetcher(coming, stop=lambda: stop.number is not None)) as ahead:
        stream = iter(ahead)
        while loaded := list(itertools.islice(stream, size)):
            batches = [each.batch for each in loaded]
            yield Window(loaded[0].epoch, batches, loaded[-1].position)


class Loop:
    """One run of the training loop.

    Args:
        context: model, settings, and where to report.
        guard: of the student; makes one step from a window.
        strategy: forward and backward of one micro-batch.
        splitter: of micro-batches into parts that fit into memory.
        total_steps: of the run, None if unknown.
        actions: between steps.

    Attributes:
        failure: the error that stops this process, one of several, at the next step.
    """

    def __init__(
        self,
        context: RunContext,
        guard: Guard,
        strategy: Strategy,
        splitter: MicroBatchSplitter,
        total_steps: int | None,
        actions: RunActions,
    ):
        self.context, self.guard, self.total_steps = context, guard, total_steps
        self.strategy, self.splitter = strategy, splitter
        self.failure: Exception | None = None
        self.config, self.actions = context.config, actions
        wanted = self.config.trace_steps is not None
        self.recording: StepRecording | None = None
        if wanted and context.processes.main:
            self.recording = StepRecording(context)
        self.refusals = Refusals(context, guard)
        self.divergence = Divergence(context, actions.modulation)
        self.steps = self.tokens = self.micro_batches = 0
        self.position = Position()
        self.best = math.inf
        self.last_evaluation: int | None = None
        self.halts: dict[int, int] = {}  # processes that stopped, and why
        self._metrics = StepMetrics(context)
        self._saved: int | None = None  # micro-batches at the last checkpoint
        self._open: dict[int, Window | None] = {}  # committed, not accounted for; None: data ended
        self._known: deque[Outcome] = deque()  # their results, as far as known
        self._accepted: Window | None = None  # the last window without a refusal
        self._refused: tuple[Window, Outcome] | None = None
        self._epoch = 0
        self._ended = False  # the data are used up, or a process stopped

    def run(self, windows: Iterable[Window]) -> None:
        """Train until the windows or `max_steps` are used up, or a signal came to any process.

        Raises:
            TooManyRefusalsError: after the post-mortem was written.
            ProcessError: another process failed, was lost, or differs from this one.
        """
        context, guard = self.context, self.guard
        context.model.eval()
        if self.recording is not None:
            self.recording.announce()
        self._safely(self._evaluate_if_due)  # a signal may have ended this step's evaluation
        self._metrics.since = time.perf_counter()
        coming = iter(windows)
        # Only outcomes end the loop, which all processes have alike and at the same window.
        while self._wants_more:
            window = self._safely(partial(next, coming, None))
            if window is None and context.stop.number is not None and self.failure is None:
                guard.window.halt(context.stop.number)
            if self.recording is not None:
                self.recording.open(self._coming_step)
            self._open[guard.window.committed] = window
            outcomes = self._step(window)
            if self.recording is not None:
                self._metrics.since += self.recording.take_seconds()
            self._account(outcomes)
            # Saving and evaluating must see the state of their own step and no later one, so wait
            # for late outcomes; if that window is refused, the wait was in vain.
            if self._is_boundary(self.steps + guard.window.in_flight):
                self.settle()
        self.settle()
        self._raise_failure()
        self.refusals.report_epoch(self._epoch)

    def settle(self) -> None:
        """Wait for the windows whose outcomes are still on their way, and account for them."""
        self._account(self.guard.flush())

    def _step(self, window: Window | None) -> list[Outcome]:
        """Make one step from a window; return the outcomes that have become known."""
        batches = [] if window is None else window.batches
        index = 0
        while index < len(batches) and self.failure is None:
            number = self.context.stop.number
            if number is not None:
                self.guard.window.halt(number)
                break
            index = index + 1 if self._add(batches[index], index) else 0
        self.guard.window.place = index  # with those of the other processes
        compared = window if self.context.processes.size > 1 else None
        outcomes: list[Outcome] = self.guard.step(0 if compared is None else compared.fingerprint)
        return outcomes

    def _add(self, batch: Batch, index: int) -> bool:
        """Add micro-batch `index` to the window; False if memory ran out and it was cleared."""
        model, processes = self.context.model, self.context.processes
        if index % processes.size != processes.index:
            return True
        arguments = (model, self.strategy, batch, self.config, self.splitter)
        observe = None if self.recording is None else partial(self.recording.observe, index=index)
        ids, again, message = batch.sample_ids, partial(forward_backward, *arguments), None
        try:
            fault = find_fault(batch, model.config.vocab_size)
            if fault is not None:
                self.guard.refuse(fault, ids, index)
                return True
            try:
                with self.guard.micro_batch(
                    batch.tokens, ids, batch, again, offset=batch.offset, place=index
                ) as micro:
                    sums = summed(*arguments, observe)
                    micro.loss, micro.tokens, micro.report = sums.loss, sums.tokens, sums.report
            except (RuntimeError, MemoryError) as error:
                # Processes that share a base stay in step: one that stopped inside a layer would
                # not.
                message = None if is_sharded(model) else oom_message(error)
                if message is None:
                    raise
            if message is not None:
                self._shrink(batch, message)
        except Exception as error:
            self.fail(error)
        return message is None or self.failure is not None

    def _shrink(self, batch: Batch, message: str) -> None:
        """Begin the window again with smaller parts.

        A single sample is tried again while windows in flight hold memory that will be freed.
        """
        alone = self.context.processes.size == 1
        in_flight = self.guard.window.in_flight if alone else 0
        self.guard.clear()
        free_memory()
        again = self.splitter.samples_of(batch) == 1 and in_flight
        samples = 1 if again else self.splitter.shrink(batch, message)
        self._report_out_of_memory(samples, message)

    def fail(self, error: Exception) -> None:
        """Raise the error, or, as one of several processes, stop with it at the next step."""
        if self.context.processes.size == 1:
            raise error
        if self.failure is None:
            self.failure = error
            self.guard.window.halt(FAILED)

    @property
    def unsaved(self) -> bool:
        """True if anything has happened since the last checkpoint, if only refusals."""
        return self._saved != self.micro_batches

    def save(self) -> None:
        """Save everything as it is now."""
        if self.actions.save():
            self._saved = self.micro_batches

    def keep_if_best(self, fidelity: Fidelity) -> None:
        """Keep the adapters if the figure that judges them is the best so far."""
        figure = getattr(fidelity.aim, self.context.config.judged_by)
        if figure < self.best:  # never if it is NaN
            self.best = figure
            self.actions.save_best(fidelity)

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is the loop's."""
        return {
            "step": self.steps,
            "tokens": self.tokens,
            "micro_batches": self.micro_batches,
            **self.refusals.state(),
            **self.divergence.state(),
            "epoch": self._epoch,
            "last_evaluation": self.last_evaluation,
            "strategy": self.config.strategy,
            "best_kl": self.best if math.isfinite(self.best) else None,
            "position": self.position.as_dict(),
        }

    def load_state(self, state: Mapping[str, Any], saved: bool) -> None:
        """Continue from what `state` returned.

        Args:
            state: of a checkpoint.
            saved: the checkpoint is in this run's folder.
        """
        self.steps, self.tokens = state["step"], state["tokens"]
        self.micro_batches, self._epoch = state["micro_batches"], state["epoch"]
        self.refusals.load_state(state)
        self.divergence.load_state(state)
        self.last_evaluation = state["last_evaluation"]
        # A new folder has no best yet, whatever the old one had.
        if state["best_kl"] is not None and self.context.folder.has_best:
            self.best = state["best_kl"]
        self.position = Position.from_dict(state["position"])
        self._metrics.logged_tokens = self.tokens
        self._saved = self.micro_batches if saved else None
        if state["strategy"] != self.config.strategy:
            self._change_strategy()

    @property
    def _wants_more(self) -> bool:
        """True if another step is due; `max_steps` or a resumed run may leave none."""
        if self._ended:
            return False
        return self.config.max_steps is None or self.steps < self.config.max_steps

    @property
    def _coming_step(self) -> int:
        """The step that the open window will be, if it is applied."""
        return self.steps + self.guard.window.in_flight + 1

    def _is_boundary(self, step: int) -> bool:
        c = self.config
        if step == c.max_steps:
            return True
        return any(every and step % every == 0 for every in (c.save_steps, c.eval_steps))

    def _safely(self, act: Callable[[], T]) -> T | None:
        """Do an act that may fail on this process alone, which then stops at the next commit."""
        try:
            return act() if self.failure is None else None
        except Exception as error:
            self.fail(error)
            return None

    def _raise_failure(self) -> None:
        """End the loop on every process, if one of them failed, even after the last window."""
        processes, failure = self.context.processes, self.failure
        if processes.size == 1:
            return
        reasons = processes.gather_json(None if failure is None else reason_of(failure))
        if any(reason is not None for reason in reasons):
            raise processes.everywhere(failure if failure is not None else process_failure(reasons))

    def _report_out_of_memory(self, samples: int, message: str) -> None:
        """Report that memory ran out, and free the memory of windows in flight."""
        step, now = self._coming_step, self.splitter.samples
        self.context.folder.event(
            "out_of_memory", step=step, samples=samples, samples_at_once=now, message=message
        )
        said = f"out of memory with {samples} samples at once ({message})"
        self.context.say(f"step {step}: {said}; it is begun again with {now}")
        if self.context.processes.size == 1:  # several meet at the reading of results
            self.settle()
        if self.recording is not None:
            self.recording.open(self._coming_step)

    def _account(self, outcomes: list[Outcome]) -> None:
        self._known.extend(outcomes)
        # If one ends the loop, the rest stay known: their steps are in the weights all the same.
        while self._known:
            outcome = self._known.popleft()
            window = self._open.pop(outcome.index)
            if outcome.halts or window is None:
                self.halts, self._ended = self.halts or outcome.halts, True
                continue
            if window.epoch != self._epoch:
                self.refusals.report_epoch(self._epoch)
                self._epoch = window.epoch
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

    def _give_up(self, window: Window, result: Outcome, reason: str) -> None:
        """Account for every window in flight, then write the post-mortem and raise.

        Later checkpoints bear the step of their weights: that of this window, if it was applied, or
        of the last one after it.
        """
        self.refusals.report_epoch(self._epoch)
        later = [*self._known, *self.guard.flush()]
        self._known.clear()
        for known in (result, *later):
            self.steps += known.applied
            self.tokens += known.tokens if known.applied else 0
        for known in later:
            after = self._open.pop(known.index)
            self.position = self.position if after is None or known.halts else after.position
            self.micro_batches += known.micro_batches
            self.refusals.by_kind.update(refusal.kind for refusal in known.refused)
        last = (window, result)
        if not result.refused and self._refused is not None:
            last = self._refused  # the share was exceeded at a window without a refusal
        steps = (self.steps, self.total_steps)
        self.refusals.stop(reason, last, self._accepted, steps, self.splitter)

    def _after_step(self, result: Outcome) -> None:
        c = self.config
        self.steps += 1
        self.tokens += result.tokens
        metrics = None
        if self.steps % c.log_steps == 0 or self.steps in (1, self.total_steps):
            metrics = self._metrics.line(result, self.steps, self.tokens, self.refusals)
            self._safely(partial(self._log, metrics))
        self.context.display.step(self.steps, metrics, self.refusals.total)
        since = time.perf_counter()
        self._safely(partial(self.divergence.after_step, self.steps, result.loss or 0.0))
        self._safely(self._evaluate_if_due)
        if c.save_steps and self.steps % c.save_steps == 0:
            self.save()
        # looking, evaluating and saving is not training
        self._metrics.since += time.perf_counter() - since

    def _change_strategy(self) -> None:
        """Begin another strategy: its losses must not be measured by those of the one before."""
        self.divergence.forget_losses()
        strategy = self.config.strategy
        if self.guard.window.spikes is not None:
            self.guard.window.spikes = SpikeGuard()
        self.context.folder.event("stage", step=self.steps, strategy=strategy)
        self.context.say(f"step {self.steps}: {strategy} from here on")

    def _log(self, metrics: dict[str, Any]) -> None:
        self.context.folder.metrics(metrics)
        self.context.trackers.log(metrics, self.steps)

    def _evaluate_if_due(self) -> None:
        every, done = self.config.eval_steps, (0, self.total_steps, self.last_evaluation)
        if not every or self.steps % every or self.steps in done:
            return
        with contextlib.suppress(StoppedError):  # the loop looks at the signal itself, and saves
            self._report_evaluation(self.actions.evaluate())

    def _report_evaluation(self, fidelity: Fidelity) -> None:
        self.last_evaluation = self.steps
        student, aim = fidelity.student.as_dict(), fidelity.aim
        against = {"unquantized": aim.as_dict()} if fidelity.attribution else {}
        self.context.folder.event("evaluation", step=self.steps, student=student, **against)
        logged = {f"eval/{key}": value for key, value in student.items()}
        for key, value in against.get("unquantized", {}).items():
            logged[f"eval/unquantized_{key}"] = value
        self.context.trackers.log(logged, self.steps)
        said = f"held-out perplexity ratio {aim.perplexity_ratio:.4f}, KL {aim.kl:.4f}"
        self.context.say(f"step {self.steps}: {said}")
        self.keep_if_best(fidelity)
        self.divergence.after_evaluation(self.steps, fidelity)

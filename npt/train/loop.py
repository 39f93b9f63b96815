"""The training loop: pass each window through the guard, then count, log and save its outcome."""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from npt.adapters.converted import is_sharded, npt_layers
from npt.adapters.trained import ModulationMeter
from npt.batch import Batch, Sample, collate, find_fault
from npt.data.samples import Window
from npt.device import card_error
from npt.distill.step import MicroBatchSplitter, forward_backward, summed
from npt.distill.strategies import Strategy
from npt.errors import StoppedError, TooManyRefusalsError
from npt.guard.guard import PlannedGuard
from npt.guard.outcome import Outcome, Refusal
from npt.guard.update import EXACT
from npt.guard.window import FAILED
from npt.hooks import may_change
from npt.train.journal import Journal
from npt.train.metrics import StepMetrics
from npt.train.states import KeptStates

REFUSED_SHARE = 0.2
"""A run stops when the share of refused micro-batches exceeds this."""

SHARE_COUNTS_FROM = 50
"""Micro-batches to see before the share counts; over fewer it is mostly chance."""

PLACEHOLDER = collate([Sample("placeholder", (0, 0))])
"""Computed by a process that has no micro-batch while others do; counts no tokens."""


class Loop:
    """One run of the training loop, with the guard of its student.

    Attributes:
        progress: of the run, advanced by every outcome.
        sharded: the base is sharded, so all processes must compute equally often.
        failure: error of this process that stops all processes at the next step.
        halts: halt code of each process that stopped.
        kept: states of frozen layers for text that is read again.
    """

    def __init__(
        self,
        journal: Journal,
        guard: PlannedGuard,
        strategy: Strategy,
        kept: KeptStates | None = None,
    ):
        self.journal = journal
        self.progress = journal.progress
        self.setup = journal.setup
        self.config = journal.setup.config
        self.guard = guard
        self.strategy = strategy
        self.kept = kept
        self.sharded = is_sharded(self.setup.model)
        self.failure: Exception | None = None
        self.halts: dict[int, int] = {}
        self.metrics = StepMetrics(self.setup, journal.data.total_steps)
        self.meter = ModulationMeter([layer.npt for _, layer in npt_layers(self.setup.model)])
        self.setup.splitter.report = self._report_lack
        self._saved: int | None = None  # micro-batches at the last checkpoint
        self._open: dict[int, Window | None] = {}  # begun, not yet counted; None: data ended
        self._outcomes: deque[Outcome] = deque()  # known, not yet counted
        self._last_accepted = Window([])  # the last one without a refusal
        self._last_refused: tuple[Window, Outcome] | None = None
        self._ended = False  # the data ended, or a process stopped
        self._unlogged: Outcome | None = None  # of the last step, if no line was due
        self._resume()

    def _resume(self) -> None:
        """Continue from the progress of the run's checkpoint, if it has one."""
        progress = self.progress
        self.metrics.logged_tokens = progress.tokens
        self._refusals_logged = progress.refused_by_kind.copy()
        self.guard.counts.in_a_row = progress.in_a_row
        self.guard.forensics.left = max(0, self.guard.settings.trace - progress.diagnoses)
        origin = self.setup.origin
        if origin.goes_on and origin.checkpoint is not None:
            self._saved = progress.micro_batches

    def train(self, windows: Iterable[Window]) -> None:
        """Train until the windows end, `max_steps` is reached or any process gets a signal.

        Raises:
            TooManyRefusalsError: too many refusals; the post-mortem is written.
            ProcessError: another process failed or was lost.
        """
        guard = self.guard
        strategy = self.strategy
        config = self.config
        model = self.setup.model
        splitter = self.setup.splitter
        placeholder = partial(forward_backward, model, strategy, PLACEHOLDER, config)
        most = math.inf if config.max_steps is None else config.max_steps
        model.eval()
        with self._computing():
            self._evaluate_if_due()  # a signal may have cut this step's evaluation short
        coming = iter(windows)
        # Only outcomes end the loop: all processes get the same ones at the same window.
        while not self._ended and self.progress.step < most:
            window: Window | None = None
            with self._stopping_together():
                if self.failure is None:
                    window = next(coming, None)
            self._open[guard.window.committed] = window
            is_logged = self._is_logged(self._coming_step)
            with self._computing():
                for place, batch in self._own_batches(window):
                    if batch is None:  # gathering a sharded layer needs this process too
                        with guard.aside():
                            placeholder()
                        continue
                    if fault := find_fault(batch, model.config.vocab_size):
                        guard.refuse(fault, batch.sample_ids, placeholder)
                        continue
                    # for the tracer, so that its OOM does not shrink the parts of the run
                    parts = MicroBatchSplitter(splitter.samples)
                    recompute = partial(summed, model, strategy, batch, config, parts)
                    with guard.micro_batch(
                        batch.tokens, batch.sample_ids, batch, recompute, offset=batch.offset
                    ) as micro:
                        observe = partial(self._observed, place, is_logged)
                        read = self._with_kept(batch)
                        sums = summed(model, strategy, read, config, splitter, observe)
                        micro.loss = sums.loss
                        micro.tokens = sums.tokens
                        micro.report = sums.report
                        if is_logged:
                            micro.report = torch.cat([sums.report, self.meter.take()])
                if self.sharded:
                    model.model.reset_iter_state()  # or FSDP remembers every pass
            # the outcomes known by now: reading this window's would wait for the device
            self._account(guard.step(self._fingerprint(window)))
            # Saving and evaluating must see the state of exactly this step.
            if self._is_boundary(self._coming_step - 1):
                self.settle()
        self.settle()
        if not self.halts:
            self._log_rest()
        self.setup.processes.raise_together(self.failure)

    def settle(self) -> None:
        """Wait for all outcomes in flight and account for them."""
        self._account(self.guard.flush())

    def _own_batches(self, window: Window | None) -> Iterator[tuple[int, Batch | None]]:
        """Yield this process's micro-batches of a window and their places in it, until a signal. On
        a sharded base every process yields equally many, padded with None.
        """
        processes = self.setup.processes
        stop = self.setup.stop
        open_window = self.guard.window
        batches: list[Batch | None] = [] if window is None else [*window.batches]
        length = len(batches)
        skipped = window is None
        if self.sharded:
            batches += [None] * (self.setup.window_size - length)
        for place in range(processes.index, len(batches), processes.size):
            skipped = skipped or stop.number is not None
            if skipped and not self.sharded:
                break
            yield place, None if skipped else batches[place]
        else:
            open_window.place = length  # past those of the other processes too
        # a signal after the last micro-batch stops the run at the next window
        if skipped and stop.number is not None and self.failure is None:
            open_window.halt(stop.number)

    def _with_kept(self, batch: Batch) -> Batch:
        """Return a micro-batch that reads kept states, unless something observes or may change what
        the frozen layers compute.
        """
        recording = self.journal.recording
        if self.kept is None or (recording is not None and recording.wants(self._coming_step)):
            return batch
        if any(may_change(module) for module in self.setup.model.model.modules()):
            return batch
        return self.kept.of(batch)

    def _fingerprint(self, window: Window | None) -> int:
        """Return a checksum below `EXACT` for processes to compare; 0 for a single process."""
        if window is None or self.setup.processes.size == 1:
            return 0
        checksum = 0
        for batch in window.batches:
            checksum = zlib.crc32("\n".join(batch.sample_ids).encode(), checksum)
            checksum = zlib.crc32(batch.input_ids.numpy().tobytes(), checksum)
        return checksum % (EXACT - 1) + 1

    @contextlib.contextmanager
    def _stopping_together(self) -> Iterator[None]:
        """Let an error of this process stop all processes at the next step."""
        try:
            yield
        except Exception as error:
            if self.setup.processes.size == 1:
                raise
            if self.failure is None:
                self.failure = error
                self.guard.window.halt(FAILED)

    def _computing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for passes through the base. On a sharded base an error ends this
        process at once, and the others notice in the next gather.
        """
        return self.setup.processes.exchanging() if self.sharded else self._stopping_together()

    @contextlib.contextmanager
    def _observed(self, place: int, is_logged: bool, part: Batch) -> Iterator[None]:
        """Measure the modulation of a part of a micro-batch, if its step is to be logged, and
        record it, if the step is one of `--trace_steps`.
        """
        measuring = self.meter.measuring() if is_logged else contextlib.nullcontext()
        with self._recorded(place, part), measuring:
            yield

    @contextlib.contextmanager
    def _recorded(self, place: int, part: Batch) -> Iterator[None]:
        """Record the first part of a micro-batch in a step that `--trace_steps` selects."""
        recording = self.journal.recording
        step = self._coming_step
        if recording is None or not recording.wants(step):
            yield
            return
        valid = part.attention_mask.bool() if part.padded else None
        recording.start(self.setup.model, step, valid)
        try:
            yield
            with self.metrics.paused():
                recording.finish(place)
        finally:
            recording.stop()

    def _report_lack(self, samples: int, now: int, message: str) -> None:
        step = self._coming_step
        self.journal.folder.event(
            "out_of_memory", step=step, samples=samples, samples_at_once=now, message=message
        )
        self.setup.say_lack(f"step {step}", samples, now, message)

    def _account(self, outcomes: list[Outcome]) -> None:
        self._outcomes.extend(outcomes)
        # After one that ends the loop, count the rest too: their steps are in the weights.
        while self._outcomes:
            outcome = self._outcomes.popleft()
            window = self._count(outcome)
            if window is None:
                self.halts = self.halts or outcome.halts
                self._ended = True
            else:
                self._report(window, outcome)

    def _count(self, outcome: Outcome) -> Window | None:
        """Count an outcome; return its window, or None if the data ended or a process stopped."""
        window = self._open.pop(outcome.index)
        if outcome.halts or window is None:
            return None
        self.progress.count(outcome, window.position)
        return window

    def _report(self, window: Window, outcome: Outcome) -> None:
        """Report what was repaired, refused and applied; raise if too much was refused."""
        step = self.progress.step
        for repair in outcome.repaired:
            self.journal.folder.event("repaired", step=step, message=repair)
            self.setup.say(f"step {step}: repaired: {repair}")
        if outcome.refused:
            self._report_refused(window, outcome)
            if self.journal.recording is not None:
                self.journal.recording.refused = self.progress.refused
            # without the snapshot, which holds every adapter and its moments
            self._last_refused = window, replace(outcome, snapshot=None, update=None)
        reason = self._excess(outcome.longest)
        if reason is not None:
            self._give_up(window, outcome, reason)
        if not outcome.applied:
            return
        if not outcome.refused:
            self._last_accepted = window
        self._after_step(outcome)

    def _report_refused(self, window: Window, outcome: Outcome) -> None:
        event = self.journal.folder.event
        say = self.setup.say
        step = self.progress.step
        if not outcome.applied:
            step += 1
        for refusal in outcome.refused:
            event("refusal", step=step, epoch=window.position.place.epoch, **refusal.as_dict())
            say(f"step {step}: refused {refusal}")
        traced = [(finding.refusal.micro_batch, finding.told) for finding in outcome.findings]
        of_all = self.setup.processes.gather(traced)
        for micro_batch, message in itertools.chain(*of_all):
            self.progress.diagnoses += 1
            event("diagnosis", step=step, micro_batch=micro_batch, message=message)
            for line in f"diagnosis: {message}".splitlines():
                say(f"  {line}")

    def _excess(self, longest: int) -> str | None:
        most = self.config.max_consecutive_bad
        if longest >= most:
            return f"{longest} refusals in a row (--max_consecutive_bad {most})"
        total = self.progress.refused
        tried = self.progress.micro_batches
        if tried < SHARE_COUNTS_FROM or total <= REFUSED_SHARE * tried:
            return None
        return f"{total} of {tried} micro-batches refused, over {REFUSED_SHARE:.0%}"

    def _give_up(self, window: Window, outcome: Outcome, reason: str) -> None:
        """Count every window in flight, then write the post-mortem and raise."""
        for later in (*self._outcomes, *self.guard.flush()):
            self._count(later)
        self._outcomes.clear()
        if not outcome.refused and self._last_refused is not None:
            window, outcome = self._last_refused  # report the last refusal
        if not self.setup.processes.broken:
            self._log_rest()
        accepted = self._last_accepted.batches
        self.journal.give_up(self.guard, outcome, reason, window.batches, accepted)

    def _after_step(self, outcome: Outcome) -> None:
        step = self.progress.step
        self._unlogged = replace(outcome, own=[], snapshot=None, update=None)
        if self._is_logged(step):
            self._log(self._unlogged)
        if self.sharded or self.failure is None:
            with self._computing():
                self._evaluate_if_due()
        if _falls_on(step, self.config.save_steps):
            self.save()

    def _is_logged(self, step: int) -> bool:
        return step % self.config.log_steps == 0 or step in (1, self.journal.data.total_steps)

    def _log(self, outcome: Outcome) -> None:
        """Log the last applied step, whose outcome this is."""
        metrics = self.metrics.line(outcome, self.progress)
        self._unlogged = None
        self._refusals_logged = self.progress.refused_by_kind.copy()
        with self._stopping_together():
            self.journal.folder.metrics(metrics)
            self.journal.trackers.log(metrics, self.progress.step)
        self.setup.say(self.metrics.progress(metrics))

    def _log_rest(self) -> None:
        """Log at the end of the loop what came after the last line: a step or refusals.

        A line of `metrics.jsonl` is that of a step, so refusals alone go to the trackers, and to
        the event that ends the run.
        """
        if self._unlogged is not None:
            self._log(self._unlogged)
        elif self.progress.refused_by_kind != self._refusals_logged:
            with self._stopping_together():
                self.journal.trackers.log(self.progress.refusal_counts, self.progress.step)

    def _evaluate_if_due(self) -> None:
        progress = self.progress
        # before the first step and after the last one the Trainer evaluates by itself
        done = (0, self.journal.data.total_steps, progress.last_evaluation)
        if progress.step in done or not _falls_on(progress.step, self.config.eval_steps):
            return
        # on a signal the loop ends and saves
        with contextlib.suppress(StoppedError), self.metrics.paused():
            self.journal.evaluate()

    def save(self, last: bool = False) -> None:
        """Save a checkpoint; with `last` a failed write raises."""
        with self.metrics.paused():
            if self.journal.save(self.guard, last):
                self._saved = self.progress.micro_batches

    @property
    def unsaved(self) -> bool:
        """True if any micro-batch, even a refused one, came after the last checkpoint."""
        return self._saved != self.progress.micro_batches

    def rescue(self, error: BaseException) -> None:
        """Save the applied steps after an error ended the loop, unless a second signal came."""
        processes = self.setup.processes
        if isinstance(error, KeyboardInterrupt) and self.setup.stop.number is not None:
            return
        if not isinstance(error, TooManyRefusalsError):
            self.journal.failed("error", error, str(error))
        # the other processes are not here, so nothing may wait for them
        if not processes.met_by_all(error):
            processes.leave()
        why = card_error(self.setup.device) if isinstance(error, RuntimeError) else None
        if why is not None:
            self._give_up_card(why)
        try:
            self.settle()  # a checkpoint is named by the step of its weights
            steps = self.progress.step
            if processes.broken and self.guard.window.applied_steps != steps:
                return  # the weights are ahead of the last outcome that all processes sent
            if steps and self.unsaved:
                self.save(last=True)
        except Exception as second:  # the first error is the one to raise
            self.journal.failed("error", second, f"not saved: {second}")

    def _give_up_card(self, why: str) -> None:
        """Report the windows in flight as refused by a GPU that is lost."""
        batches = [batch for window in self._open.values() if window for batch in window.batches]
        index = self.guard.window.committed
        outcome = Outcome(index, len(batches), applied=False, steps=self.progress.step)
        outcome.refused = (Refusal("card", why),)
        self.journal.give_up(self.guard, outcome, why, batches)

    @property
    def _coming_step(self) -> int:
        return self.progress.step + self.guard.window.in_flight + 1

    def _is_boundary(self, step: int) -> bool:
        config = self.config
        ends = step == config.max_steps
        return ends or _falls_on(step, config.save_steps) or _falls_on(step, config.eval_steps)


def _falls_on(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

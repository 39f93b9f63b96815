"""The loop: windows of micro-batches through the transaction, and what is logged, saved and counted
on the way.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_parameters, npt_layers
from npt.adapters.sharding import is_sharded
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.data.loader import Position
from npt.diagnostics.diagnose import diagnose
from npt.distill.stages import Stage, stage_at, stages_of
from npt.distill.strategies import REPORTED, MicroBatch, Strategy
from npt.distributed.processes import Ranks, rank_failure, reason_of
from npt.errors import StoppedError, TooManyRefusalsError
from npt.evaluation.evaluate import Fidelity
from npt.postmortem.write import Situation, write_postmortem
from npt.runs.run_folder import RunFolder
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers
from npt.step.spikes import SpikeGuard
from npt.step.splitting import Passes, added, tried
from npt.step.train_step import bad_in_a_row, fill_gradients, new_transaction, try_micro_batch
from npt.step.transaction import EXACT, FAILED, HISTORY, Refusal, Trace, WindowResult, draws_of
from npt.train.progress import ProgressDisplay
from npt.train.step_recording import StepRecording

SHARE_COUNTS_FROM = 50
"""Micro-batches before `max_refused_share` is applied: a share of fewer says little."""

DIAGNOSES = 5
"""Refusals of a run that are looked into: what breaks more often than that breaks in the same
place.
"""

T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """K micro-batches of every rank, or fewer at the very end, the epoch in which the first of them
    lies, and where the data stand behind it.

    Every rank has all of them: number i is computed by rank i modulo the number of ranks.
    """

    epoch: int
    batches: list[Batch]
    position: Position = field(default_factory=Position)

    @property
    def mark(self) -> int:
        """A fingerprint of samples and tokens, from 1 on and below `EXACT`."""
        checksum = 0
        for batch in self.batches:
            checksum = zlib.crc32(
                batch.input_ids.numpy().tobytes(),
                zlib.crc32("\n".join(batch.sample_ids).encode(), checksum),
            )
        return checksum % (EXACT - 1) + 1


class Loop:
    """One run of the training loop.

    Args:
        model: with adapters attached.
        strategy: what a micro-batch does.
        config: training settings.
        rates: learning rate of each applied step (`rate_table`).
        total_steps: of the run, None where unknown.
        folder, trackers, display: where to report.
        stop: set by a signal; looked at before every micro-batch.
        evaluate: figures of the model as it is.
        save: save everything as it stands; False where that failed and training goes on all the
            same. save_best: keep the adapters as the best so far.
        record: what `run.json` holds, for a post-mortem.
        ranks: the processes that train together, each in a loop like this one; default this one
            alone.
        passes: how many samples of a micro-batch are computed at once; default all of them. Where
            memory does not do for so many, they become fewer.
        look: shows the trackers the student as it is at a step, every `sample_steps`; it changes
            nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        strategy: Strategy,
        config: TrainConfig,
        rates: list[float],
        total_steps: int | None,
        folder: RunFolder,
        trackers: Trackers,
        display: ProgressDisplay,
        stop: StopOnSignal,
        evaluate: Callable[[], Fidelity],
        save: Callable[[], bool],
        save_best: Callable[[Fidelity], None],
        record: Mapping[str, Any],
        ranks: Ranks | None = None,
        passes: Passes | None = None,
        look: Callable[[int], None] | None = None,
    ):
        self._look = look
        self.ranks = ranks if ranks is not None else Ranks()
        self.passes = passes if passes is not None else Passes(config.batch_size)
        self.model, self.strategy, self.config, self.total_steps = (
            model,
            strategy,
            config,
            total_steps,
        )
        self.stages = stages_of(config, total_steps)
        self.folder, self.trackers, self.display, self.stop = folder, trackers, display, stop
        self._evaluate, self._save, self._save_best, self._record = (
            evaluate,
            save,
            save_best,
            record,
        )
        self.transaction = new_transaction(adapter_parameters(model), config, rates, self.ranks)
        self.optimizer = self.transaction.optimizer
        self.recording = StepRecording(folder, display, config)
        self.steps = self.tokens = self.micro_batches = 0
        self.position = Position()
        self.best_kl = math.inf
        self._saved: int | None = None  # micro-batches behind the last checkpoint
        self.last_evaluation: int | None = None
        self.refused_by_kind: Counter[str] = Counter()
        self.refused_by_epoch: Counter[int] = Counter()
        self._in_a_row = 0
        # committed, not accounted for yet; None behind the last one
        self._open: dict[int, Window | None] = {}
        self._known: deque[WindowResult[MicroBatch]] = deque()  # results of theirs that have come
        self._accepted: Window | None = None  # the last one of which nothing was refused
        # the last other one, without its state
        self._refused: tuple[Window, WindowResult[MicroBatch], Stage] | None = None
        self._epoch = self._diagnoses = 0
        # what this rank cannot go on for, until all know of it
        self._failure: Exception | None = None
        self._halts: dict[int, int] = {}  # ranks that cannot go on, and why
        self._ended = False  # the data are used up
        self._logged_at, self._logged_tokens = time.perf_counter(), 0

    @property
    def refused(self) -> int:
        """Refused micro-batches and windows so far."""
        return self.refused_by_kind.total()

    def run(self, windows: Iterable[Window]) -> None:
        """Train until the windows or `max_steps` are used up, or a signal came to any rank.

        Raises:
            TooManyRefusalsError: after the post-mortem was written.
            RankError: another rank failed, was lost, or is no longer like this one.
        """
        self.model.eval()
        self.recording.announce()
        # where a signal ended the evaluation of the step that is gone on from
        self._safely(self._evaluate_if_due)
        self._logged_at = time.perf_counter()
        coming = iter(windows)
        # What ends the loop are results, which all ranks have alike and at the same window, and
        # never what one rank alone knows.
        while self._wants_more:
            window = self._safely(partial(next, coming, None))
            self._fill_window(window)
            self._open[self.transaction.committed] = window
            mark = window.mark if self.ranks.size > 1 and window is not None else 0
            self._account(self.transaction.commit(mark))
            # What depends on the state at an exact step must not see the window behind it. Where
            # results come late this waits for them; a window that turns out refused has merely been
            # waited for in vain.
            if self._is_boundary(self.steps + self.transaction.in_flight):
                self.settle()
        self.settle()
        self._raise_failure()
        self._close_epoch()

    def _fill_window(self, window: Window | None) -> None:
        """Compute this rank's micro-batches of it. Where a signal comes in front of its end it has
        not happened, on any rank.
        """
        if window is None:  # the data are used up, or a signal ended their preparation
            if self.stop.number is not None and self._failure is None:
                self.transaction.halt(self.stop.number)
            return
        while not self._filled(window):
            self.transaction.abandon()
            if self.ranks.size == 1:  # several have to meet where results are read
                self.settle()  # which frees what is kept of the windows in flight

    def _filled(self, window: Window) -> bool:
        """False where memory ran out. The window is to be begun again then, with fewer samples at
        once: all of it is computed alike.
        """
        for index, batch in enumerate(window.batches):
            if self._failure is not None:
                break
            if self.stop.number is not None:
                self.transaction.halt(self.stop.number)
                break
            if index % self.ranks.size != self.ranks.rank:
                self.transaction.pass_over()
            elif self._safely(partial(self._micro_batch, batch, index)) is False:
                return False
        return True

    @property
    def _wants_more(self) -> bool:
        """Whether there is a step to be made. `max_steps` may leave none; a run that is resumed may
        have made them all.
        """
        if self._halts or self._ended:
            return False
        return self.config.max_steps is None or self.steps < self.config.max_steps

    def _safely(self, act: Callable[[], T]) -> T | None:
        """Do what can fail on this rank alone. What fails on one of several ranks ends the next
        window on all of them; until then it goes along, so that none waits for it in vain."""
        if self.ranks.size == 1:
            return act()
        if self._failure is None:
            try:
                return act()
            except Exception as error:
                self._failure = error
                self.transaction.halt(FAILED)
        return None

    def _raise_failure(self) -> None:
        """End the loop, on every rank, with what one of them failed for, be it behind the last
        window.
        """
        if self.ranks.size == 1:
            return
        reasons = self.ranks.gather_json(
            None if self._failure is None else reason_of(self._failure)
        )
        if any(reason is not None for reason in reasons):
            raise self.ranks.everywhere(
                self._failure if self._failure is not None else rank_failure(reasons)
            )

    def settle(self) -> None:
        """Wait for the windows whose results are still on their way, and account for them."""
        self._account(self.transaction.flush())

    def _micro_batch(self, batch: Batch, index: int) -> bool:
        """Compute one; False where memory ran out and fewer samples are to be computed at once."""
        if index == 0:
            self.recording.open(self._coming_step)
        fill = partial(self._fill, batch, self.stage.config, index)
        lack = self._tried(
            partial(try_micro_batch, self.transaction, batch, self.model.config.vocab_size, fill)
        )
        # reading and writing a record is not training
        self._logged_at += self.recording.take_seconds()
        if lack is None:
            return True
        step = self._coming_step
        # One sample is tried again where windows in flight keep memory, which is going to be freed.
        again = (
            self.passes.of(batch) == 1 and self.ranks.size == 1 and self.transaction.in_flight > 0
        )
        before = 1 if again else self.passes.lower(batch, lack)
        self.folder.event(
            "out_of_memory",
            step=step,
            samples=before,
            samples_at_once=self.passes.samples,
            message=lack,
        )
        said = (
            f"out of memory with {before} samples at once ({lack}); it is begun again with"
            f" {self.passes.samples}"
        )
        self.display.say(f"step {step}: {said}")
        return False

    def _tried(self, act: Callable[[], None]) -> str | None:
        """What memory lacked, if it did not do. Where ranks share a base that is an error: one that
        stopped inside a layer is out of step with the others."""
        if is_sharded(self.model):
            act()
            return None
        return tried(act)[1]

    def _fill(self, batch: Batch, config: TrainConfig, index: int | None = None) -> MicroBatch:
        """Gradients and sums of a micro-batch; `index` where it is one of a window, which may be
        recorded.
        """
        sums = []
        for part in self.passes.parts(batch):
            fill: Callable[[], MicroBatch] = partial(
                fill_gradients, self.strategy, self.model, part, config
            )
            sums.append(
                (fill if index is None else self.recording.around(fill, self.model, part, index))()
            )
        return added(sums)

    def _fill_again(self, batch: Batch, config: TrainConfig) -> MicroBatch:
        """The same outside the transaction, with the random numbers that it was computed with
        there.
        """
        with draws_of(config.seed, batch.sample_ids, batch.offset):
            return self._fill(batch, config)

    @property
    def _coming_step(self) -> int:
        """What the open window will be, if it is applied."""
        return self.steps + self.transaction.in_flight + 1

    @property
    def stage(self) -> Stage:
        """That of the step which comes next. Where results come late, those in front of a stage's
        first step are waited for.
        """
        return stage_at(self.stages, self.steps)

    def _is_boundary(self, step: int) -> bool:
        c = self.config
        if step == c.max_steps or any(step == stage.start for stage in self.stages):
            return True
        return any(
            every and step % every == 0
            for every in (c.save_steps, c.eval_steps, self._look and c.sample_steps)
        )

    def _account(self, results: list[WindowResult[MicroBatch]]) -> None:
        self._known.extend(results)
        # one that ends the loop leaves those behind it there: their steps are in the weights all
        # the same
        while self._known:
            result = self._known.popleft()
            window = self._open.pop(result.index)
            if result.halts or window is None:
                self._halts, self._ended = (
                    self._halts or result.halts,
                    self._ended or window is None,
                )
                continue
            if window.epoch != self._epoch:
                self._close_epoch()
                self._epoch = window.epoch
            self.micro_batches += result.micro_batches
            self.position = window.position
            for refusal in result.refusals:
                self.refused_by_kind[refusal.kind] += 1
                self.refused_by_epoch[window.epoch] += 1
                self.folder.event(
                    "refusal", step=self.steps + 1, epoch=window.epoch, **asdict(refusal)
                )
                self.display.say(f"refused at step {self.steps + 1}, {refusal}")
                self._diagnose(window, refusal)
            if result.refusals:
                self._refused = window, replace(result, before=None), self.stage
            longest, self._in_a_row = bad_in_a_row(self._in_a_row, result)
            self._check_budget(window, result, longest)
            if result.applied:
                self._accepted = self._accepted if result.refusals else window
                self._after_step(result)

    def _diagnose(self, window: Window, refusal: Refusal) -> None:
        """Say which number is bad, for the first few refusals whose data were in order; it costs
        two forward passes.
        """
        if refusal.micro_batch is None or refusal.kind == "data" or self._diagnoses == DIAGNOSES:
            return
        self._diagnoses += 1
        if not self.ranks.main:
            return
        try:
            parts = self.passes.parts(window.batches[refusal.micro_batch])
            finding = next(
                (found for part in parts if (found := diagnose(self.model, part)) is not None), None
            )
            message = (
                "no bad number in adapters, base or logits now" if finding is None else str(finding)
            )
        except Exception as error:  # an observer must not end the run that it looks at
            message = f"failed: {type(error).__name__}: {error}"
        self.folder.event(
            "diagnosis", step=self.steps + 1, micro_batch=refusal.micro_batch, message=message
        )
        self.display.say(f"  diagnosis: {message}")

    def _check_budget(self, window: Window, result: WindowResult[MicroBatch], longest: int) -> None:
        c = self.config
        if longest >= c.max_consecutive_bad:
            self._give_up(
                window,
                result,
                f"{longest} refusals in a row (--max_consecutive_bad {c.max_consecutive_bad})",
            )
        if (
            self.micro_batches >= SHARE_COUNTS_FROM
            and self.refused > c.max_refused_share * self.micro_batches
        ):
            share = f"{self.refused} of {self.micro_batches} micro-batches refused"
            self._give_up(window, result, f"{share} (--max_refused_share {c.max_refused_share:g})")

    def _give_up(self, window: Window, result: WindowResult[MicroBatch], reason: str) -> None:
        self._close_epoch()
        before, stage = self.steps, self.stage
        # What is saved from here on bears the step that its weights are of: that of this window, if
        # it was applied at all, or, where results come late, of the last one behind it. How many
        # those are, one to `IN_FLIGHT`, is a matter of the clock.
        later = [*self._known, *self.transaction.flush()]
        self._known.clear()
        for known in (result, *later):
            self.steps += known.applied
            self.tokens += known.tokens if known.applied else 0
        for known in later:
            behind = self._open.pop(known.index)
            self.position = self.position if behind is None or known.halts else behind.position
            self.micro_batches += known.micro_batches
            self.refused_by_kind.update(refusal.kind for refusal in known.refusals)
        if not result.refusals and self._refused is not None:
            # the share of refusals was exceeded at a window that had none
            window, result, stage = self._refused
        self._gather_history()
        situation = Situation(
            model=self.model,
            transaction=self.transaction,
            fill=partial(self._fill_again, config=stage.config),
            window=window.batches,
            result=result,
            accepted=() if self._accepted is None else self._accepted.batches,
            reason=reason,
            step=self.steps if result.before is None else before,
            total_steps=self.total_steps,
            config=stage.config,
            counters={
                "steps": self.steps,
                "tokens": self.tokens,
                "micro_batches": self.micro_batches,
                "refused": dict(self.refused_by_kind),
                "epoch": window.epoch,
                "in_a_row": self._in_a_row,
            },
            record=self._record,
            samples_at_once=self.passes.samples,
        )
        last = f", the last: {result.refusals[-1]}" if result.refusals else ""
        said = f"stopped at step {self.steps}: {reason}{last}"
        bundle = self.ranks.first(lambda: self._postmortem(situation))
        self.folder.event("stopped", step=self.steps, reason=reason, **bundle)
        if bundle["postmortem"] is None:
            why = f"no post-mortem could be written below {self.folder.path}: {bundle['error']}"
            raise self.ranks.everywhere(
                TooManyRefusalsError(f"{said}; {why}; free or choose a disk that can be written to")
            )
        where = self.folder.path / bundle["postmortem"]
        raise self.ranks.everywhere(
            TooManyRefusalsError(f"{said}; look into it with: npt replay {where}")
        )

    def _postmortem(self, situation: Situation) -> dict[str, Any]:
        """Where below the run folder the bundle is, or why there is none: the run has to say why it
        stopped in either case.
        """
        try:
            return {
                "postmortem": str(
                    write_postmortem(self.folder.path, situation).relative_to(self.folder.path)
                )
            }
        except Exception as error:
            return {"postmortem": None, "error": str(error)}

    def _gather_history(self) -> None:
        """Remember the last micro-batches of every rank, in their order."""
        if self.ranks.size == 1:
            return
        everyone = self.ranks.gather_json([asdict(trace) for trace in self.transaction.history])
        traces = [
            Trace(**{**entry, "sample_ids": tuple(entry["sample_ids"])})
            for entries in everyone
            for entry in entries
        ]
        self.transaction.history = deque(
            sorted(traces, key=lambda t: (t.window, t.micro_batch)),
            maxlen=HISTORY * self.ranks.size,
        )

    def _after_step(self, result: WindowResult[MicroBatch]) -> None:
        c = self.config
        self.steps += 1
        self.tokens += result.tokens
        metrics = None
        if self.steps % c.log_steps == 0 or self.steps == 1 or self.steps == self.total_steps:
            metrics = self._metrics(result)
            self._safely(partial(self._log, metrics))
        self.display.step(self.steps, metrics, self.refused)
        if self.stage.start == self.steps:
            self._begin_stage()
        working_until = time.perf_counter()
        self._safely(self._evaluate_if_due)
        if self._look is not None and c.sample_steps and self.steps % c.sample_steps == 0:
            self._safely(partial(self._look, self.steps))
        if c.save_steps and self.steps % c.save_steps == 0:
            self.save()
        # saving, evaluating and looking is not training
        self._logged_at += time.perf_counter() - working_until

    def _begin_stage(self) -> None:
        """The next step is driven in another way: its losses are not to be measured by those
        before.
        """
        strategy = self.stage.config.strategy
        if self.transaction.spikes is not None:
            self.transaction.spikes = SpikeGuard(self.config.spike_sigmas)
        self.folder.event("stage", step=self.steps, strategy=strategy)
        self.display.say(f"step {self.steps}: {strategy} from here on")

    def _log(self, metrics: dict[str, Any]) -> None:
        self.folder.metrics(metrics)
        self.trackers.log(metrics, self.steps)

    @property
    def unsaved(self) -> bool:
        """Whether anything has happened since the last checkpoint, be it that everything was
        refused.
        """
        return self._saved != self.micro_batches

    def save(self) -> None:
        """Save everything as it stands."""
        if self._save():
            self._saved = self.micro_batches

    def _evaluate_if_due(self) -> None:
        every = self.config.eval_steps
        if (
            not every
            or self.steps % every
            or self.steps in (0, self.total_steps, self.last_evaluation)
        ):
            return
        with contextlib.suppress(StoppedError):  # the loop looks at the signal itself, and saves
            self._evaluated(self._evaluate())

    def _evaluated(self, fidelity: Fidelity) -> None:
        self.last_evaluation = self.steps
        student = fidelity.student.as_dict()
        against = {"unquantized": fidelity.aim.as_dict()} if fidelity.attribution else {}
        self.folder.event("evaluation", step=self.steps, student=student, **against)
        logged = {f"eval/{key}": value for key, value in student.items()}
        if against:
            logged |= {
                f"eval/unquantized_{key}": value for key, value in against["unquantized"].items()
            }
        self.trackers.log(logged, self.steps)
        aim = fidelity.aim
        each = "".join(
            f"; {name} {figures.perplexity_ratio:.4f}" for name, figures in fidelity.sources.items()
        )
        self.display.say(
            f"step {self.steps}: held-out perplexity ratio {aim.perplexity_ratio:.4f}, KL"
            f" {aim.kl:.4f}{each}"
        )
        self.keep_if_best(fidelity)

    def keep_if_best(self, fidelity: Fidelity) -> None:
        """Keep the adapters where these figures of theirs are the best so far, by KL."""
        if fidelity.aim.kl < self.best_kl:  # never where it is NaN
            self.best_kl = fidelity.aim.kl
            self._save_best(fidelity)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to know of the loop, beside adapters and transaction."""
        return {
            "step": self.steps,
            "tokens": self.tokens,
            "micro_batches": self.micro_batches,
            "refused_by_kind": dict(self.refused_by_kind),
            "refused_by_epoch": {
                str(epoch): count for epoch, count in self.refused_by_epoch.items()
            },
            "in_a_row": self._in_a_row,
            "epoch": self._epoch,
            "diagnoses": self._diagnoses,
            "last_evaluation": self.last_evaluation,
            "strategy": self.stage.config.strategy,
            "best_kl": self.best_kl if math.isfinite(self.best_kl) else None,
            "position": self.position.as_dict(),
        }

    def load_state(self, state: Mapping[str, Any], saved: bool) -> None:
        """Go on from what `state` gave.

        Args:
            state: of a checkpoint.
            saved: the checkpoint lies in this run's folder.
        """
        self.steps, self.tokens, self.micro_batches = (
            state["step"],
            state["tokens"],
            state["micro_batches"],
        )
        self.refused_by_kind = Counter(state["refused_by_kind"])
        self.refused_by_epoch = Counter(
            {int(epoch): count for epoch, count in state["refused_by_epoch"].items()}
        )
        self._in_a_row, self._epoch, self._diagnoses = (
            state["in_a_row"],
            state["epoch"],
            state["diagnoses"],
        )
        self.last_evaluation = state["last_evaluation"]
        # In a new folder there is no best yet, whatever the one before had.
        self.best_kl = (
            math.inf if state["best_kl"] is None or not self.folder.has_best else state["best_kl"]
        )
        self.position = Position.from_dict(state["position"])
        self._logged_tokens = self.tokens
        self._saved = self.micro_batches if saved else None
        # another number of steps, or other shares of them
        if state["strategy"] != self.stage.config.strategy:
            self._begin_stage()

    def _metrics(self, result: WindowResult[MicroBatch]) -> dict[str, Any]:
        """One metrics line: means over the window's survivors, those of every rank, per valid
        token, of the loss on the logits per predicted token."""
        config = stage_at(self.stages, self.steps - 1).config
        names, layers = (*REPORTED, "scored"), [index for index, _ in npt_layers(self.model)]
        # Of the reports, which came with the window's record: the survivors' own tensors may lie
        # behind newer windows in a queue.
        own = [sum(report[i] for report in result.reports) for i in range(len(REPORTED))]
        reported = torch.tensor(
            [report[len(REPORTED) :] for report in result.reports], dtype=torch.float32
        )
        per_layer = reported.sum(dim=0).tolist() if result.reports else [0.0] * len(layers)
        sums = self.ranks.sums([*own, sum(part.scored for part in result.survivors), *per_layer])
        of_all = dict(zip(names, sums, strict=False))
        per_layer = (torch.tensor(sums[len(names) :]) / result.tokens).tolist()
        now = time.perf_counter()
        metrics = {
            "step": self.steps,
            "loss": of_all["loss"] / result.tokens,
            **({"loss_nmse": of_all["nmse"] / result.tokens} if config.hidden_weight else {}),
            "loss_reg": of_all["reg"] / result.tokens,
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "tokens": self.tokens,
            "tokens_per_second": (self.tokens - self._logged_tokens) / (now - self._logged_at),
            "refused_total": self.refused,
            **{f"refused.{kind}": count for kind, count in sorted(self.refused_by_kind.items())},
        }
        self._logged_at, self._logged_tokens = now, self.tokens
        if config.logit_kl_weight:
            # a mean over what was predicted; the loss divides by all valid tokens
            scored = of_all["scored"]
            metrics[f"loss_{config.logit_loss}"] = of_all["logit"] / scored if scored else math.nan
        if len(self.stages) > 1:
            metrics["stage"] = self.stages.index(stage_at(self.stages, self.steps - 1))
        if not config.hidden_weight:  # nothing was compared there
            return metrics
        return metrics | {
            f"layers.{index}.nmse": value for index, value in zip(layers, per_layer, strict=True)
        }

    def _close_epoch(self) -> None:
        """Report an epoch in which something was refused."""
        count = self.refused_by_epoch.get(self._epoch, 0)
        if count:
            self.folder.event(
                "epoch",
                epoch=self._epoch,
                refused=count,
                refused_total=self.refused,
                kinds=dict(self.refused_by_kind),
            )

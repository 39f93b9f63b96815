"""The guard: the transactional step, for any model, optimizer and loop. Read this page first.

What a refused micro-batch would have left is undone, so that the run equals, bit for bit, the one
that never saw it: its gradients lie apart and are not added, its tokens do not count, the
random numbers that it drew are drawn again, the buffers that it wrote to are put back. A window
without survivors steps neither optimizer nor scheduler. Python's and numpy's random state, and the
place in the data, are the loop's own.

A micro-batch makes gradients of its own, and counts only if they and its loss are finite
(`window.py`). The window is divided once by its tokens, checked, clipped, stepped, verified, and
restored if anything is not finite (`update.py`). What came of it is an `Outcome` (`outcome.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from npt.base.device import card_error
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, DataError, TooManyRefusalsError
from npt.guard.forensics import Finding, Forensics, StoredMicroBatch, values_in
from npt.guard.mixed_precision import LossScale
from npt.guard.outcome import MicroBatch, Outcome, Refusal, RunCounts
from npt.guard.parameters import (
    all_processes,
    guarded_parameters,
    share_buffers,
    stepped_parameters,
    unsynchronised,
    unwrapped,
    whole,
)
from npt.guard.settings import GuardSettings
from npt.guard.sharding import sharding_of
from npt.guard.spikes import SpikeGuard
from npt.guard.traces import Buffers, Draws, Seeded
from npt.guard.update import GuardedUpdate, Holdings
from npt.guard.window import GradientWindow

REMEMBERED = 256
"""Refusals, and micro-batches with their figures, that are remembered for a post-mortem."""


class Guard:
    """Steps an optimizer with windows of micro-batches of which bad ones leave no trace.

    Args:
        model: whose parameters the optimizer has; several are an `nn.ModuleList`. In
            DistributedDataParallel it sums its gradients in the guard's step. If FSDP2 shards it,
            every process computes equally many micro-batches; if the optimizer's parameters are
            sharded too, those that are computed together count together or not at all.
        optimizer: any of torch that takes dense gradients from `.grad`, or accelerate's form of it.
            Its parameters are guarded, and those that it comes to step as well.
        scheduler: steps with every applied step; not one that must be told a figure.
        scaler: torch's GradScaler, whose `scale(loss).backward()` the loop calls.
        processes: that share every window; default all of torch.distributed.
        rates: learning rate of each applied step, the last one stays, in place of a scheduler;
            needs `draws`. Every parameter is then stepped, whether a backward reached it or not,
            and `step` returns a list: the outcomes that have become known.
        draws: `Seeded(seed)` gives every micro-batch random numbers of its own, by its ids; default
            torch's, drawn again after a refusal.
        late: the host waits for none of its flags, and outcomes come a window or more later; needs
            `rates` and a fused Adam or AdamW, and is the default for these on CUDA.
        settings: those of `GuardSettings`.

    Attributes:
        sharding: of the model by FSDP2, None without.
        outcome: of the last window, also of one that ended in TooManyRefusalsError.
        refusals: the last ones, with their windows.
        history: figures of the last micro-batches of this process, refused or not.

    Raises:
        ConfigError: a setting, or an optimizer that cannot be guarded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        processes: ProcessGroup | None = None,
        *,
        rates: Sequence[float] | None = None,
        draws: Seeded | None = None,
        late: bool | None = None,
        **settings: Any,
    ):
        self.settings = GuardSettings(**settings)
        share = self.settings.loss == "share"
        optimizer, prepared = unwrapped(optimizer, divided=share)
        scaler = prepared if scaler is None else scaler
        self.lists = rates is not None  # `step` returns one
        planned = self.lists and draws is not None and scheduler is None and scaler is None
        if not planned and (self.lists or draws is not None or late):
            raise ConfigError(
                "rates=[...] and draws=Seeded(seed) go together, and late outcomes need both; rates"
                " take the place of a scheduler and exclude a scaler: nothing else may need to know"
                " at once what became of a window"
            )
        self.scheduler, self._model = scheduler, model
        parameters = guarded_parameters(model, optimizer)
        self._home = next(iter(parameters.values())).device
        processes = all_processes(self._home) if processes is None else processes
        self.sharding = sharding_of(model, parameters, processes)
        sums = self.sharding if self.sharding is not None and self.sharding.trained else None
        if sums is not None and (self.lists or scaler is not None):
            raise ConfigError(
                "sharded parameters go with neither rates=[...] nor a scaler: use a scheduler, and"
                " train in bf16 or fp32"
            )
        late = late if self.lists else False
        self.update = GuardedUpdate(parameters, optimizer, late)
        if self.lists:
            self.update.make_moments()
        sigmas = self.settings.spike_sigmas
        self.window = GradientWindow(
            self.update,
            self.settings.max_grad_norm,
            rates,
            spikes=None if sigmas is None else SpikeGuard(sigmas),
            processes=processes,
            divisor=processes.size if share else None,
            sharding=sums,
        )
        self._scale = LossScale(scaler, optimizer)
        if scaler is not None:
            self.window.unscale = self._scale.unscale
        keep = self.settings.postmortem is not None
        together = self.sharding is not None and processes.size > 1
        self.forensics = Forensics(model, self.settings.trace, keep, together)
        self.draws: Draws = Draws() if draws is None else draws
        self._traces = self.draws, Buffers(whole(model))
        self.counts = RunCounts()
        self.outcome: Outcome | None = None
        self.refusals: deque[tuple[int, Refusal]] = deque(maxlen=REMEMBERED)
        self.history: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)

    @contextmanager
    def micro_batch(
        self,
        tokens: int | None = None,
        ids: Sequence[object] = (),
        inputs: Any = None,
        run: Callable[[], Any] | None = None,
        *,
        offset: int = 0,
    ) -> Iterator[MicroBatch]:
        """Guard the forward and backward of one micro-batch; assign the loss to what this yields.

        Args:
            tokens: over which the loss was summed or averaged; default 1.
            ids: of its samples, for refusals and seeded draws.
            inputs: of the model; default those of its calls. Overwrite none before the outcome of
                the window is known.
            run: computes the loss again, for `trace`, and draws the same random numbers; default
                the model's calls, which is enough if the model returns its loss.
            offset: of its samples in the data, for seeded draws: samples may come again.
        """
        self._follow()
        unset = torch.zeros((), device=self._home)
        micro = MicroBatch(unset, 1 if tokens is None else tokens)
        names = micro.sample_ids = tuple(map(str, ids))
        self._begin(micro.tokens if self.settings.loss == "mean" else 1)
        stored = StoredMicroBatch(inputs, names, micro.tokens, random=self.draws.before)
        if run is not None:
            stored.run = partial(self._again, run, names, offset)
        try:
            with (
                self.window.processes.exchanging(),
                unsynchronised(self._model),
                self.forensics.watching(micro, stored),
                self.draws.drawing(names, offset),
            ):
                yield micro
            micro.loss, micro.report = _scalar(micro.loss), micro.report.detach()
        except BaseException as error:
            done = isinstance(error, DataError) or micro.loss is not unset
            done = done and any(p.grad is not None for p in self.update.parameters)
            self._withdraw()
            if self.sharding is not None and isinstance(error, self.settings.refuse):
                self.sharding.end_together(error, done)
            if not isinstance(error, self.settings.refuse) or card_error(self._home):
                raise
            detail = f"{type(error).__name__}: {error}"
            kind = "data" if isinstance(error, DataError) else "error"
            self.window.refuse(detail, names, kind, micro.stored)
            return
        self.window.gradients.collect()
        if self.settings.loss == "mean":
            if self.sharding is None or not self.sharding.weighs:
                self.window.gradients.scale(micro.tokens)
            elif micro.tokens != self.sharding.weight:  # by which the backward has multiplied
                raise ConfigError(
                    f"the micro-batch began with tokens={self.sharding.weight} and has"
                    f" {micro.tokens}; of sharded parameters tell micro_batch(tokens=...)"
                )
            micro.loss = micro.loss * micro.tokens
        flag = self.window.add(micro)
        for trace in self._traces:
            trace.settle(flag)

    def _again(self, run: Callable[[], Any], ids: Sequence[str], offset: int) -> Any:
        with self.draws.drawing(ids, offset):
            return run()

    def refuse(
        self, detail: str, ids: Sequence[object] = (), run: Callable[[], Any] | None = None
    ) -> None:
        """Count a micro-batch that was found bad before anything was computed.

        Args:
            detail: what is wrong with it.
            ids: of its samples.
            run: forward and backward of a stand-in, any good micro-batch. It is called where other
                processes need this one for theirs (FSDP2), and leaves nothing.
        """
        if self.sharding is not None and self.window.processes.size > 1:
            if run is None:
                raise ConfigError(
                    "the model's layers are sharded, and other processes wait for this one to"
                    " compute: pass refuse(..., run=...), forward and backward of any good batch"
                )
            with self._aside():
                run()
        self.window.refuse(detail, tuple(map(str, ids)))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Compute a forward and backward that leaves nothing in the run, for the sake of others.

        ConfigError if the trained parameters are sharded: it would leave something in the others'.
        """
        if self.sharding is not None and self.sharding.trained:
            raise ConfigError("of sharded parameters every micro-batch counts: call guard.refuse")
        with self._aside():
            yield

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._begin(1)
        try:
            with unsynchronised(self._model), self.draws.drawing((), 0):
                yield
        finally:
            self._withdraw()

    def step(self, fingerprint: int = 0) -> Any:
        """Make one optimizer step from the micro-batches since the last one, or none.

        Every process must call it equally often. If an error leaves it, the optimizer's own
        included, the window has not happened.

        Args:
            fingerprint: of the window's data, compared between processes, below 2^24.

        Returns:
            The window's `Outcome`; with `rates` a list of those that have become known.

        Raises:
            TooManyRefusalsError: `max_refused` in a row; the state is that of the last good step,
                and a loop that continues counts anew.
            ProcessError: another process is lost, or its state differs.
        """
        self._follow()
        with self._window_or_nothing():
            if self.lists:
                outcomes = self.window.commit(fingerprint)
            else:
                outcomes = [self._commit_at_once(fingerprint)]
        self._rewind(self.window.applied)  # of a window whose outcome comes late
        if self.settings.loss != "share":  # a Trainer does it when it begins a window
            share_buffers(self._model)
        outcomes = self._known(outcomes)
        return outcomes if self.lists else outcomes[0]

    def flush(self) -> list[Outcome]:
        """Wait for the windows whose outcomes are still on their way, and return these."""
        return self._known(self.window.flush())

    def close_window(self) -> float | None:
        """Let `.grad` be the window's gradient, clipped, until `step`; return its norm before."""
        with self._window_or_nothing():
            norm = self.window.close()
        return None if norm is None else float(norm)

    def begin_again(self) -> list[Refusal]:
        """Forget the open window and what its micro-batches drew, if one was refused.

        For losses that are shares of the window's, since the survivors' shares are now larger:
        compute these again. Every process must call it.

        Returns:
            The refusals of all processes, which the window's outcome will have too; without any,
            the window is unchanged, as it is if a loss scale is to blame for all.
        """
        refused = self.window.refused()
        here = [micro.refusal for micro in refused if micro.refusal is not None]
        refusals = [*chain(*self.window.processes.gather(here))]
        if self._scale.lost(refusals, self.window.place):
            return []
        if refusals:
            self.forensics.trace(refused)
            self.window.begin_again()
            self._rewind()
        return refusals

    def clear(self) -> None:
        """Forget the open window: its micro-batches have not happened."""
        self.window.clear()
        self._rewind()
        self._scale.forget()

    @property
    def findings(self) -> Sequence[Finding]:
        """All that were made, of as many refusals as `trace` says."""
        return self.forensics.findings

    def first_bad(self) -> str | None:
        """Return the name of a parameter or moment that is not finite, or None."""
        return self.update.first_bad()

    def state_dict(self) -> dict[str, Any]:
        """Return counts and the history of the spike guard; optimizer and scheduler have theirs."""
        spikes = None if self.window.spikes is None else self.window.spikes.remembered()
        return {"counts": asdict(self.counts), "spikes": spikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.counts = RunCounts(**state["counts"])
        self.window.committed = self.counts.windows
        self.window.resume_at(self.counts.steps)
        if self.window.spikes is not None and state["spikes"] is not None:
            self.window.spikes.recall(*state["spikes"])

    def close(self) -> None:
        """Release model and parameters: their gradients are None, their hooks gone."""
        self.window.gradients.close()
        if self.sharding is not None:
            self.sharding.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, weight: int) -> None:
        """Note what a micro-batch of this weight may change, and empty its gradients."""
        for trace in self._traces:
            trace.begin()
        self.window.gradients.withdraw()
        if self.sharding is not None:
            self.sharding.begin(weight)

    def _withdraw(self) -> None:
        for trace in self._traces:
            trace.settle(None)
        self.window.gradients.withdraw()

    def _follow(self) -> None:
        """Guard parameters too that have joined, from the next window on; with rates none do.

        Until then nothing has looked at their gradients, and they are not stepped.
        """
        now = set() if self.lists else stepped_parameters(self.update.optimizer)
        joined = now.difference(self.update.parameters)
        if joined and not self.window.place:
            self.window.hold(guarded_parameters(self._model, self.update.optimizer))
        else:
            for parameter in joined:
                parameter.grad = None

    @contextmanager
    def _window_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def _commit_at_once(self, fingerprint: int) -> Outcome:
        """Step, and what follows a step; if an error ends it, none of that has happened."""
        update, steps, outcome = self.update, self.window.known_steps, None
        index = self.window.committed
        owners = (self.counts, self.scheduler, self._scale, self._scale.scaler, self.window.spikes)
        followers = Holdings(
            [owner for owner in owners if owner is not None],
            without=[update.optimizer, *update.parameters],
        )
        try:
            (outcome,) = self.window.commit(fingerprint)
            excused = self._scale.update(outcome)
            if outcome.applied and self.scheduler is not None:
                self.scheduler.step()
            outcome.longest = self.counts.add(outcome, self.window.processes, excused)
            for trace in self._traces:
                (trace.forget if outcome.applied else trace.rewind)()
        except BaseException:
            if outcome is not None and outcome.update is not None:
                update.take_back(outcome.update)
            followers.restore()
            self.window.resume_at(steps)
            self.window.committed = index
            raise
        return outcome

    def _rewind(self, keep: Tensor | None = None) -> None:
        """Put random numbers and buffers back to before the window, unless `keep` is set."""
        for trace in self._traces:
            trace.rewind(keep)

    def _known(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Account for outcomes, whose refusals are traced now, in the state of their windows, and
        end a run with too many.
        """
        for outcome in outcomes:
            if outcome.halts:
                continue
            if self.lists:
                outcome.longest = self.counts.add(outcome, self.window.processes)
            if self.forensics.left and outcome.refused:
                names, parameters = self.update.names, self.update.parameters
                # of what is sharded nothing is computed again
                snapshot = (outcome.snapshot if self.sharding is None else None) or {}
                before = {n: value for n, (value, _) in snapshot.items()}
                with values_in(dict(zip(names, parameters, strict=True)), before):
                    self.forensics.trace(outcome.own)
            computed = [micro for micro in outcome.own if micro.grad_norm is not None]
            self.history += [{"window": outcome.index, **micro.as_dict()} for micro in computed]
            self.forensics.keep(outcome)
            self.refusals += [(self.counts.windows - 1, refusal) for refusal in outcome.refused]
            self.outcome, report = outcome, None
            if outcome.longest >= self.settings.max_refused:
                self.counts.in_a_row = 0  # for a loop that continues
                report = self._report_too_many(outcome)
            outcome.update = None  # a copy of all that was stepped, as the snapshot
            if not self.lists:
                outcome.snapshot = None
            if report is not None:
                raise TooManyRefusalsError(report)
        return outcomes

    def _report_too_many(self, outcome: Outcome) -> str:
        reason = (
            f"{outcome.longest} refusals in a row, the last of {outcome.refused[-1]}; look at"
            f" these samples, or raise max_refused (now {self.settings.max_refused})"
        )
        if self.settings.postmortem is None:
            return reason
        from npt.forensics.bundle import write_postmortem  # a run that ends well needs none of it

        step = outcome.steps - (outcome.applied and outcome.snapshot is not None)
        try:
            folder = write_postmortem(self.settings.postmortem, self, outcome, reason, step)
            written = str(folder)
        except Exception as error:  # the end of the run matters more
            written = f"could not be written: {type(error).__name__}: {error}"
        return f"{reason}; post-mortem: {written}"


def _scalar(loss: Any) -> Tensor:
    """Return a loss in fp32, which its sum over tokens needs, without its graph, which is large."""
    loss = torch.as_tensor(loss)
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss of a micro-batch has shape {tuple(loss.shape)}; assign one number to"
            " micro.loss, such as its mean"
        )
    return loss.detach().float().reshape(())

"""The guard: a transactional step for any model, optimizer and loop. Read this file first.

A window is the micro-batches of one optimizer step. A micro-batch that yields NaN or Inf is
refused, which means skipped: it changes nothing and is logged. The run then equals, bit for bit, a
run that never saw it. Its gradients are not added, its tokens do not count, the random numbers it
drew are drawn again, and the buffers it wrote to are restored. The other micro-batches survive; if
none does, neither optimizer nor scheduler steps. The loop itself keeps Python's and NumPy's random
state and its position in the data.

Each micro-batch gets its own gradients and counts only if they and its loss are finite
(`window.py`). Their sum is divided once by the survivors' tokens, checked and clipped. After the
step, the old state is restored if the new one is not finite (`update.py`). The result is an
`Outcome` (`outcome.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, cast, overload

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar  # comes with torch

from npt.device import card_error
from npt.distributed.processes import ProcessGroup, is_joined
from npt.errors import ConfigError, DataError, TooManyRefusalsError, let_go
from npt.guard.forensics import Finding, StoredMicroBatch, values_in
from npt.guard.mixed_precision import LossScale
from npt.guard.outcome import MicroBatch, Outcome, Refusal, RunCounts
from npt.guard.parallel import reshard, sharding_of, share_buffers, unsynchronised, whole
from npt.guard.parameters import guarded_parameters, stepped_parameters, unwrapped
from npt.guard.settings import GuardSettings
from npt.guard.spikes import SpikeGuard
from npt.guard.traces import Buffers, Draws, Seeded
from npt.guard.update import GuardedUpdate, Holdings
from npt.guard.watching import Forensics
from npt.guard.window import GradientWindow
from npt.stored import RESTORE, check_entries, shown

if TYPE_CHECKING:
    from npt.guard.recheck import Recheck

REMEMBERED = 256
"""The number of refusals, and of micro-batches with their figures, kept for a post-mortem."""

Result = TypeVar("Result", default=Outcome)


class Scheduler(Protocol):
    """A schedule of learning rates."""

    def step(self) -> object: ...


class Once:
    """In the place of a `Recheck`: every window is computed once."""

    def is_due(self) -> bool:
        return False

    def begin(self) -> None: ...

    def settle(self) -> list[str]:
        return []


class Guard(Generic[Result]):
    """A transactional optimizer step: a refused micro-batch changes nothing in the run.

    Args:
        model: the model that the optimizer trains; wrap several in an `nn.ModuleList`. Under
            DistributedDataParallel, gradients are summed in `step`, not in backward. Under FSDP2,
            every process must compute the same number of micro-batches. If trained parameters are
            sharded, micro-batches computed together count together or not at all.
        optimizer: any torch optimizer that reads dense gradients from `.grad`, or one prepared by
            accelerate. Parameters added to it later are guarded from the next window on.
        scheduler: steps after each applied step, without arguments (so no ReduceLROnPlateau).
        scaler: torch's GradScaler; the loop calls `scaler.scale(loss).backward()`.
        processes: the processes that share every window; default: all of torch.distributed.
        rates: the learning rate of each applied step, instead of a scheduler; the last one stays.
            Requires `draws`. Every parameter is then stepped, even one that no backward reached,
            and `step` returns a list of the outcomes known so far (a `PlannedGuard`).
        draws: `Seeded(seed)` seeds each micro-batch by its ids. By default torch's random numbers
            are used, and drawn again after a refusal.
        late: never wait for the GPU; outcomes arrive one or more windows later. Requires `rates`
            and a fused Adam or AdamW, and is the default for these on CUDA.
        settings: the fields of `GuardSettings`.

    Attributes:
        sharding: the layers that FSDP2 shards.
        outcome: the last window's outcome, also if `step` raised TooManyRefusalsError.
        refusals: the last refusals, each with the index of its window.
        history: loss and gradient norm of this process's last micro-batches, refused or not.

    Raises:
        ConfigError: a setting is invalid, or the optimizer cannot be guarded.
    """

    whole_norm = False
    """Whether to clip by the norm of all that requires a gradient in the model, stepped or not."""

    @overload
    def __init__(
        self: PlannedGuard,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        processes: ProcessGroup | None = None,
        rates: Sequence[float],
        draws: Seeded,
        late: bool | None = None,
        **settings: Any,
    ): ...

    @overload
    def __init__(
        self: Guard[Outcome],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        processes: ProcessGroup | None = None,
        **settings: Any,
    ): ...

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
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
                "rates=[...] and draws=Seeded(seed) must be passed together, and late=True needs"
                " both; remove scheduler and scaler, which cannot be combined with rates"
            )
        self.scheduler = scheduler
        self._model = model
        guarded = guarded_parameters(model, optimizer, self.whole_norm)
        # flags and figures live where the first parameter does
        self._home = next(iter(guarded.stepped.values())).device
        if processes is None:
            processes = ProcessGroup.of_torch(self._home) if is_joined() else ProcessGroup()
        self.sharding = sharding_of(model, guarded.held, processes)
        if self.sharding.trained and (self.lists or scaler is not None):
            raise ConfigError(
                "sharded parameters support neither rates=[...] nor a scaler: pass a scheduler and"
                " train in bf16 or fp32"
            )
        # a step with a scheduler or a scaler is read at once: both go by its outcome
        late = late if self.lists else False
        self.update = GuardedUpdate(guarded.stepped, optimizer, late)
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
            sharding=self.sharding,
            guarded=guarded,
        )
        self._scale = LossScale(scaler, optimizer)
        if scaler is not None:
            self.window.unscale = self._scale.unscale
        self.draws: Draws = Draws() if draws is None else draws
        self._buffers = Buffers(whole(model), self.update.reads)
        self._traces = self.draws, self._buffers  # what is undone besides gradients
        self.recheck = self._make_recheck() if self.settings.recheck else Once()
        self.forensics = Forensics(
            model,
            self.settings.trace,
            keep=self.settings.postmortem is not None,
            together=self.sharding.together,
            again=self.recheck.is_due,
        )
        self.counts = RunCounts()
        self.outcome: Outcome | None = None
        self.refusals: deque[tuple[int, Refusal]] = deque(maxlen=REMEMBERED)
        self.history: deque[dict[str, object]] = deque(maxlen=REMEMBERED)

    @contextmanager
    def micro_batch(
        self,
        tokens: int | None = None,
        ids: Sequence[object] = (),
        inputs: object = None,
        run: Callable[[], object] | None = None,
        *,
        offset: int = 0,
    ) -> Iterator[MicroBatch]:
        """Guard the forward and backward of one micro-batch, and yield it: assign its `loss`.

        Args:
            tokens: the number of tokens that the loss sums or averages over; default 1.
            ids: the ids of its samples, for refusals and seeded draws.
            inputs: the model's inputs; default: those of its calls. Do not overwrite them before
                the window's outcome is known.
            run: computes the loss again, with the same random numbers, for `trace`; default: the
                model's calls, which is enough if the model returns its loss.
            offset: the samples' position in the data; a repeated sample then draws other numbers.

        Raises:
            ConfigError: the loss is not one number, or `tokens` changed under sharding.
        """
        self._follow()
        self.recheck.begin()
        unset = torch.zeros((), device=self._home)
        micro = MicroBatch(unset, 1 if tokens is None else tokens)
        names = micro.sample_ids = tuple(map(str, ids))
        # under FSDP2 backward itself weights the gradients, before it sums them
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
            loss = _scalar(micro.loss)
            micro.loss = loss  # without its graph, which takes memory
            micro.report = micro.report.detach()
        except self.settings.refuse as error:
            kind = "data" if isinstance(error, DataError) else "error"
            # whether other processes, which wait for this one's layers, got all that they need
            judged = kind == "data" or micro.loss is not unset
            reached = any(p.grad is not None for p in self.window.gradients.parameters)
            self._withdraw()
            self.sharding.end_together(error, judged and reached)
            if card_error(self._home):
                raise
            let_go(error)
            self.window.refuse(f"{type(error).__name__}: {error}", names, kind, micro.stored)
            return
        except BaseException:
            self._withdraw()
            raise
        self.window.gradients.collect()
        if self.settings.loss == "mean":
            if not self.sharding.weighs:
                self.window.gradients.scale(micro.tokens)
            elif micro.tokens != self.sharding.weight:  # by which the backward has multiplied
                raise ConfigError(
                    f"the micro-batch began with tokens={self.sharding.weight} and now has"
                    f" {micro.tokens}; with sharded parameters pass micro_batch(tokens=...)"
                )
            loss = loss * micro.tokens
        # from here on the flag decides, on the device
        flag = self.window.add(micro, loss, self._buffers.spoilt(self._home))
        for trace in self._traces:
            trace.settle(flag)

    def _again(self, run: Callable[[], object], ids: Sequence[str], offset: int) -> object:
        with self.draws.drawing(ids, offset):
            return run()

    def refuse(
        self, detail: str, ids: Sequence[object] = (), run: Callable[[], object] | None = None
    ) -> None:
        """Refuse a micro-batch before anything is computed.

        Args:
            detail: what is wrong with it.
            ids: the ids of its samples.
            run: forward and backward of any good micro-batch. It is called only under FSDP2, where
                the other processes wait for this one, and changes nothing in the run.

        Raises:
            ConfigError: the layers are sharded over several processes, and `run` is missing.
        """
        if self.sharding.together:
            if run is None:
                raise ConfigError(
                    "the model's layers are sharded, and the other processes wait for this one:"
                    " pass refuse(..., run=...), the forward and backward of any good batch"
                )
            with self._aside():
                run()
        self.window.refuse(detail, tuple(map(str, ids)))

    def aside(self) -> AbstractContextManager[None]:
        """Compute a forward and backward that changes nothing, so that no other process waits.

        Raises:
            ConfigError: trained parameters are sharded; other processes' gradients would change.
        """
        if self.sharding.trained:
            raise ConfigError("guard.aside does not support sharded parameters: call guard.refuse")
        return self._aside()

    def _make_recheck(self) -> Recheck:
        from npt.guard.recheck import Recheck  # most runs need none

        return Recheck(
            self.window,
            self._model,
            self._buffers,
            self._scale,
            every=self.settings.recheck,
            weighted=self.settings.loss == "mean",
            together=self.sharding.together,
            seeded=isinstance(self.draws, Seeded),
        )

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._begin(1)
        try:
            with unsynchronised(self._model), self.draws.drawing((), 0):
                yield
        finally:
            self._withdraw()

    def step(self, fingerprint: int = 0) -> Result:
        """Close the window: make one optimizer step from its survivors, or none.

        Every process must call it equally often. If it raises, even from the optimizer, the window
        is undone.

        Args:
            fingerprint: a number below 2^24 for the window's data, compared between processes.

        Returns:
            The window's `Outcome`; with `rates`, a list of the outcomes known so far.

        Raises:
            TooManyRefusalsError: `max_refused` refusals in a row. The state is that of the last
                good step; if the loop continues, the count restarts at 0.
            ProcessError: another process is lost, or its data or state differs.
        """
        self._follow()
        with self._window_or_nothing():
            self.window.open.repaired += self.recheck.settle()
            if self.lists:
                outcomes = self.window.commit(fingerprint)
            else:
                outcomes = [self._commit_at_once(fingerprint)]
        self._rewind(self.window.applied)  # for a window whose outcome arrives late
        if self.settings.loss != "share":  # a Trainer shares them when a window begins
            share_buffers(self._model)
        outcomes = self._known(outcomes)
        result = outcomes if self.lists else outcomes[0]
        return cast(Result, result)

    def flush(self) -> list[Outcome]:
        """Wait for the outcomes that have not arrived, and return them."""
        return self._known(self.window.flush())

    def close_window(self) -> float | None:
        """Set `.grad` to the window's clipped gradient until `step`; return its unclipped norm."""
        with self._window_or_nothing():
            self.window.open.repaired += self.recheck.settle()
            norm = self.window.close()
        return None if norm is None else float(norm)

    def begin_again(self) -> list[Refusal]:
        """Clear the open window and undo its random draws if a micro-batch was refused.

        For `loss="share"`: after a refusal the survivors' shares are larger, so the caller computes
        them again. Every process must call it.

        Returns:
            The refusals of all processes, which the outcome will list too. If there are none, or
            the loss scale caused all of them, the list is empty and the window unchanged.
        """
        window = self.window
        refused = window.refused()
        here = [micro.refusal for micro in refused if micro.refusal is not None]
        everywhere = window.processes.gather(here)
        refusals = [*chain(*everywhere)]
        if self._scale.lost(refusals, window.place):
            return []
        if refusals:
            self.forensics.trace(refused)
            window.begin_again()
            self._rewind()
        return refusals

    def clear(self) -> None:
        """Discard the open window and undo its micro-batches."""
        self.window.clear()
        self._rewind()
        self._scale.forget()

    @property
    def findings(self) -> Sequence[Finding]:
        """The tracer's findings so far, for at most `trace` refusals."""
        return self.forensics.findings

    def first_bad(self) -> str | None:
        """Return the name of the first parameter or moment that is not finite, or None."""
        return self.update.first_bad()

    def state_dict(self) -> dict[str, object]:
        """Return the counts and the spike guard's history, without optimizer and scheduler."""
        spikes = None if self.window.spikes is None else self.window.spikes.remembered()
        return {"counts": asdict(self.counts), "spikes": spikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; ConfigError for anything else, changing nothing."""
        check_state(state)
        self.counts = RunCounts(**state["counts"])
        self.window.committed = self.counts.windows
        self.window.resume_at(self.counts.steps)
        if self.window.spikes is not None and state["spikes"] is not None:
            self.window.spikes.recall(*state["spikes"])

    def close(self) -> None:
        """Release the model: remove the hooks and set all gradients to None."""
        self.window.gradients.close()
        self.sharding.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, weight: int) -> None:
        for trace in self._traces:
            trace.begin()
        self.window.gradients.withdraw()
        self.sharding.begin(weight)

    def _withdraw(self) -> None:
        for trace in self._traces:
            trace.settle(None)
        self.window.gradients.withdraw()

    def _follow(self) -> None:
        """Guard parameters that were added to the optimizer, from the next window on. Until then
        they are not stepped. With `rates` none can be added.
        """
        if self.lists:
            return
        optimizer = self.update.optimizer
        now = stepped_parameters(optimizer)
        joined = now.keys() - map(id, self.update.parameters)
        if self.window.place:
            for key in joined:
                now[key].grad = None
        elif joined or self._norm_has_grown():
            guarded = guarded_parameters(self._model, optimizer, self.whole_norm)
            self.window.hold(guarded)

    def _norm_has_grown(self) -> bool:
        """Return whether a parameter that is not stepped has come to require a gradient."""
        if not self.whole_norm:
            return False
        reshard(self.sharding.modules)
        held = set(self.window.gradients.parameters)
        return any(p.requires_grad and p not in held for p in whole(self._model).parameters())

    @contextmanager
    def _window_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def _commit_at_once(self, fingerprint: int) -> Outcome:
        """Step, and update scheduler, loss scale and counts; on an error, undo all of it."""
        update = self.update
        outcome = None
        steps = self.window.known_steps
        index = self.window.committed
        # what follows the step; weights and moments have a copy of their own, in the update
        followers = Holdings(
            [self.counts, self.scheduler, self._scale, self._scale.scaler, self.window.spikes],
            without=[update.optimizer, *update.parameters],
        )
        try:
            (outcome,) = self.window.commit(fingerprint)
            excused = self._scale.update(outcome)
            if outcome.applied and self.scheduler is not None:
                self.scheduler.step()
            outcome.longest = self.counts.add(outcome, self.window.processes, excused)
            for trace in self._traces:
                if outcome.applied:
                    trace.forget()
                else:
                    trace.rewind()
        except BaseException:
            if outcome is not None and outcome.update is not None:
                update.take_back(outcome.update)
            followers.restore()
            self.window.resume_at(steps)
            self.window.committed = index
            raise
        return outcome

    def _rewind(self, keep: Tensor | None = None) -> None:
        for trace in self._traces:
            trace.rewind(keep)

    def _known(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Count outcomes, trace their refusals, and stop the run after too many refusals."""
        for outcome in outcomes:
            if outcome.halts:
                continue
            if self.lists:  # else the step has counted it, so that an error takes it back
                outcome.longest = self.counts.add(outcome, self.window.processes)
            self._remember(outcome)
            report = ""
            if outcome.longest >= self.settings.max_refused:
                self.counts.in_a_row = 0  # for a loop that continues
                report = self._report_too_many(outcome)
            outcome.update = None  # frees its copies
            if not self.lists:
                outcome.snapshot = None
            if report:
                raise TooManyRefusalsError(report)
        return outcomes

    def _remember(self, outcome: Outcome) -> None:
        """Trace an outcome's refusals, and keep what a post-mortem tells of it."""
        if self.forensics.left and outcome.refused:
            self._trace(outcome)
        computed = [micro for micro in outcome.own if micro.grad_norm is not None]
        self.history += [{"window": outcome.index, **micro.as_dict()} for micro in computed]
        self.forensics.keep(outcome)
        self.refusals += [(self.counts.windows - 1, refusal) for refusal in outcome.refused]
        self.outcome = outcome

    def _trace(self, outcome: Outcome) -> None:
        """Trace refused micro-batches with the parameters from before their step."""
        parameters = dict(zip(self.update.names, self.update.parameters, strict=True))
        snapshot = outcome.snapshot or {}
        if self.sharding.modules:  # its micro-batches are never computed again
            snapshot = {}
        before = {name: value for name, (value, _) in snapshot.items()}
        with values_in(parameters, before):
            self.forensics.trace(outcome.own)

    def _report_too_many(self, outcome: Outcome) -> str:
        reason = (
            f"{outcome.longest} refusals in a row, the last: {outcome.refused[-1]}; check these"
            f" samples, or raise max_refused (now {self.settings.max_refused})"
        )
        if self.settings.postmortem is None:
            return reason
        from npt.forensics.bundle import write_postmortem  # needed only here

        step = outcome.steps - (outcome.applied and outcome.snapshot is not None)
        try:
            folder = write_postmortem(self.settings.postmortem, self, outcome, reason, step)
        except Exception as error:  # must not hide why the run stopped
            failed = f"{type(error).__name__}: {error}"
            return f"{reason}; post-mortem: could not be written: {failed}"
        return f"{reason}; to find the cause, call npt.guard.replay({str(folder)!r}, model)"


PlannedGuard = Guard[list[Outcome]]
"""A guard that sets the rates itself: a step's outcome may arrive with a later one."""


def check_state(state: object) -> None:
    """Raise ConfigError if this is not what `Guard.state_dict` returns: it may come from a file."""
    where = Path("guard.load_state_dict(state)")
    if not isinstance(state, dict):
        raise ConfigError(f"{where}: state is {shown(state)}; pass what state_dict() returned")
    kinds = {"counts": (dict,), "spikes": (list, tuple, type(None))}
    check_entries(where, "", state, kinds, ConfigError)
    counts = dict.fromkeys(asdict(RunCounts()), (int,))
    check_entries(where, "counts.", state["counts"], counts, ConfigError)
    for name, count in state["counts"].items():
        if not 0 <= count < 2**53:
            raise ConfigError(f"{where}: counts.{name} is {count}, expected a count; {RESTORE}")
    history = state["spikes"]
    if history is not None and not (len(history) == 2 and all(map(_are_finite, history))):
        raise ConfigError(
            f"{where}: spikes is {shown(history)}, expected two lists of finite numbers; {RESTORE}"
        )


def _are_finite(numbers: object) -> bool:
    if not isinstance(numbers, list | tuple):
        return False
    return all(isinstance(each, int | float) and math.isfinite(each) for each in numbers)


def _scalar(loss: Tensor | float | None) -> Tensor:
    """Return a loss in fp32, for its sum over tokens, and without its graph, to free memory."""
    loss = torch.as_tensor(loss)
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss of a micro-batch has shape {tuple(loss.shape)}; assign one number to"
            " micro.loss, such as its mean"
        )
    return loss.detach().float().reshape(())

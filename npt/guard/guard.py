"""The guard: the transactional step of `npt.step` for any model, optimizer and loop.

What a refused micro-batch would have left is undone, so that the run equals, bit for bit, the one
that never saw it: its gradients lie in scratch and are not added, its tokens do not count, the
random numbers that it drew are drawn again, the buffers that it wrote to are put back. A window
without survivors steps neither optimizer nor scheduler. Python's and numpy's random state, and the
place in the data, are the loop's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, TooManyRefusalsError
from npt.guard.accelerated import unwrapped
from npt.guard.following import Counts, Following
from npt.guard.forensics import Finding, Forensics, Kept
from npt.guard.memory import Memory, memory_of
from npt.guard.mixed_precision import LossScale
from npt.guard.parallel import share_buffers, unsynchronised, whole
from npt.guard.parameters import Guarded, Trainable
from npt.guard.postmortem import Situation, tried_postmortem
from npt.guard.settings import GuardSettings
from npt.guard.traces import Buffers, Draws
from npt.step.gradient_window import GradientWindow
from npt.step.guarded_update import GuardedUpdate
from npt.step.shared_window import gathered
from npt.step.spikes import SpikeGuard
from npt.step.window_result import MicroBatchRecord, Refusal, WindowResult

REMEMBERED = 256
"""Refusals that are remembered for a post-mortem."""

Describe = Callable[[int], tuple[str, ...]]
"""Returns the `rows` of a refused micro-batch of this process, by its place in the window."""


@dataclass
class MicroBatch:
    """A micro-batch while it is computed.

    loss: scalar or number, told to the guard by assigning it: a loss can be NaN with gradients that
    are not.
    tokens: what it weighs. report: nothing; the window asks for it.
    """

    loss: Any
    tokens: int
    report: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a window.

    applied: the optimizer and the scheduler stepped; not if no parameter got a gradient. refused:
    by micro-batch; `micro_batch` is None if the window was refused as a whole. grad_norm: before
    clipping, None without survivors. loss: mean per token of the survivors (for `share` their sum),
    None without survivors; 0 if no loss was told. tokens: of the survivors, their number if none
    were given. steps: applied so far. findings: about this process's refused micro-batches that
    were traced.
    """

    applied: bool
    refused: tuple[Refusal, ...]
    grad_norm: float | None
    loss: float | None
    tokens: int
    steps: int
    findings: tuple[Finding, ...] = ()


class Guard:
    """Steps an optimizer with windows of micro-batches of which bad ones leave no trace.

    Args:
        trainable: the model, or parameters; those of the optimizer are guarded, under these names,
            and those that it comes to step as well. A model in DistributedDataParallel sums its
            gradients in the guard's step.
        optimizer: any of torch that takes dense gradients from `.grad`, or accelerate's form of it.
        scheduler: steps with every applied step; not one that must be told a figure.
        scaler: torch's GradScaler, whose `scale(loss).backward()` the loop calls.
        processes: that share every window; default all of torch.distributed.
        settings: those of `GuardSettings`.

    Attributes:
        outcome: of the last window, also of one that ended in TooManyRefusalsError.

    Raises:
        ConfigError: a setting, or an optimizer or scheduler that cannot be guarded.
    """

    whole_norm = False  # of all that requires a gradient in the model, stepped or not

    def __init__(
        self,
        trainable: Trainable,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        processes: ProcessGroup | None = None,
        **settings: Any,
    ):
        self.settings = GuardSettings(**settings)
        optimizer, found = unwrapped(optimizer, self.settings.loss == "share")
        scaler = found if scaler is None else scaler
        self.scheduler = _stepped_blindly(scheduler)
        self.counts = Counts()
        self._model = trainable if isinstance(trainable, nn.Module) else None
        guarded = self._guarded = Guarded(trainable, optimizer, self.whole_norm)
        self._home = next(iter(guarded.stepped.values())).device
        processes = _all_processes(self._home) if processes is None else processes
        sigmas = self.settings.spike_sigmas
        self._spikes = None if sigmas is None else SpikeGuard(sigmas)
        self.update = GuardedUpdate(
            guarded.stepped, optimizer, late=False, undo=self.settings.undo == "step"
        )
        self.window: GradientWindow[MicroBatch] = GradientWindow(
            self.update,
            self.settings.max_grad_norm,
            spikes=self._spikes,
            processes=processes,
            track=True,
            divisor=processes.size if self.settings.loss == "share" else None,
        )
        self.window.gradients.clipped = tuple(guarded.clipped)
        guarded.follow(self.window)
        self._scale = LossScale(scaler, optimizer)
        if scaler is not None:
            self.window.unscale = self._scale.unscale
        model = None if self._model is None else whole(self._model)
        if model is None and self.settings.trace:
            raise ConfigError("trace computes micro-batches again; give the guard the model")
        keep = self.settings.postmortem is not None
        self._forensics = Forensics(self._model, self.settings.trace, keep, self.settings.record)
        self._refusals: deque[tuple[int, Refusal]] = deque(maxlen=REMEMBERED)
        self._found: list[Finding] = []  # in the open window
        self.outcome: Outcome | None = None
        self._buffers = Buffers(model)
        self._draws = Draws()
        self._before: list[Tensor | None] | None = None  # buffers before the window
        self._aside: list[Refusal] = []  # of windows that began again

    @contextmanager
    def micro_batch(
        self,
        tokens: int | None = None,
        ids: Sequence[object] = (),
        inputs: Any = None,
        run: Callable[[], Any] | None = None,
    ) -> Iterator[MicroBatch]:
        """Guard the forward and backward of one micro-batch; assign the loss to what this yields.

        Args:
            tokens: over which the loss was summed or averaged; default 1.
            ids: of its samples, for refusals.
            inputs: of the model; default those of its calls. Overwrite none before `step`.
            run: computes the loss again, for `trace`; default the model's calls, which is enough
                if the model returns its loss.
        """
        self._guarded.follow(self.window)
        names = tuple(map(str, ids))
        micro = MicroBatch(torch.zeros((), device=self._home), 1 if tokens is None else tokens)
        before, buffers = self._draws.begin(), self._buffers.copy()
        if self._before is None:
            self._before = buffers
        with self._own_place():
            self.window.begin()
            try:
                kept = Kept(before, inputs, run)
                with unsynchronised(self._model), self._forensics.watching(self.window.place, kept):
                    yield micro
                micro.loss = _scalar(micro.loss)
            except BaseException as error:
                self._draws.undo(before)
                self._buffers.restore(buffers)
                self.window.gradients.withdraw()
                if not isinstance(error, self.settings.refuse):
                    raise
                self.window.refuse(f"{type(error).__name__}: {error}", names, kind="error")
                return
            flag = self._add(micro, names)
            self._buffers.restore(buffers, keep=flag)
            # what drew nothing need not wait for the device
            if self._draws.drew(before) and not bool(flag):
                self._draws.undo(before)
            self._draws.end()

    def step(self) -> Outcome:
        """Make one optimizer step from the micro-batches since the last one, or none.

        Every process must call it equally often. If an error leaves it, the optimizer's own
        included, the window has not happened; with undo="none" the step may have, in part.

        Raises:
            TooManyRefusalsError: `max_refused` in a row; the state is that of the last good step,
                and a loop that continues counts anew.
            ProcessError: another process is lost, or its state differs.
        """
        self._guarded.follow(self.window)
        if self.settings.trace:
            step = self.counts.windows + 1
            self._found += self._forensics.trace(self.window.open_refusals(), step)
        held = (self.counts, self.scheduler, self._scale, self._scale.scaler, self._spikes)
        with self._window_or_nothing(), Following(self.window, held) as following:
            (result,) = self.window.commit()
            following.update, own = result.update, result.refusals
            if not result.applied:
                self._rewind()
                largest, step = _largest(self.window, result), self.counts.windows + 1
                self._found += self._forensics.trace_window(own, largest, step)
            result.refusals = [*self._aside, *own]
            self._scale.update(result.applied, result.refusals)
            if result.applied and self.scheduler is not None:
                self.scheduler.step()
            longest = self.counts.add(result, self.window.processes)
        if not result.refusals:
            self._forensics.suspects.clear()
        self._forensics.settle(own)
        self._forget()
        if self.settings.loss != "share":  # a Trainer does it when it begins a window
            share_buffers(self._model)
        return self._outcome(result, longest)

    def close_window(self) -> float | None:
        """Let `.grad` be the window's gradient, clipped, until `step`; return its norm before."""
        with self._window_or_nothing():
            norm = self.window.close()
        return None if norm is None else float(norm)

    def begin_again(self, describe: Describe | None = None) -> list[Refusal]:
        """Forget the open window and what its micro-batches drew, if one was refused.

        For losses that are shares of the window's, since the survivors' shares are now larger:
        compute these again. Every process must call it. describe: gives `rows` to refusals.

        Returns:
            The refusals of all processes, which the window's outcome will have too; without any,
            the window is unchanged.
        """
        own = _described(self.window.open_refusals(), describe)
        refusals = gathered(own, Refusal, self.window.processes)
        if refusals:
            self._found += self._forensics.trace(own, self.counts.windows + 1)
            self._forensics.settle(own)
            self.window.clear()
            self._rewind()
            self._forget()
            self._aside = sorted([*self._aside, *refusals], key=lambda r: r.micro_batch or 0)
        return refusals

    def skip(self, micro_batches: int | None = None) -> None:
        """Count micro-batches that are not computed here; default one of every process."""
        for _ in range(self.window.processes.size if micro_batches is None else micro_batches):
            self.window.skip()

    @property
    def findings(self) -> Sequence[Finding]:
        """All that were made, of as many refusals as `trace` says."""
        return self._forensics.findings

    def memory(self) -> Memory:
        """Return the bytes that this guard needs, before its first step too."""
        return memory_of(self.window)

    def first_bad(self) -> str | None:
        """Return the name of a parameter or moment that is not finite, or None."""
        return self.update.first_bad()

    def state_dict(self) -> dict[str, Any]:
        """Return counts and the history of the spike guard; optimizer and scheduler have theirs."""
        spikes = None if self._spikes is None else self._spikes.remembered()
        return {"counts": asdict(self.counts), "spikes": spikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.counts = Counts(**state["counts"])
        self.window.committed = self.counts.windows
        self.window.resume_at(self.counts.steps)
        if self._spikes is not None and state["spikes"] is not None:
            self._spikes.recall(*state["spikes"])

    def close(self) -> None:
        """Release model and parameters: their gradients are None, their hooks gone."""
        self.window.gradients.close()
        self._forensics.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, micro: MicroBatch, ids: tuple[str, ...]) -> Tensor:
        """Add a micro-batch to the window; return whether it counts, a scalar bool."""
        self.window.gradients.collect()
        if self.settings.loss == "mean":
            self.window.gradients.scale(micro.tokens)
            micro.loss = micro.loss * micro.tokens
        return self.window.add(micro, ids)

    @contextmanager
    def _own_place(self) -> Iterator[None]:
        """Count the other processes' micro-batches around this one's."""
        processes, before = self.window.processes, self.window.place
        self.skip(processes.index)
        try:
            yield
        except BaseException:  # it has not happened
            self.window.place = before
            raise
        self.skip(processes.size - processes.index - 1)

    @contextmanager
    def _window_or_nothing(self) -> Iterator[None]:
        """Leave no trace of the open window if an error ends its step."""
        try:
            yield
        except BaseException:
            self._rewind()
            self._forget()
            self._aside, self._found = [], []
            self._scale.forget()
            raise

    def _rewind(self) -> None:
        """Put random numbers and buffers back to the window's beginning."""
        self._draws.rewind()
        if self._before is not None:
            self._buffers.restore(self._before)

    def _forget(self) -> None:
        self._draws.forget()
        self._forensics.forget()
        self._before = None

    def _outcome(self, result: WindowResult[MicroBatch], longest: int) -> Outcome:
        refused = tuple(result.refusals)
        self._refusals += [(self.counts.windows - 1, refusal) for refusal in refused]
        figures = (result.grad_norm, result.loss, result.tokens, result.steps)
        self.outcome = Outcome(result.applied, refused, *figures, tuple(self._found))
        self._aside, self._found = [], []
        if longest >= self.settings.max_refused:
            self.counts.in_a_row = 0  # for a loop that continues
            said = (
                f"{longest} refusals in a row, the last of {refused[-1]}; look at these samples, or"
                f" raise max_refused (now {self.settings.max_refused})"
            )
            raise TooManyRefusalsError(said + self._postmortem(result, said))
        return self.outcome

    def _postmortem(self, result: WindowResult[MicroBatch], reason: str) -> str:
        """Write it, if it is asked for; return what to say of it."""
        if self.settings.postmortem is None:
            return ""
        before = result.snapshot
        situation = Situation(
            reason=reason,
            step=result.steps - (result.applied and before is not None),
            process=self.window.processes.index,
            refusals=tuple(self._refusals),
            suspects=tuple(self._forensics.suspects),
            findings=self.findings,
            state=before or self.update.snapshot(),
            groups=self.update.groups(),
            settings=self.settings,
        )
        return f"; {tried_postmortem(self.settings.postmortem, situation)}"


def _all_processes(device: torch.device) -> ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ProcessGroup()
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), device)


def _described(refusals: list[Refusal], describe: Describe | None) -> list[Refusal]:
    if describe is None:
        return refusals
    return [
        r if r.micro_batch is None else replace(r, rows=describe(r.micro_batch)) for r in refusals
    ]


def _largest(
    window: GradientWindow[MicroBatch], result: WindowResult[MicroBatch]
) -> MicroBatchRecord | None:
    """Return this process's micro-batch with the largest gradient of those that counted."""
    own = (r for r in window.history if r.window == result.index)
    counted = [r for r in own if r.micro_batch in result.places]
    return max(counted, key=lambda r: r.grad_norm, default=None)


def _stepped_blindly(scheduler: Any) -> Any:
    """Return a scheduler whose step needs nothing to be told, or raise ConfigError."""
    # accelerate's form has torch's in it
    own = getattr(scheduler, "scheduler", scheduler)
    if isinstance(own, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a figure at each step, which a guard does not have; leave out"
            " scheduler= and call scheduler.step(loss) in the loop"
        )
    return scheduler


def _scalar(loss: Any) -> Tensor:
    """Return a loss in fp32, which its sum over tokens needs, without its graph, which is large.

    Raises:
        ConfigError: it is not one number.
    """
    if not isinstance(loss, Tensor | Real):
        raise ConfigError(f"the loss of a micro-batch is {loss!r}; assign one number to micro.loss")
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ConfigError(
            f"the loss of a micro-batch has shape {tuple(loss.shape)}; assign one number to"
            " micro.loss, such as its mean"
        )
    return torch.as_tensor(loss).detach().float().reshape(())

"""Compute some windows twice, to find what a faulty machine changes in silence.

A flipped bit in an activation, a gradient, a weight or a moment rarely makes a NaN; it makes a
wrong step. The same window computed again from the same state gives the same bits, so a difference
is a fault of the machine, and what two of three computations agree on is kept. Weights and moments
are compared with copies from the beginning of the window: an operation of torch counts its writes
(`_version`), a flipped bit does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError
from npt.guard.forensics import StoredMicroBatch, loss_in
from npt.guard.lists import same_bits
from npt.guard.mixed_precision import LossScale
from npt.guard.outcome import Judged, MicroBatch
from npt.guard.parallel import unsynchronised
from npt.guard.traces import Buffers, Copy
from npt.guard.update import Holdings
from npt.guard.window import GradientWindow
from npt.random_state import random_state, set_random_state

WITH_RUN = (
    "if the model does not return the whole loss, pass micro_batch(run=...), which computes it"
)


@dataclass
class Computed:
    """One computation of a window: what came of its micro-batches, their summed gradients, and the
    buffers and the random state after it.
    """

    judged: list[Judged]
    gradients: list[Tensor]
    buffers: list[Copy]
    random: Mapping[str, Tensor]

    def differing(self, other: Computed) -> list[int]:
        """Return the indices of the gradients that differ from another computation's."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return [place for place, (one, two) in enumerate(pairs) if not same_bits(one, two)]

    def counting(self) -> list[bool]:
        """Return which micro-batches count."""
        return [bool(judged.flag) for judged in self.judged]

    def equals(self, other: Computed) -> bool:
        """Return whether the same micro-batches count in both, with the same gradients."""
        return self.counting() == other.counting() and not self.differing(other)


class Recheck:
    """The windows of a guard that are computed twice.

    Args:
        window: the guard's window.
        model: the guarded model, perhaps in DistributedDataParallel.
        buffers: what its forward writes.
        scale: the loss scale of the guard's loop.
        every: one window in so many is computed twice.
        weighted: whether gradients are weighted by the micro-batches' tokens.
        together: whether processes compute only together, because layers are sharded.
        seeded: whether each micro-batch draws numbers of its own, whatever came before it.
    """

    def __init__(
        self,
        window: GradientWindow,
        model: nn.Module,
        buffers: Buffers,
        scale: LossScale,
        every: int,
        weighted: bool,
        together: bool,
        seeded: bool,
    ):
        self._window = window
        self._model = model
        self._buffers = buffers
        self._scale = scale
        self._every = every
        self._weighted = weighted
        self._together = together
        # those that compute together with this process
        self._processes = window.processes if together else ProcessGroup()
        self._seeded = seeded
        self._before: Holdings | None = None
        self._marks: list[tuple[int, int]] = []
        self._has_agreed = False  # a window gave the same twice, so the loss is computed as before

    def is_due(self) -> bool:
        """Whether the open window is one of those."""
        return self._window.committed % self._every == 0

    def begin(self) -> None:
        """Copy weights and moments before the first micro-batch of a window."""
        if self.is_due() and not self._window.place:
            self._before = self._window.update.holdings()
            self._marks = self._before.marks()

    def settle(self) -> list[str]:
        """Compute the window again, and keep what recurs. Return what was repaired, in words.

        Raises:
            ConfigError: the loss cannot be computed again.
        """
        if not self.is_due() or self._window.open.closed:
            return []
        faults = self._put_back()
        ran = self._window.open.ran
        if not self._can_run_again(len(ran)):
            return faults
        judged = [judgement for _, judgement in ran]
        kept = self._computed(judged, random_state())
        second = self._again(ran)
        (differing,) = self._processes.sums([not kept.equals(second)])
        if differing:
            kept, fault = self._of_three(ran, kept, second)
            faults.append(fault)
        else:
            self._has_agreed = True
        self._keep(kept, ran)
        return faults

    def _of_three(
        self, ran: Sequence[tuple[MicroBatch, Judged]], first: Computed, second: Computed
    ) -> tuple[Computed, str]:
        """Compute a third time. Return what two of three agree on, and the fault in words."""
        third = self._again(ran)
        fault = self._told(first.differing(second))
        if second.equals(third):
            # the first is the loop's own, which may compute the loss in another way
            if not self._has_agreed:
                raise ConfigError(f"recheck computes other gradients than the loop: {WITH_RUN}")
            return second, fault
        if not first.equals(third):
            fault += ", and a third time: the model does not compute the same bits twice, so"
            fault += " leave recheck at 0"
        return first, fault

    def _put_back(self) -> list[str]:
        """Restore weights and moments that changed without an operation, and tell of them."""
        before = self._before
        self._before = None
        if before is None:  # no micro-batch began
            return []
        return [
            f"{name} changed without an operation; its copy from before the window was put back"
            for name in self._window.update.put_back(before, self._marks)
        ]

    def _can_run_again(self, ran: int) -> bool:
        """Return whether there is something to compute again. Processes that compute together then
        need equally many micro-batches, so none may have been refused before its forward.
        """
        (computed,) = self._processes.sums([ran])
        return computed > 0 and (computed == self._window.place or not self._together)

    def _told(self, places: Sequence[int]) -> str:
        names = self._window.gradients.names
        if not places:
            return (
                "when the window was computed again, other micro-batches of it were finite, or the"
                " gradients of another process differed"
            )
        return (
            f"the gradient of {names[places[0]]} differed when the window was computed again"
            f" ({len(places)} of {len(names)} gradients)"
        )

    def _computed(self, judged: list[Judged], random: Mapping[str, Tensor]) -> Computed:
        gradients = [view.clone() for view in self._window.gradients.sum_views]
        return Computed(judged, gradients, self._buffers.now(), random)

    def _keep(self, computed: Computed, ran: Sequence[tuple[MicroBatch, Judged]]) -> None:
        for (micro, _), judged in zip(ran, computed.judged, strict=True):
            micro.judged = judged
        torch._foreach_copy_(self._window.gradients.sum_views, computed.gradients)
        self._buffers.put(computed.buffers)
        set_random_state(computed.random)

    def _again(self, ran: Sequence[tuple[MicroBatch, Judged]]) -> Computed:
        """Compute the micro-batches once more, from the state before the window.

        If one counts now that did not, those after it draw the numbers that follow its own.
        """
        gradients = self._window.gradients
        sharding = self._window.sharding
        gradients.clear()
        # if none counts, the sums are 0
        gradients.renew()
        self._buffers.put_start()
        random = random_state()
        follows = False
        judged = []
        for micro, was in ran:
            stored = micro.stored
            assert stored is not None
            gradients.withdraw()
            sharding.begin(micro.tokens if self._weighted else 1)
            self._buffers.begin()
            if not follows:
                set_random_state(stored.random)
            state = random_state()
            loss = self._backward(stored)
            gradients.collect()
            if self._weighted:
                loss = loss * micro.tokens
                # under FSDP2 the backward has weighted them
                if not sharding.weighs:
                    gradients.scale(micro.tokens)
            judged.append(self._window.judge(loss, self._buffers.spoilt(loss.device)))
            if not bool(judged[-1].flag):
                self._buffers.settle(None)
                set_random_state(state)
            elif not bool(was.flag):
                follows = not self._seeded
        return self._computed(judged, random_state() if follows else random)

    def _backward(self, stored: StoredMicroBatch) -> Tensor:
        """Return the loss; compute its gradients, unless `run` has computed them as well."""
        with unsynchronised(self._model):
            loss = loss_in(stored.compute())
            if loss is None:
                raise ConfigError(f"recheck computes the loss again: {WITH_RUN}")
            parameters = self._window.gradients.parameters
            has_gradients = any(p.grad is not None for p in parameters)
            if not has_gradients:
                self._scale.scaled(loss).backward()
        result: Tensor = loss.detach()
        return result

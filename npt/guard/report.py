"""`Report`: what a run loses, said by a callback that changes nothing.

For Trainers that a guard cannot be put into, such as those of DeepSpeed, and for a first look at
any other. Losses, gradients and weights are looked at on the device. The host reads one tensor of
flags a step, before the optimizer's own step: a bad batch is traced with the weights that it met.
There a Trainer whose `logging_nan_inf_filter` is on, as by default, has waited for the loss. What
the step made of the weights is read with it one step late, or when the Trainer logs.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from npt.guard.forensics import Finding, Forensics, Hook, StoredMicroBatch, loss_in
from npt.guard.outcome import MicroBatch, Refusal
from npt.guard.parameters import plain_name, whole
from npt.guard.update import norms_of

SAID = 5
"""Steps with the same loss that are told of one by one; the end of training counts all."""

_BY = "the step was skipped by"
_SCALER = f"{_BY} the GradScaler, as it does until its scale fits"

_log = logging.getLogger("npt.guard")


@dataclass
class _Stepped:
    """The weights that an optimizer's step left, still on the device.

    Attributes:
        step: its number.
        names: of the weights.
        finite: [P] of each.
        bits: [P] sums of their bits.
        unmoved: scalar bool, that none changed.
        scaled: by a GradScaler, which does not tell of a fused optimizer's step that it skipped.
    """

    step: int = 0
    names: list[str] = field(default_factory=list)
    finite: Tensor | None = None
    bits: Tensor | None = None
    unmoved: Tensor | None = None
    scaled: bool = False


class Report(TrainerCallback):
    """Says, for any Trainer, that a step was skipped, or that a loss, a gradient, a weight or a
    figure of the log is not finite, also where the Trainer shows a clean curve.

    Weights, random numbers and logs are those of the run without it. Lines are warnings of the
    logger `npt.guard`; every process tells of its own.

    Args:
        trace: batches of which the tracer names the operation; not where a single process cannot
            compute alone.

    Attributes:
        counts: steps by what was lost: `loss`, `gradient`, `weight`, `skipped`, `unmoved` and, of
            entries, `logged`.
        findings: of the tracer.
    """

    def __init__(self, trace: int = 1):
        self.counts: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self._left, self._steps = trace, 0
        self._stack = ExitStack()  # hooks of a training
        self._watched = ExitStack()  # that of a micro-batch
        self._forensics: Forensics | None = None
        self._window: list[MicroBatch] = []
        self._stepped = _Stepped()
        self._skipped: float | None = None  # steps, by DeepSpeed's engine
        self._moves = False  # the rate is above 0
        self._several = False  # processes
        self._hidden = 0  # losses since the last entry of the log

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Put hooks on the model."""
        self._stop()  # a training that ended in an error
        self.counts.clear()
        self._steps, self._stepped, self._window = 0, _Stepped(), []
        self._skipped = getattr(model, "skipped_steps", None)
        self._several = getattr(args, "world_size", 1) > 1
        self._forensics = Forensics(model, self._left)
        hook = whole(model).register_forward_hook(Hook(self._look), with_kwargs=True)
        self._stack.callback(hook.remove)
        self._look_at_weights(model, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the first micro-batch of a step."""
        groups = getattr(kwargs.get("optimizer"), "param_groups", [])
        rates = [group["lr"] for group in groups]
        self._moves = any(isinstance(rate, Tensor) or rate > 0 for rate in rates)
        self._window = []
        self._begin()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the next micro-batch."""
        self._begin()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Read the flags of the step's losses and gradients, and of the last step's weights."""
        self._watched.close()
        self._steps += 1
        step, optimizer = state.global_step + 1, kwargs.get("optimizer")
        gradients = {n: _local(p.grad) for n, p in _trained(model) if p.grad is not None}
        gradients = {name: grad for name, grad in gradients.items() if grad.numel()}
        told = [(micro, micro.flag) for micro in self._window if micro.flag is not None]
        flags = [flag for _, flag in told]
        if gradients:
            flags += norms_of([*gradients.values()], math.inf).isfinite().unbind()
        finite = self._read(flags)
        losses = [micro for (micro, _), good in zip(told, finite, strict=False) if not good]
        bad = [n for n, good in zip(gradients, finite[len(told) :], strict=True) if not good]
        if losses:
            self._hidden += len(losses)
            index = next(i for i, micro in enumerate(self._window) if micro is losses[0])
            detail = f"the loss of micro-batch {index} is not finite"
            hides = " (logging_nan_inf_filter keeps it out of the log)"
            self._say("loss", step, detail + hides * args.logging_nan_inf_filter)
        if bad:
            many = f"{len(bad)} of {len(gradients)} gradients are not finite, the first of {bad[0]}"
            self._say("gradient", step, many)
        scaled = getattr(optimizer, "scaler", None) is not None  # it looks for its scale so
        if (losses or (bad and not scaled)) and self._left and not self.counts["weight"]:
            self._trace(losses or self._window, step, model, optimizer)
        self._window = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Say that the step was skipped, and look at what it left, to be read later."""
        optimizer = kwargs.get("optimizer")
        engines = getattr(model, "skipped_steps", None)  # of DeepSpeed's engine
        more = engines is not None and self._skipped is not None and engines > self._skipped
        skipped = more or bool(getattr(optimizer, "step_was_skipped", False))
        self._skipped = engines
        scaled = getattr(optimizer, "scaler", None) is not None
        if skipped:
            by = "DeepSpeed" if _of_deepspeed(optimizer) or more else "the optimizer"
            self._say("skipped", state.global_step, _SCALER if scaled else f"{_BY} {by}")
        self._look_at_weights(model, state.global_step, self._moves and not skipped)
        self._stepped.scaled = scaled

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Say what the log has that is not finite, and what it does not show."""
        numbers = {name: value for name, value in logs.items() if isinstance(value, float)}
        bad = [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if bad:
            self._say("logged", state.global_step, f"the log has {', '.join(bad)}")
        loss = numbers.get("loss", math.nan)
        if self._hidden and math.isfinite(loss):
            detail = f"the log has loss {loss}, without {self._hidden} that are not finite"
            self._say("logged", state.global_step, detail)
        self._hidden = 0
        self._read([])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how many steps lost something, and take the hooks away."""
        self._read([])
        self._stop()
        lost = ", ".join(f"{kind} {number}" for kind, number in self.counts.items())
        text = f"{self._steps} steps, of which were lost: {lost}" if lost else "nothing was lost"
        _log.log(logging.WARNING if lost else logging.INFO, "report: %s", text)

    def _begin(self) -> None:
        """Watch the next micro-batch."""
        self._watched.close()
        micro = MicroBatch(None, 1)
        self._window.append(micro)
        if self._forensics is not None:
            self._watched.enter_context(self._forensics.watching(micro, StoredMicroBatch()))

    def _stop(self) -> None:
        self._watched.close()
        self._stack.close()
        self._forensics = None

    def _look(self, _arguments: Any, _named: Any, output: Any) -> None:
        """Note whether a loss of the model is finite, on its device."""
        loss = loss_in(output)
        if loss is None or not self._window or not torch.is_grad_enabled():
            return
        micro, good = self._window[-1], loss.detach().isfinite().all()
        micro.flag = good if micro.flag is None else micro.flag & good

    def _look_at_weights(self, model: nn.Module, step: int, moves: bool = False) -> None:
        """Look at the weights on their device, and whether they changed if a step `moves` them."""
        weights = {name: _local(p.detach()) for name, p in _trained(model)}
        weights = {name: weight for name, weight in weights.items() if weight.numel()}
        earlier, stepped = self._stepped, _Stepped(step, [*weights])
        if weights:
            stepped.finite = norms_of([*weights.values()], math.inf).isfinite()
            stepped.bits = torch.stack(
                [_bits(w).to(stepped.finite.device) for w in weights.values()]
            )
            if moves and earlier.bits is not None and earlier.names == stepped.names:
                stepped.unmoved = (stepped.bits == earlier.bits).all()
        self._stepped = stepped

    def _read(self, flags: list[Tensor]) -> list[bool]:
        """Read flags from the device, and with them those of the last step's weights."""
        stepped = self._stepped
        late = [] if stepped.finite is None else [*stepped.finite.unbind()]
        moved = [] if stepped.unmoved is None else [~stepped.unmoved]
        every = [*flags, *late, *moved]
        if not every:
            return []
        home = every[0].device
        values = torch.stack([flag.to(home) for flag in every]).tolist()
        stepped.finite = stepped.unmoved = None
        rest = values[len(flags) :]
        bad = [n for n, good in zip(stepped.names, rest[: len(late)], strict=False) if not good]
        if bad:
            detail = (
                f"{bad[0]} is not finite ({len(bad)} of {len(late)} weights): the model is lost"
            )
            self._say("weight", stepped.step, f"{detail}; go back to an earlier checkpoint")
        if moved and not rest[-1] and not bad:
            kind = "skipped" if stepped.scaled else "unmoved"
            self._say(kind, stepped.step, _SCALER if stepped.scaled else "no weight was changed")
        return values[: len(flags)]

    def _trace(
        self, suspects: list[MicroBatch], step: int, model: nn.Module, optimizer: Any
    ) -> None:
        """Compute suspects again under the tracer until one is found guilty; nothing is changed."""
        assert self._forensics is not None
        self._left -= 1
        reason = _cannot_trace(model)
        weights = [_local(p.detach()) for _, p in _trained(model) if p.numel()]
        if not reason and weights and not bool(norms_of(weights, math.inf).isfinite().all()):
            reason = "its weights are not finite any more"
        if reason:
            _log.warning("step %d: the batch is not traced: %s", step, reason)
            return
        # DeepSpeed's hooks would sum the gradients of a backward
        forward_only = torch.no_grad() if _of_deepspeed(optimizer) else nullcontext()
        window, self._window = self._window, []  # what is computed now is no part of the step
        for micro in suspects:
            index = next(i for i, each in enumerate(window) if each is micro)
            micro.refusal = Refusal("report", "not finite", index)
            self._forensics.left = 1
            with forward_only:
                self._forensics.trace([micro])
            if micro.finding is None or micro.finding.verdict is not None:
                break
        self._forensics.left = self._left
        findings = [micro.finding for micro in suspects if micro.finding is not None]
        self.findings += findings[-1:]
        for finding in findings[-1:]:
            place, told = finding.refusal.micro_batch, finding.told
            if finding.verdict is None and self._several:
                told = "this process's own batches are finite; look at what the others say"
            _log.warning("step %d: micro-batch %s traced: %s", step, place, told)

    def _say(self, kind: str, step: int, detail: str) -> None:
        """Count, and tell of the first; of nothing more once the weights are lost."""
        lost = self.counts["weight"] > 0
        self.counts[kind] += 1
        if self.counts[kind] <= SAID and not lost:
            _log.warning("step %d: %s", step, detail)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad)


def _local(tensor: Any) -> Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits: equal only if nothing changed, but for a rare chance."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()]).sum(dtype=torch.int64)


def _of_deepspeed(optimizer: Any) -> bool:
    return any("DeepSpeed" in kind.__name__ for kind in type(optimizer).__mro__)


def _cannot_trace(model: nn.Module) -> str:
    """Return why a process cannot compute a pass alone; empty if it can."""
    sharded = any(hasattr(p, "to_local") or hasattr(p, "ds_id") for p in model.parameters())
    wrapped = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    return "its parameters are sharded over processes" if sharded or wrapped else ""

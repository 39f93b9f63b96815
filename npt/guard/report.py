"""`Report`: a callback that logs what a run loses and changes nothing.

Use it with Trainers that cannot be guarded, such as DeepSpeed's, or for a first look at any run.
The host reads one tensor of flags per step, before the optimizer steps, so that a bad batch is
traced with the weights it met. Weights are checked one step late, or when the Trainer logs.

The loss is what the Trainer's `compute_loss` returns, which may be computed outside the model. No
callback gets it, so the method is wrapped while the Trainer trains.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from npt.guard.forensics import Finding, StoredMicroBatch, loss_in
from npt.guard.lists import bits_of, norms_of
from npt.guard.outcome import MicroBatch, Refusal
from npt.guard.parallel import is_of_fsdp1, is_sharded, local, whole
from npt.guard.parameters import plain_name
from npt.guard.trainer_window import uncounted
from npt.guard.watching import Forensics, Hook
from npt.random_state import random_state

if TYPE_CHECKING:
    from transformers.trainer import Trainer
    from transformers.trainer_callback import TrainerState
    from transformers.training_args import TrainingArguments

SAID = 5
"""How many events of each kind are logged one by one; the end of training counts all."""

SKIPPED = (
    "no weight changed: a GradScaler, DeepSpeed or the optimizer skipped the step, or its update is"
    " below the weights' precision"
)

LossAndOutputs = Tensor | tuple[Tensor, object]
"""What `compute_loss` returns: the loss, alone or with the model's outputs."""

_log = logging.getLogger("npt.guard")


@dataclass
class _Look:
    """Flags [P], False if lost. `text` gets the first lost name and the numbers of lost and all."""

    kind: str
    step: int
    names: Sequence[str]
    flags: Tensor
    text: str


@dataclass
class _Computed(MicroBatch):
    """A micro-batch of the Trainer, and whether the losses of its model's calls are finite."""

    good: list[Tensor] = field(default_factory=list)


class Report(TrainerCallback):
    """Log skipped steps and any loss, gradient, weight or logged figure that is not finite, even
    where the Trainer's curve looks clean.

    Works with any Trainer. Weights, random numbers and logs equal those of a run without it. Each
    process logs its own warnings to the logger `npt.guard`.

    Args:
        trace: how many bad batches to trace to the operation that made the NaN. Models that one
            process cannot compute alone are not traced.

    Attributes:
        counts: the number of steps that lost a `loss`, `gradient` or `weight`, or were `skipped`,
            and of log entries that hide or show a non-finite figure (`logged`).
        findings: the tracer's findings.
    """

    def __init__(self, trace: int = 1):
        self.counts: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self._left = trace
        self._stack = ExitStack()  # hooks for the whole training
        self._watched = ExitStack()  # hook for one micro-batch
        self._forensics: Forensics | None = None
        self._forget()

    def _forget(self) -> None:
        self._steps = 0
        self._window: list[_Computed] = []
        self._late: list[_Look] = []  # at the weights after the last step
        self._names: list[str] = []  # of the weights
        self._bits = torch.zeros(0)  # sums of their bits, to notice skipped steps
        self._moves = False  # the learning rate is above 0
        self._hidden = 0  # non-finite losses since the last log entry

    def on_train_begin(
        self, args: object, state: TrainerState, control: object, **kwargs: Any
    ) -> None:
        """Put hooks on the model."""
        self._stop()  # in case the last training ended in an error
        model: nn.Module = kwargs["model"]
        self._forget()
        self.counts.clear()
        self._forensics = Forensics(model, self._left)
        watched = whole(model)
        look = Hook(self._look)
        handle = watched.register_forward_hook(look, with_kwargs=True)
        self._stack.callback(handle.remove)
        trainer = self._trainer()
        if trainer is not None:
            self._wrap(trainer, watched)
        self._look_at_weights(model, state.global_step)

    def on_step_begin(self, *_: object, **kwargs: object) -> None:
        """Begin the first micro-batch of a step."""
        rates = [group["lr"] for group in getattr(kwargs.get("optimizer"), "param_groups", [])]
        self._moves = any(isinstance(rate, Tensor) or rate > 0 for rate in rates)
        self._window = []
        self._begin()

    def on_substep_end(self, *_: object, **kwargs: object) -> None:
        """Begin the next micro-batch."""
        self._begin()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any
    ) -> None:
        """Read the flags of the step's losses and gradients, and of the last step's weights."""
        self._watched.close()
        model: nn.Module = kwargs["model"]
        self._steps += 1
        step = state.global_step + 1
        computed = {f"{i}": micro for i, micro in enumerate(self._window) if micro.good}
        text = "the loss of micro-batch {0} is not finite"
        if args.logging_nan_inf_filter:
            text += " (logging_nan_inf_filter keeps it out of the log)"
        gradients = {name: p.grad for name, p in _trained(model).items() if p.grad is not None}
        # one wait for all flags, those of the last step's weights among them
        losses, bad = self._read(
            _Look("loss", step, [*computed], _all_of(computed.values()), text),
            _finite("gradient", step, gradients, "the gradient of {0} is not finite ({1} of {2})"),
        )
        self._hidden += len(losses)
        optimizer = kwargs.get("optimizer")
        expected = getattr(optimizer, "scaler", None) is not None  # overflows of gradients
        # once the weights are lost, every loss is, and a trace says nothing new
        to_trace = losses or (bad and not expected)
        if to_trace and self._left and not self.counts["weight"]:
            suspects = [computed[name] for name in losses] or self._window
            self._trace(suspects, step, args, model, optimizer)
        self._window = []

    def on_step_end(
        self, args: object, state: TrainerState, control: object, **kwargs: Any
    ) -> None:
        """Check the weights after the step; the flags are read later."""
        self._look_at_weights(kwargs["model"], state.global_step)

    def on_log(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        """Warn of non-finite figures that the log shows, and of those that it hides."""
        logs: Mapping[str, object] = kwargs["logs"]
        numbers = {name: value for name, value in logs.items() if isinstance(value, float)}
        bad = [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if bad:
            self._say("logged", state.global_step, f"the log shows {', '.join(bad)}")
        loss = numbers.get("loss", math.nan)
        if self._hidden and math.isfinite(loss):
            detail = f"the log shows loss {loss} and hides non-finite losses: {self._hidden}"
            self._say("logged", state.global_step, detail)
        self._hidden = 0
        self._read()

    def on_train_end(self, *_: object, **kwargs: object) -> None:
        """Log how many steps lost something, and remove the hooks."""
        self._read()
        self._stop()
        lost = ", ".join(f"{kind} {number}" for kind, number in self.counts.items())
        text = f"faults during {self._steps} steps: {lost}" if lost else "nothing was lost"
        _log.log(logging.WARNING if lost else logging.INFO, "report: %s", text)

    def _begin(self) -> None:
        self._watched.close()
        self._window.append(micro := _Computed(None, 1))
        if self._forensics is not None:
            self._watched.enter_context(self._forensics.watching(micro, StoredMicroBatch()))

    def _stop(self) -> None:
        self._watched.close()
        self._stack.close()
        self._forensics = None

    def _trainer(self) -> Trainer | None:
        """Return the Trainer whose method calls this callback; None if it is called by hand."""
        frame = sys._getframe()
        while (up := frame.f_back) is not None:
            frame = up
            caller = frame.f_locals.get("self")
            if self in getattr(getattr(caller, "callback_handler", None), "callbacks", ()):
                return caller
        return None

    def _wrap(self, trainer: Trainer, model: nn.Module) -> None:
        """Look at what `compute_loss` returns, and note how to compute it again."""
        compute: Callable[..., LossAndOutputs] = trainer.compute_loss

        @wraps(compute)
        def watched(
            given: nn.Module, inputs: object, *arguments: object, **named: object
        ) -> LossAndOutputs:
            if not self._window or not torch.is_grad_enabled():
                return compute(given, inputs, *arguments, **named)
            micro = self._window[-1]
            kept = copy(inputs)  # the Trainer takes the labels out

            def again() -> Tensor:
                with uncounted(trainer), trainer.compute_loss_context_manager():
                    return _loss(compute(model, copy(kept), *arguments, **named))

            if micro.stored is not None:
                micro.stored.inputs = kept
                micro.stored.random = random_state()
                micro.stored.run = again
            result = compute(given, inputs, *arguments, **named)
            # replaces that of the model's own loss, which the Trainer may not have used
            micro.good = [_loss(result).detach().isfinite().all()]
            return result

        if "compute_loss" in vars(trainer):
            self._stack.callback(vars(trainer).update, compute_loss=compute)
        else:
            self._stack.callback(delattr, trainer, "compute_loss")
        vars(trainer)["compute_loss"] = watched

    def _look(self, _arguments: object, _named: object, output: object) -> None:
        loss = loss_in(output)
        if loss is not None and self._window and torch.is_grad_enabled():
            # several under nn.DataParallel, each on its device
            self._window[-1].good.append(loss.detach().isfinite().all())

    def _look_at_weights(self, model: nn.Module, step: int) -> None:
        weights = {name: p.detach() for name, p in _trained(model).items()}
        text = "{0} is not finite ({1} of {2} weights), so the model is lost; go back to an earlier"
        self._late.append(_finite("weight", step, weights, text + " checkpoint"))
        names = [*weights]
        bits = _bit_sums([*weights.values()])
        if self._moves and names and names == self._names:
            changed = (bits != self._bits).any()
            self._late.append(_Look("skipped", step, [""], changed, SKIPPED))
        self._names = names
        self._bits = bits

    def _read(self, *now: _Look) -> list[list[str]]:
        """Read these flags and the late ones, and log what is lost; return the names for `now`."""
        looks = [*self._late, *now]
        self._late = []
        lost: list[list[str]] = []
        for look, flags in zip(looks, _on_host([look.flags for look in looks]), strict=True):
            names = [name for name, flag in zip(look.names, flags, strict=True) if not flag]
            if names:
                detail = look.text.format(names[0], len(names), len(look.names))
                self._say(look.kind, look.step, detail)
            lost.append(names)
        return lost[len(lost) - len(now) :]

    def _trace(
        self,
        suspects: Sequence[MicroBatch],
        step: int,
        args: TrainingArguments,
        model: nn.Module,
        optimizer: object,
    ) -> None:
        """Compute suspects again under the tracer until it finds the operation. Changes nothing."""
        assert self._forensics is not None
        self._left -= 1
        if reason := _cannot_trace(model):
            _log.warning("step %d: the batch is not traced: %s", step, reason)
            return
        # DeepSpeed's hooks would sum a backward's gradients
        of_deepspeed = any("DeepSpeed" in kind.__name__ for kind in type(optimizer).__mro__)
        window = self._window
        self._window = []  # these forwards are not part of the step
        finding: Finding | None = None
        for micro in suspects:
            index = next(i for i, each in enumerate(window) if each is micro)
            micro.refusal = Refusal("report", "not finite", index)
            self._forensics.left = 1
            with torch.no_grad() if of_deepspeed else nullcontext():
                self._forensics.trace([micro])
            finding = micro.finding or finding
            if finding is not None and finding.verdict is not None:
                break
        if finding is not None:
            self.findings.append(finding)
            told = finding.told
            if finding.verdict is None and getattr(args, "world_size", 1) > 1:
                told = "this process's batches are finite; see the warnings of the other processes"
            place = finding.refusal.micro_batch
            _log.warning("step %d: micro-batch %s traced: %s", step, place, told)

    def _say(self, kind: str, step: int, detail: str) -> None:
        lost = self.counts["weight"] > 0
        self.counts[kind] += 1
        if self.counts[kind] <= SAID and not lost:
            _log.warning("step %d: %s", step, detail)


def _on_host(flags: Sequence[Tensor]) -> list[list[bool]]:
    """Return flags as numbers; the host waits once for all."""
    sizes = [each.numel() for each in flags]
    return [part.tolist() for part in _joined(flags).cpu().split(sizes)]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return flags or numbers from several devices on the first's, [all]."""
    home = next((each.device for each in tensors if each.numel()), torch.device("cpu"))
    none = torch.zeros(0, dtype=torch.bool, device=home)
    return torch.cat([none, *(each.to(home).flatten() for each in tensors)])


def _all_of(computed: Collection[_Computed]) -> Tensor:
    """Return for each micro-batch whether all its flags are set, [n]."""
    return _joined([_joined(micro.good).all() for micro in computed])


def _bit_sums(weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of each weight's bits, [P]: equal sums mean that nothing changed, almost
    surely.
    """
    each = bits_of([local(weight) for weight in weights])
    return _joined([bits.sum(dtype=torch.int64) for bits in each])


def _loss(result: LossAndOutputs) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    named = ((plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: p for name, p in named if local(p).numel()}


def _finite(kind: str, step: int, tensors: Mapping[str, Tensor], text: str) -> _Look:
    parts = [local(tensor) for tensor in tensors.values()]
    flags = norms_of(parts, math.inf).isfinite() if parts else torch.ones(0)
    return _Look(kind, step, [*tensors], flags, text)


def _cannot_trace(model: nn.Module) -> str:
    sharded = any(is_sharded(p) or hasattr(p, "ds_id") for p in model.parameters())
    if sharded or is_of_fsdp1(model):
        return "its parameters are sharded over processes"
    weights = [p.detach() for p in _trained(model).values()]
    good = not weights or bool(norms_of(weights, math.inf).isfinite().all())
    return "" if good else "its weights are no longer finite"

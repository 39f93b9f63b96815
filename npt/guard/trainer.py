"""A guard for transformers' Trainer and its subclasses.

Before backward, the Trainer divides each loss by the tokens, or the number of micro-batches, of the
whole window. If a micro-batch is refused, the losses of the others are too small for what is left.
So the survivors are computed again with the right divisor, and with the random numbers of a window
without the refused one. The step then equals, bit for bit, that of a Trainer that never saw it. A
window without refusals is computed once.

`global_step` is also the position in the data, so it counts a window that was refused as a whole,
as after an fp16 overflow. Optimizer and scheduler do not step.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from npt.errors import ConfigError, DataError, TooManyRefusalsError
from npt.guard import generations
from npt.guard.generations import Generations
from npt.guard.guard import Guard
from npt.guard.ids import IGNORED, refuse_bad_ids
from npt.guard.outcome import Outcome
from npt.guard.parameters import share_buffers, whole
from npt.guard.refusal import UNGUARDED, Refusal
from npt.guard.settings import GuardSettings

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # importing the mixin does not import transformers

# attributes that TRL changes in each forward
_COUNTED = ("_metrics", "_stored_metrics", "_total_train_tokens", *generations.COUNTED)
_GATHERING = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")

_log = logging.getLogger("npt.guard")


class TrainerGuard(Guard):
    """Clip by the norm of the whole model, as a Trainer does, whatever the optimizer steps."""

    whole_norm = True


class TrainerMixin(Trainer):
    """A guard for a Trainer class: `class Safe(TrainerMixin, Trainer)`. Put it first.

    Attributes:
        guard_settings: fields of `GuardSettings`, except `loss` and `max_grad_norm`, which the
            Trainer decides. By default `trace` is 1 and `postmortem` is in the output folder.
        guard: the guard; None until training begins.
    """

    guard_settings: Mapping[str, Any] = {}
    guard: Guard | None = None

    # the open window
    _inputs: list[Any]  # its micro-batches
    _drawn: list[Any]  # its micro-batches as the Trainer drew, and so counts, them
    _names: Mapping[int, tuple[object, ...]] = {}  # their sample ids, by id of the inputs
    _logged: Tensor | None = None  # the Trainer's summed loss before it
    _counted: Mapping[str, Any] = {}  # TRL's metrics before it
    _norm: float | None = None  # once it is closed
    _finally: ExitStack  # restores the optimizer's own step
    _trains: bool = False
    _epoch: Any = None  # the iterator of the current epoch
    _generations: Generations | None = None  # for TRL's Trainers that generate

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        first = cls.__mro__[: cls.__mro__.index(TrainerMixin)]
        if any(hasattr(c, "training_step") and not issubclass(c, TrainerMixin) for c in first):
            raise ConfigError(
                f"{cls.__name__} has a Trainer before TrainerMixin, which would leave its steps"
                " unguarded: put TrainerMixin first"
            )
        check_settings(cls.guard_settings)

    def on_refused(self, outcome: Outcome) -> None:
        """Log a warning for each refusal and each finding of the tracer. Override to do more."""
        for refusal in outcome.refused:
            _log.warning("refused in step %d: %s", self.state.global_step + 1, refusal)
        for finding in outcome.findings:
            _log.warning("traced in step %d: %s", self.state.global_step + 1, finding)

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        """Train with a new guard, so that a window left open by an error is dropped, such as an OOM
        after which `auto_find_batch_size` starts again."""
        _refuse_unfit(self)
        self.guard = None
        self._trains, self._epoch = True, None
        self._generations = Generations(self) if generations.generates(self) else None
        with ExitStack() as self._finally:
            self._finally.callback(self._end_training)
            return super()._inner_training_loop(*arguments, **named)

    def _end_training(self) -> None:
        self._trains, self._names, self._generations = False, {}, None
        self._drawn = []
        if self.guard is not None:
            self.guard.close()  # frees buffers as large as the gradients

    def get_train_dataloader(self) -> Any:
        """Make the loader's sampler record its indices, so that refusals can name samples."""
        loader = super().get_train_dataloader()
        _note_order(loader)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, *arguments: Any, **named: Any) -> Any:
        """Draw a window's micro-batches, and keep the indices of their rows if recorded."""
        drawn = super().get_batch_samples(epoch_iterator, *arguments, **named)
        if self._trains:
            loader = self.callback_handler.train_dataloader
            sampler = getattr(loader, "batch_sampler", None)
            noted: deque[list[Any]] = getattr(sampler, "noted", deque())
            if noted and self._epoch is None:
                for _ in range(self._skipped(loader)):
                    noted.popleft()
            self._epoch = epoch_iterator
            self._names = {id(x): tuple(noted.popleft()) if noted else () for x in drawn[0]}
        return drawn

    def _skipped(self, loader: Any) -> int:
        """Return how many micro-batches of the epoch a starting or resuming run skips."""
        size = self.args.gradient_accumulation_steps
        steps = max(1, math.ceil(len(loader) / size))
        return 0 if self.args.ignore_data_skip else self.state.global_step % steps * size

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute a micro-batch; after the window's last, compute survivors of a refusal again."""
        if not self._trains:  # not called by `train`
            return super().training_step(model, inputs, num_items_in_batch)
        guard = self._guard_of(model)
        if not self._inputs:
            share_buffers(model)
            guard.window.max_grad_norm = self.args.max_grad_norm or math.inf  # callbacks change it
            self._logged = getattr(self, "_tr_loss", torch.zeros(())).clone()
            self._counted = self._counts()
            self._drawn = []
        self._drawn.append(inputs)
        inputs = self._taken(inputs)
        self._inputs.append(inputs)
        loss = self._compute(guard, model, inputs, num_items_in_batch)
        if self._generations is not None:
            self._step += 1  # the position in the generation; counts refused micro-batches too
        if not self.accelerator.gradient_state.sync_gradients:
            return loss
        losses = None
        refused: set[int] = set()
        while refusals := guard.begin_again():
            refused |= self._places(refusals)
            self.__dict__.update(deepcopy(self._counted))
            losses = self._compute_again(guard, model, refused, num_items_in_batch)
        self._inputs = []
        self._norm = guard.close_window()
        return loss if losses is None else self._logged_again(losses)

    def _places(self, refusals: Iterable[Refusal]) -> set[int]:
        """Return which of this process's micro-batches in the window were refused."""
        assert self.guard is not None
        processes = self.guard.window.processes
        together = self.guard.window.sharding is not None
        return {
            refusal.micro_batch // processes.size
            for refusal in refusals
            if refusal.micro_batch is not None and (together or refusal.process == processes.index)
        }

    def _taken(self, inputs: Any) -> Any:
        if self._generations is None:
            return inputs
        taken = self._generations.take(len(self._inputs), inputs, self._counted)
        names = self._names.get(id(inputs), ())  # for the whole generation, which TRL shuffles
        self._names = {**self._names, id(taken): tuple(dict.fromkeys(names))}
        return taken

    def _prepare_inputs(self, inputs: Any) -> Any:
        made = None if self._generations is None else self._generations.slice
        return super()._prepare_inputs(inputs) if made is None else made

    def _computing(self, inputs: Any) -> Any:
        return nullcontext() if self._generations is None else self._generations.computing(inputs)

    def _compute(self, guard: Guard, model: Any, inputs: Any, items: Any) -> Tensor:
        loss = torch.zeros((), device=self.args.device)
        again = partial(self._once_more, model, inputs, items)
        names = self._names.get(id(inputs), ())
        with (
            guard.micro_batch(ids=names, inputs=inputs, run=again) as micro,
            refuse_bad_ids(inputs, self.model, self._labels_are_tokens()),
            _alone(self.accelerator),
            self._computing(inputs),
        ):
            micro.loss = loss = super().training_step(model, inputs, items)
        return loss

    def _labels_are_tokens(self) -> bool:
        """Return whether the loss is a stock one, whose labels are tokens or -100."""
        if self.compute_loss_func is not None or self.label_smoother is not None:
            return False
        return type(self).compute_loss.__module__.partition(".")[0] in ("transformers", "trl")

    def _once_more(self, model: Any, inputs: Any, items: Any) -> Tensor:
        counted = self._counts()
        try:
            with _alone(self.accelerator), self._computing(inputs):
                return super().training_step(whole(model), inputs, items)
        finally:
            self.__dict__.update(counted)

    def _counts(self) -> Mapping[str, Any]:
        return {name: deepcopy(self.__dict__[name]) for name in _COUNTED if name in self.__dict__}

    def _compute_again(
        self, guard: Guard, model: Any, refused: set[int], items: Any
    ) -> list[Tensor]:
        """Compute the survivors as a window without the refused ones; return their losses."""
        window = self._inputs
        processes = guard.window.processes
        (left,) = processes.sums([len(window) - len(refused)])
        # a Trainer divides by this or by `items`
        self.current_gradient_accumulation_steps = left / processes.size
        if items is not None:
            counted = [_blank(x) if i in refused else x for i, x in enumerate(window)]
            items = self._get_num_items_in_batch(counted, self.args.device)
        losses: list[Tensor] = []
        last = max((i for i in range(len(window)) if i not in refused), default=None)
        for place, inputs in enumerate(window):
            if self._generations is not None:
                self._generations.rewind_to(place)
                self._generations.calls = len(losses)
            if place not in refused:
                self.accelerator.sync_gradients = place == last  # GRPO's metrics read it
                try:
                    losses.append(self._compute(guard, model, inputs, items))
                finally:
                    self.accelerator.sync_gradients = True
                continue
            guard.window.place += processes.size
            if guard.sharding is not None and not guard.sharding.trained:
                with (  # another process may wait for its layers
                    suppress(*guard.settings.refuse),
                    guard.aside(),
                    refuse_bad_ids(inputs, self.model, self._labels_are_tokens()),
                ):
                    self._once_more(model, inputs, items)
        return losses

    def _logged_again(self, losses: list[Tensor]) -> Tensor:
        """Replace the window's losses in the Trainer's sum; return the last one, which it adds.

        Without survivors, return the mean loss since the last log entry, as the Trainer does for a
        NaN that it filters: the entry divides by all steps.
        """
        if not hasattr(self, "_tr_loss"):
            return losses[-1] if losses else torch.zeros((), device=self.args.device)
        self._tr_loss.copy_(self._logged)
        if not losses:
            steps = self.state.global_step - self._globalstep_last_logged
            return self._tr_loss / max(1, steps)
        for loss in losses[:-1]:
            self._tr_loss += loss
        return losses[-1]

    def _guard_of(self, model: Any) -> Guard:
        """Return the guard; the first call makes it and puts its `step` into the optimizer."""
        if self.guard is not None:
            return self.guard
        if self.accelerator.distributed_type.value == "DEEPSPEED":
            raise ConfigError(
                f"DeepSpeed makes its own step; train with DDP or one process, or {UNGUARDED}"
            )
        folder = Path(self.args.output_dir, "postmortem")
        settings = {"trace": 1, "postmortem": folder, **self.guard_settings}
        settings["refuse"] = (*settings.get("refuse", GuardSettings.refuse), DataError)
        settings |= {"loss": "share", "max_grad_norm": self.args.max_grad_norm or math.inf}
        self.guard = TrainerGuard(model, self.optimizer, **settings)
        if self._generations is not None and self.guard.sharding is not None:
            raise ConfigError(
                f"the guard does not support {type(self).__name__} with FSDP2; train with DDP, or"
                f" {UNGUARDED}"
            )
        self._inputs = []
        self._take_over(self.optimizer)
        return self.guard

    def _take_over(self, optimizer: Any) -> None:
        def step(closure: Any = None) -> None:
            optimizer._opt_called = True  # schedulers read it
            assert self.guard is not None
            held = [(p, p.grad) for p in self.guard.window.gradients.parameters]
            try:
                outcome = self.guard.step()
            except TooManyRefusalsError:
                assert self.guard.outcome is not None
                self._uncount(self.guard.outcome)
                self.on_refused(self.guard.outcome)
                raise
            if outcome.applied:
                for parameter, gradient in held:  # `AdafactorSchedule` reads them
                    parameter.grad = gradient
            optimizer._is_overflow = not outcome.applied  # makes the scheduler skip this step
            if outcome.refused:
                self._uncount(outcome)
                self.on_refused(outcome)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        if "step" in vars(optimizer):  # a scheduler's
            self._finally.callback(setattr, optimizer, "step", optimizer.step)
        optimizer.step = step
        self._finally.callback(delattr, optimizer, "step")

    def _uncount(self, outcome: Outcome) -> None:
        """Take refused rows out of the tokens and operations that the Trainer has counted, and a
        window refused as a whole out of its metrics and its loss too.
        """
        assert self.guard is not None
        places = self._places(outcome.refused)
        whole_window = any(refusal.micro_batch is None for refusal in outcome.refused)
        if whole_window:
            places = set(range(len(self._drawn)))
        seen = self.state.num_input_tokens_seen
        with _alone(self.accelerator):
            for place in places:
                self.current_flos -= float(self.floating_point_ops(self._drawn[place]))
                self._track_num_input_tokens(self._drawn[place])
        (refused,) = self.guard.window.processes.sums([self.state.num_input_tokens_seen - seen])
        self.state.num_input_tokens_seen = seen - int(refused)
        if whole_window:
            self.__dict__.update(self._counted)
            mean = self._logged_again([])
            self._tr_loss += mean

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self._norm  # clipped when the window closed

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return self._norm

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Add `refused`, the number of refusals so far, to the caller's `logs`, and log them."""
        if self.guard is not None:
            logs["refused"] = self.guard.counts.refused
        super().log(logs, *arguments, **named)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        guard = self.guard
        bad = None if guard is None else guard.first_bad()
        if guard is not None and any(guard.window.processes.sums([float(bad is not None)])):
            text = "checkpoint of step %d not saved: %s is not finite; older checkpoints are kept"
            _log.error(text, self.state.global_step, bad or "a tensor on another process")
            return
        super()._save_checkpoint(model, trial)


def protect(trainer: Any, **settings: Any) -> Any:
    """Guard an existing Trainer, in place, and return it.

    Args:
        trainer: any Trainer of transformers, or one derived from it, before training.
        settings: as in `TrainerMixin.guard_settings`.

    Raises:
        ConfigError: a setting is invalid.
    """
    check_settings(settings)
    kind = type(trainer)
    if not isinstance(trainer, TrainerMixin):
        trainer.__class__ = type(f"Guarded{kind.__name__}", (TrainerMixin, kind), {})
    trainer.guard_settings = settings
    return trainer


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that belong to the Trainer, and for invalid values."""
    for name in {"loss", "max_grad_norm"}.intersection(settings):
        raise ConfigError(
            f"a Trainer's guard has no setting {name!r}: the Trainer computes the loss, and"
            " TrainingArguments(max_grad_norm=...) sets the norm"
        )
    GuardSettings(**{"trace": 1, **settings})


def _refuse_unfit(trainer: Any) -> None:
    generating = generations.generates(trainer)
    if hasattr(trainer, "_buffered_inputs") and not generating:
        raise ConfigError(
            f"{type(trainer).__name__} makes the inputs of several micro-batches at once, so the"
            f" guard cannot recompute one of them; {UNGUARDED}"
        )
    if trainer.accelerator.num_processes > 1 and generations.asks_all_processes(trainer):
        raise ConfigError(
            "use_adaptive_entropy, top_entropy_quantile below 1 and KTO's KL communicate between"
            " processes in every forward, which the guard does not support; turn them off, use"
            f" one process, or {UNGUARDED}"
        )
    adapters = sys.modules.get("npt.adapters.converted")  # not loaded: the model is no student
    if adapters and adapters.is_attached(trainer.model) and trainer.args.save_strategy != "no":
        raise ConfigError(
            "a Trainer's checkpoint cannot hold an NPT student; pass save_strategy='no' and call"
            " npt.save_adapter(model, folder) after training, or train with npt.Trainer"
        )


def _note_order(loader: Any) -> None:
    from accelerate.data_loader import DataLoaderDispatcher
    from transformers.trainer_utils import has_length

    sampler = getattr(loader, "batch_sampler", None)
    indexed = sampler is not None and not isinstance(loader.dataset, IterableDataset)
    ordered = getattr(loader, "in_order", True) and not isinstance(loader, DataLoaderDispatcher)
    if not (indexed and ordered and has_length(loader)) or hasattr(sampler, "noted"):
        return
    kind: Any = type(sampler)

    def noting(self: Any) -> Iterator[list[Any]]:
        noted = self.noted = deque()
        for indices in kind.__iter__(self):
            noted.append(indices)
            yield indices

    with suppress(TypeError):  # a sampler with slots, or written in C
        # only a subclass of one base has the same layout
        sampler.__class__ = type(f"Noting{kind.__name__}", (kind,), {"__iter__": noting})


@contextmanager
def _alone(accelerator: Any) -> Iterator[None]:
    """Turn accelerate's gathering off within the context; TRL uses it for metrics.

    A refused micro-batch may end early, and the other processes would wait for ever. Metrics are
    then those of the main process.
    """
    names = _GATHERING if accelerator.num_processes > 1 else ()
    for name in names:
        setattr(accelerator, name, lambda value, *_, **__: value)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)


def _blank(inputs: Any) -> Any:
    if not isinstance(inputs, Mapping):
        return inputs
    names = [name for name in ("labels", "shift_labels") if name in inputs]
    return {**inputs, **{name: torch.full_like(inputs[name], IGNORED) for name in names}}

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
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import DataLoader

from npt.errors import ConfigError
from npt.guard import generations
from npt.guard.generations import Batch
from npt.guard.guard import Guard
from npt.guard.outcome import Outcome
from npt.guard.refusal import UNGUARDED
from npt.guard.settings import check_settings
from npt.guard.trainer_window import Items, TrainerWindow, note_order

if TYPE_CHECKING:
    from transformers.trainer import Trainer
    from transformers.trainer_utils import TrainOutput
else:
    Trainer = object  # importing the mixin does not import transformers

SomeTrainer = TypeVar("SomeTrainer", bound=Trainer)

_log = logging.getLogger("npt.guard")


class TrainerMixin(Trainer):
    """A guard for a Trainer class: `class Safe(TrainerMixin, Trainer)`. Put it first.

    Attributes:
        guard_settings: fields of `GuardSettings`, except `loss` and `max_grad_norm`, which the
            Trainer decides. By default `trace` is 1 and `postmortem` is in the output folder.
        guard: the guard; None until training begins.
    """

    guard_settings: Mapping[str, Any] = {}
    guard: Guard | None = None
    __window: TrainerWindow | None = None  # while it trains

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        first = cls.__mro__[: cls.__mro__.index(TrainerMixin)]
        if any(hasattr(c, "training_step") and not issubclass(c, TrainerMixin) for c in first):
            raise ConfigError(
                f"{cls.__name__} has a Trainer before TrainerMixin, which would leave its steps"
                " unguarded: put TrainerMixin first"
            )
        check_settings(cls.guard_settings)

    def on_refused(self, outcome: Outcome) -> None:
        """Log a warning for each refusal, finding of the tracer and repair. Override to do more."""
        for repair in outcome.repaired:
            _log.warning("repaired in step %d: %s", self.state.global_step + 1, repair)
        for refusal in outcome.refused:
            quotes = "" if self.__window is None else self.__window.quotes(refusal)
            _log.warning("refused in step %d: %s%s", self.state.global_step + 1, refusal, quotes)
        for finding in outcome.findings:
            _log.warning("traced in step %d: %s", self.state.global_step + 1, finding)

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> TrainOutput:
        """Train with a new guard, so that a window left open by an error is dropped, such as an OOM
        after which `auto_find_batch_size` starts again."""
        _refuse_unfit(self)
        self.guard = None
        # looked up when used: a callback may set either
        window = TrainerWindow(
            self,
            super().training_step,
            settings=lambda: self.guard_settings,
            tell=lambda outcome: self.on_refused(outcome),
        )
        self.__window = window
        try:
            return super()._inner_training_loop(*arguments, **named)
        finally:
            self.__window = None
            window.end()

    def get_train_dataloader(self) -> DataLoader[object]:
        """Make the loader's sampler record its indices, so that refusals can name samples."""
        loader = super().get_train_dataloader()
        note_order(loader)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], *arguments: Any, **named: Any
    ) -> tuple[list[Batch], Items]:
        """Draw a window's micro-batches, and keep the indices of their rows if recorded."""
        drawn = super().get_batch_samples(epoch_iterator, *arguments, **named)
        if self.__window is not None:
            self.__window.note_drawn(drawn[0])
        return drawn

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Items = None
    ) -> Tensor:
        """Compute a micro-batch; after the window's last, compute survivors of a refusal again."""
        window = self.__window
        if window is None:  # not called by `train`
            return super().training_step(model, inputs, num_items_in_batch)
        self.guard = window.guard_of(model)
        return window.step(self.guard, model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        made = None if self.__window is None else self.__window.generations.slice
        return super()._prepare_inputs(inputs) if made is None else made

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> float | None:
        return None if self.__window is None else self.__window.norm

    _clip_grad_norm = _get_grad_norm  # clipped when the window closed

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Add `refused`, the number of refusals so far, to the caller's `logs`, and log them."""
        if self.guard is not None:
            logs["refused"] = self.guard.counts.refused
        super().log(logs, *arguments, **named)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *arguments: Any, **named: Any) -> None:
        stats = getattr(self, "stats", None)
        if isinstance(stats, dict) and [] in stats.values():
            # all was refused since the last log entry: Online DPO would divide by no metrics
            self._globalstep_last_logged = self.state.global_step
            self._total_loss_scalar += tr_loss.item()
            tr_loss.zero_()
        super()._maybe_log_save_evaluate(tr_loss, *arguments, **named)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        guard = self.guard
        bad = None if guard is None else guard.first_bad()
        if guard is not None and any(guard.window.processes.sums([float(bad is not None)])):
            text = "checkpoint of step %d not saved: %s is not finite; older checkpoints are kept"
            _log.error(text, self.state.global_step, bad or "a tensor on another process")
            return
        super()._save_checkpoint(model, trial)


def protect(trainer: SomeTrainer, **settings: Any) -> SomeTrainer:
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
    assert isinstance(trainer, TrainerMixin)
    trainer.guard_settings = settings
    return trainer


def _refuse_unfit(trainer: Trainer) -> None:
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

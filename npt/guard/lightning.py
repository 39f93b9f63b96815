"""A guard for Lightning's automatic optimisation, as a callback.

Lightning calls three methods of its Strategy for each batch: `training_step` and `backward`, and,
around both, `optimizer_step` for the last batch of a window. During `fit` the guard's stand in
their place, and call them. The precision plugin, gradient clipping and all hooks work as before.

Lightning divides each loss by `accumulate_grad_batches` before backward. After a refusal the
window's gradient is divided by the share of batches that survived, so it is their mean again.

Lightning counts a step whether or not the optimizer steps. Its counts of steps and the metrics of a
refused batch are put back; `batch_idx` remains the position in the data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from npt.errors import ConfigError, DataError, TooManyRefusalsError
from npt.guard.guard import Guard
from npt.guard.outcome import MicroBatch, Outcome
from npt.guard.settings import check_settings, trainer_settings

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import STEP_OUTPUT
    from torch.optim import Optimizer

_log = logging.getLogger("npt.guard")

Logged = dict[str, dict[str, object]]


class LightningGuard(Callback):
    """Guard a Lightning Trainer: `Trainer(callbacks=[LightningGuard()])`, on one device.

    Args:
        settings: fields of `GuardSettings`, except `loss` and `max_grad_norm`, which the Trainer
            decides. By default `trace` is 1 and `postmortem` is in `default_root_dir`.

    Attributes:
        guard: the guard; None until training begins.
    """

    def __init__(self, **settings: Any):
        check_settings(settings)
        self.settings = settings
        self.guard: Guard | None = None
        self._state: dict[str, object] = {}
        self._fit: LightningFit | None = None

    def on_refused(self, trainer: Trainer, outcome: Outcome) -> None:
        """Log a warning for each refusal, finding of the tracer and repair. Override to do more."""
        whole_window = [name for micro in outcome.own for name in micro.sample_ids]

        def warn(what: str, batches: Sequence[str], detail: str) -> None:
            names = ", ".join(batches or whole_window)
            text = "%s: epoch %d, batch_idx %s: %s"
            _log.warning(text, what, trainer.current_epoch, names, detail)

        for refusal in outcome.refused:
            warn("refused", refusal.sample_ids, refusal.detail)
        for finding in outcome.findings:
            warn("traced", finding.refusal.sample_ids, finding.told)
        for repair in outcome.repaired:
            warn("repaired", (), repair)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the guard around the strategy's methods."""
        refuse_unfit(trainer)
        model = trainer.strategy.model
        assert model is not None
        settings = trainer_settings(self.settings, trainer.default_root_dir)
        self.guard = Guard(model, trainer.optimizers[0], **settings)
        if self._state:
            self.guard.load_state_dict(self._state)
        self._fit = LightningFit(trainer, self.guard, partial(self.on_refused, trainer))

    def on_fit_end(self, *_: object, **__: object) -> None:
        """Give the strategy its methods back."""
        if self._fit is not None:
            self._fit.end()
        self._fit = None

    on_exception = on_fit_end

    def state_dict(self) -> dict[str, object]:
        """Return the guard's state, for the checkpoint."""
        return self._state if self.guard is None else self.guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Keep the guard's state of a checkpoint until training begins."""
        self._state = state_dict


class LightningFit:
    """One `fit` under a guard: what stands in for the strategy's methods, and the open window.

    Args:
        trainer: a Trainer whose strategy is set up.
        guard: with `loss="share"`.
        tell: called with each outcome that has a refusal or a repair.
    """

    def __init__(self, trainer: Trainer, guard: Guard, tell: Callable[[Outcome], None]):
        self._trainer = trainer
        self._guard = guard
        self._tell = tell
        self._micro: MicroBatch | None = None
        self._open = ExitStack()  # the micro-batch, until its backward is done
        self._drawn = 0  # micro-batches in the window
        self._applied = False  # the last window
        self._window_logged: Logged = {}  # metrics before the window
        self._logged: Logged = {}  # and before the micro-batch
        self._finally = ExitStack()
        strategy = trainer.strategy
        self._training_step = strategy.training_step
        self._backward = strategy.backward
        for name in ("training_step", "backward", "optimizer_step"):
            self._put(strategy, name, getattr(self, name))
        self._gate_schedulers(trainer.lightning_module)

    def end(self) -> None:
        """Give back all methods, and free buffers as large as the gradients."""
        self._finally.close()
        self._guard.close()

    def training_step(self, *arguments: object) -> STEP_OUTPUT:
        """Begin a micro-batch and compute its loss; return NaN if that refuses it."""
        if self._drawn >= self._trainer.accumulate_grad_batches:
            raise ConfigError(
                "optimizer_step of the LightningModule left out optimizer.step(closure), which"
                " LightningGuard needs for each window; to leave out a batch, return None in"
                " training_step"
            )
        self._logged = self._metrics()
        if not self._drawn:
            self._window_logged = self._logged
        self._drawn += 1
        names = [self._trainer.fit_loop.epoch_loop.batch_idx]
        again = partial(self._once_more, *arguments)
        micro = self._guard.micro_batch(ids=names, inputs=arguments[0], run=again)
        self._micro = self._open.enter_context(micro)
        with self._unless_refused():
            output = self._training_step(*arguments)
            if output is None:
                raise DataError("training_step returned None")
            return output
        return torch.tensor(math.nan)

    def backward(self, closure_loss: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """Compute the gradients, and end the micro-batch."""
        if self._micro is not None:
            self._micro.loss = closure_loss
            with self._unless_refused():
                self._backward(closure_loss, *arguments, **named)
                self._open.close()
        return closure_loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], object], *_: object, **__: object
    ) -> object:
        """Compute the window's last micro-batch, and make one step from its survivors, or none."""
        trainer = self._trainer
        guard = self._guard
        result = closure()
        guard.window.shares = self._drawn
        norm = guard.close_window()
        survives = any(bool(judged.flag) for _, judged in guard.window.open.ran)
        if survives and norm is not None and math.isfinite(norm):
            # the hook on_before_optimizer_step, and clipping
            trainer.precision_plugin._after_closure(trainer.lightning_module, optimizer)
        self._drawn = 0
        try:
            outcome = guard.step()
        except TooManyRefusalsError:
            assert guard.outcome is not None
            self._tell(guard.outcome)
            raise
        self._applied = outcome.applied
        if not outcome.applied:
            self._restore(self._window_logged)
            self._uncount_step()
        if outcome.refused or outcome.repaired:
            self._tell(outcome)
        return result

    @contextmanager
    def _unless_refused(self) -> Iterator[None]:
        """Let the guard see what a part of a micro-batch raises; restore the metrics of one that is
        refused."""
        refused = False
        try:
            yield
        except BaseException as error:
            self._micro = None
            if not self._open.__exit__(type(error), error, error.__traceback__):
                raise
            refused = True
        if self._micro is not None and self._micro.judged is not None:  # its backward is done
            refused = not bool(self._micro.judged.flag)
        if refused:
            self._restore(self._logged)

    def _once_more(self, *arguments: object) -> Tensor | None:
        """Return the loss again, for the tracer, without logging it."""
        module = self._trainer.lightning_module
        vars(module)["log"] = lambda *_, **__: None
        try:
            output = self._training_step(*arguments)
        finally:
            del module.log
        loss = output["loss"] if isinstance(output, Mapping) else output
        return None if loss is None else loss / self._trainer.accumulate_grad_batches

    def _metrics(self) -> Logged:
        # Lightning assigns new values to these and changes none in place
        results = self._trainer._results
        assert results is not None
        return {key: dict(vars(each)) for key, each in results.items() if each.is_tensor}

    def _restore(self, logged: Logged) -> None:
        results = self._trainer._results
        assert results is not None
        for key in [key for key, metric in results.items() if metric.is_tensor]:
            if key in logged:
                vars(results[key]).update(logged[key])
            else:
                del results[key]

    def _uncount_step(self) -> None:
        """Take back the step that Lightning counts whether or not the optimizer steps."""
        loop = self._trainer.fit_loop.epoch_loop
        loop._batches_that_stepped -= 1  # the step of loggers
        steps = loop.automatic_optimization.optim_progress.optimizer.step
        for counts in (steps.total, steps.current):
            counts.ready -= 1
            counts.completed -= 1

    def _gate_schedulers(self, module: LightningModule) -> None:
        """Make schedulers of interval "step" skip a window that was refused as a whole."""
        fit = self
        own: Callable[..., None] = module.lr_scheduler_step

        def lr_scheduler_step(scheduler: object, metric: object) -> None:
            configs = fit._trainer.lr_scheduler_configs
            by_step = [config.scheduler for config in configs if config.interval == "step"]
            if fit._applied or scheduler not in by_step:
                own(scheduler, metric)

        # a function, so that a copy of the module has no copy of the guard
        self._put(module, "lr_scheduler_step", lr_scheduler_step)

    def _put(self, owner: object, name: str, method: Callable[..., object]) -> None:
        setattr(owner, name, method)
        self._finally.callback(delattr, owner, name)


def refuse_unfit(trainer: Trainer) -> None:
    """Raise ConfigError for a run that this guard cannot make exact."""
    if not trainer.lightning_module.automatic_optimization:
        raise ConfigError(
            "LightningGuard guards automatic optimisation; with manual optimisation, use"
            " npt.guard.Guard in training_step"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ConfigError(
            f"LightningGuard trains on one device, not with {type(trainer.strategy).__name__}; pass"
            " devices=1, or use npt.guard.Guard in a loop of your own with Fabric"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigError(
            "LightningGuard does not support precision='16-mixed'; pass precision='bf16-mixed'"
        )
    if isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        raise ConfigError("LBFGS computes a batch several times in a step: use another optimizer")

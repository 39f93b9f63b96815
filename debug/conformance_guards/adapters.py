"""Guards as loops: each adapter is written as the guard's own documentation shows it.

An adapter is a class:

    class MyGuard:
        def __init__(self, run): ...      # run.model, .optimizer, .scheduler, .ema, .scaler, ...
        def step(self, window): ...       # forward, backward and update of a list of micro-batches

`conformance_guards.run.Run` documents what `run` has. A guard with a loop of its own has
`train(windows)` in place of `step`. Optional attributes of the class: `handles_spikes = True`, and
`left_out`, the settings in which the guard cannot run, each with the reason.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance_guards.run import Run, Window


class NptGuard:
    """npt.guard.Guard."""

    handles_spikes = True

    def __init__(self, run: Run):
        from npt.guard import Guard

        self.run = run
        self.guard = Guard(
            run.model,
            run.optimizer,
            run.scheduler,
            run.scaler,
            loss="mean",
            max_grad_norm=run.max_norm,
            spike_sigmas=10,
        )

    def step(self, window: Window) -> None:
        for batch in window:
            with self.guard.micro_batch() as micro:
                micro.loss = loss = self.run.model(**batch)
                self.run.backward(loss)
        if self.guard.step().applied and self.run.ema is not None:
            self.run.ema.update_parameters(self.run.net)


class NoGuard:
    """A plain loop. Those below change a line or two of it."""

    def __init__(self, run: Run):
        self.run = run
        self.parameters = [*run.net.parameters()]

    def step(self, window: Window) -> None:
        for index, batch in enumerate(window):
            with synchronised(self.run.model, index == len(window) - 1):
                loss = self.run.model(**batch) / len(window)
                if self.is_good(loss):
                    self.run.backward(loss)
        if any(p.grad is not None for p in self.parameters):
            self.update()
        self.run.optimizer.zero_grad()

    def is_good(self, loss: torch.Tensor) -> bool:
        return True

    def update(self) -> None:
        scaler = self.run.scaler
        if scaler is not None:
            scaler.unscale_(self.run.optimizer)
        if not self.clip():
            if scaler is not None:
                scaler.update()
            return
        if scaler is None:
            self.run.optimizer.step()
        else:
            scaler.step(self.run.optimizer)
            scaler.update()
        self.run.after_step()

    def clip(self) -> bool:
        """Clip, and return whether to step."""
        nn.utils.clip_grad_norm_(self.parameters, self.run.max_norm)
        return True


def synchronised(model: nn.Module, last: bool) -> Any:
    """Return a context in which only the last backward of a window sums over processes."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return torch.enable_grad()


class FiniteLoss(NoGuard):
    """`if not torch.isfinite(loss): continue`."""

    def is_good(self, loss: torch.Tensor) -> bool:
        return bool(torch.isfinite(loss))


class FiniteNorm(NoGuard):
    """`clip_grad_norm_(..., error_if_nonfinite=True)`; the window is skipped if it raises."""

    def clip(self) -> bool:
        try:
            nn.utils.clip_grad_norm_(self.parameters, self.run.max_norm, error_if_nonfinite=True)
        except RuntimeError:
            return False
        return True


class ScalerAlone(NoGuard):
    """torch's GradScaler, which skips a step whose gradients are not finite. Settings without one
    get a scaler of this guard's own, whose state is not compared.
    """

    def __init__(self, run: Run):
        super().__init__(run)
        if run.scaler is None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        else:
            self.scaler = run.scaler

    def step(self, window: Window) -> None:
        for index, batch in enumerate(window):
            with synchronised(self.run.model, index == len(window) - 1):
                self.scaler.scale(self.run.model(**batch) / len(window)).backward()
        self.scaler.unscale_(self.run.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, self.run.max_norm)
        self.scaler.step(self.run.optimizer)
        self.scaler.update()
        self.run.after_step()
        self.run.optimizer.zero_grad()


class Accelerate:
    """accelerate's own accumulation; the window is skipped if its norm is not finite."""

    left_out = {"scaler": "accelerate has no fp16 on a CPU"}  # noqa: RUF012

    def __init__(self, run: Run):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run
        GradientState._reset_state()
        self.run = run
        self.accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        self.model, self.optimizer = self.accelerator.prepare(run.net, run.optimizer)
        self.scheduler = run.scheduler and self.accelerator.prepare(run.scheduler)

    def step(self, window: Window) -> None:
        accelerator = self.accelerator
        accelerator.gradient_accumulation_steps = len(window)
        accelerator.step = 0  # windows may differ in length
        for batch in window:
            with accelerator.accumulate(self.model):
                accelerator.backward(self.model(**batch))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), self.run.max_norm)
                    if math.isfinite(norm):
                        self.optimizer.step()
                        self.run.after_step()
                self.optimizer.zero_grad()


class StabilityGuard:
    """stabilityguard's GuardedOptimizer in a plain loop, set to skip."""

    handles_spikes = True

    def __init__(self, run: Run):
        from stabilityguard import GuardedOptimizer

        self.run = run
        self.parameters = [*run.net.parameters()]
        self.folder = tempfile.TemporaryDirectory()  # of its reports
        self.optimizer = GuardedOptimizer(
            run.optimizer,
            run.net,
            nan_action="skip",
            spike_threshold=10.0,
            log_dir=self.folder.name,
            verbose=False,
        )

    def step(self, window: Window) -> None:
        for index, batch in enumerate(window):
            with synchronised(self.run.model, index == len(window) - 1):
                self.run.backward(self.run.model(**batch) / len(window))
        if self.run.scaler is not None:
            self.run.scaler.unscale_(self.run.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, self.run.max_norm)
        self.optimizer.step()
        if self.run.scaler is not None:
            self.run.scaler.update()
        self.run.after_step()
        self.optimizer.zero_grad()

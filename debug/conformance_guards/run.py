"""A tiny training run: what a guard is given, and the whole state that is compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Batch = dict[str, Any]
"""The inputs of the model: x [rows, FEATURES], y [rows, 1], and the name of a fault, or ""."""
Window = list[Batch]
"""The micro-batches of one optimizer step of this process."""

ROWS, FEATURES, WIDTH = 8, 6, 8
NORM_FACTOR = 1e25
"""A gradient of this size is finite, but the sum of its squares is not."""
SPIKE = 1e4


@dataclass(frozen=True)
class Setting:
    """What a training loop has besides a model and an optimizer.

    Attributes:
        name: as in the table.
        micro_batches: of each process in a window.
        bad: the index of the micro-batch in which a fault is planted.
        batch_norm: the model has running statistics, which a forward changes.
    """

    name: str
    micro_batches: int = 1
    bad: int = 0
    batch_norm: bool = False
    schedule: bool = False
    dropout: float = 0.0
    ema: bool = False
    scaler: bool = False
    processes: int = 1


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("plain"),
        Setting("schedule", schedule=True),
        Setting("dropout", dropout=0.3),
        Setting("batch-norm", batch_norm=True),
        Setting("accumulation", micro_batches=4, bad=1),
        Setting("ema", ema=True),
        # In a window of one, an overflow is the fault of the scale, which then has to fall.
        Setting("scaler", micro_batches=4, bad=1, scaler=True),
        # The last micro-batch is the one in whose backward the processes meet.
        Setting("two-processes", micro_batches=2, bad=1, processes=2),
    )
}


class Net(nn.Module):
    """A small regression, which returns its mean loss."""

    def __init__(self, setting: Setting):
        super().__init__()
        # without a bias: its gradient would be rounding noise, which Adam turns into whole steps
        self.first = nn.Linear(FEATURES, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH) if setting.batch_norm else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(setting.dropout)
        self.last = nn.Linear(WIDTH, 1)
        self.through_fp16 = setting.scaler
        self.spoils_moments = False

    def forward(self, x: Tensor, y: Tensor, fault: str = "") -> Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        if self.through_fp16:  # where a large gradient overflows
            hidden = hidden.half().float()
        if fault == "norm":
            hidden = _Amplified.apply(hidden)
        loss = (self.last(hidden) - y).square().mean()
        if fault == "loss":
            loss = loss * math.nan
        elif fault == "gradient":
            # the slope of a root at 0 is infinite, and 0 * inf is NaN
            loss = loss + 0 * (hidden - hidden).sqrt().sum()
        elif fault == "exception":
            raise FloatingPointError("a value is out of range")
        elif fault == "spike":
            loss = loss * SPIKE
        elif fault == "moments":
            self.spoils_moments = True
        return loss


class _Amplified(torch.autograd.Function):
    """Return the input, and amplify its gradient."""

    @staticmethod
    def forward(_: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient * NORM_FACTOR


@dataclass
class Run:
    """What a guard is given. It steps optimizer, schedule, EMA and scaler.

    Attributes:
        net: the model.
        model: `net`, or `net` in DistributedDataParallel if there are several processes. Called
            with a batch (`run.model(**batch)`), it returns the mean loss, a scalar.
        scheduler: to be stepped after each optimizer step, or None.
        ema: to be updated after each optimizer step with `update_parameters(net)`, or None.
        scaler: None, or multiplies each loss before its backward.
        max_norm: of the window's gradient, which is the mean over its micro-batches.
        processes: how many there are; torch.distributed is set up if there are several.
    """

    net: Net
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    ema: AveragedModel | None
    scaler: torch.amp.GradScaler | None
    max_norm: float
    processes: int

    @cached_property
    def model(self) -> nn.Module:
        # made when asked for, because two wrappers of one model disturb each other
        return DistributedDataParallel(self.net) if self.processes > 1 else self.net

    def backward(self, loss: Tensor) -> None:
        """Backward of a loss, multiplied by the scale if there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def after_step(self) -> None:
        """Advance what follows the optimizer: the schedule and the EMA."""
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.net)

    def state(self) -> dict[str, Any]:
        """Return a copy of everything that a later step depends on."""
        parts = {"scheduler": self.scheduler, "ema": self.ema, "scaler": self.scaler}
        return copy.deepcopy(
            {
                "weights": {name: p.detach() for name, p in self.net.named_parameters()},
                "buffers": dict(self.net.named_buffers()),
                "optimizer": self.optimizer.state_dict(),
                "random": torch.get_rng_state(),
                **{name: part and part.state_dict() for name, part in parts.items()},
            }
        )


def new_run(setting: Setting) -> Run:
    """Return a run at its start, the same one each time, and seed torch's random numbers."""
    torch.manual_seed(0)
    net = Net(setting)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(_spoiling(net))
    scheduler = ema = scaler = None
    if setting.schedule:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    if setting.ema:
        average = get_ema_multi_avg_fn(0.9)
        ema = AveragedModel(net, multi_avg_fn=average, use_buffers=True)
    if setting.scaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return Run(net, optimizer, scheduler, ema, scaler, 1.0, setting.processes)


def _spoiling(net: Net) -> Callable[..., None]:
    """Return a hook that writes Inf into a moment after the step of a batch that asked for it."""

    def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if net.spoils_moments:
            net.spoils_moments = False
            optimizer.state[net.last.weight]["exp_avg_sq"][0, 0] = math.inf

    return spoil


def trained(make: Callable[[Run], Any], setting: Setting, windows: Sequence[Window]) -> Run:
    """Train under the guard that `make` makes, and return the run."""
    run = new_run(setting)
    guard = make(run)
    if hasattr(guard, "train"):  # it has a loop of its own
        guard.train(windows)
    else:
        for window in windows:
            guard.step(window)
    return run

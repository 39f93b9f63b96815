"""What a calibration is going to take, said before it starts, and a bar while it goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedConfig

from npt.calibration.solve import CG_STEPS, CHUNK, RIDGES, round_share
from npt.config import NPTConfig

OVERHEAD = 2.0
"""Time over that of the matrix products alone, as measured: activations, norms, reading rows."""

_PROBE_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """products: multiply-adds in all. ram, disk: bytes at most beside the model, ram without the graph of one batch."""

    products: float
    ram: int
    disk: int

    def seconds(self, device: torch.device, width: int) -> float:
        """About how long it takes here, from the rate of one product on this device. A layer that is hard may take more rounds."""
        x, w = torch.ones(_PROBE_ROWS, width, device=device), torch.ones(width, 4 * width, device=device)
        best = float("inf")
        for _ in range(10):
            _wait(device)
            started = time.perf_counter()
            x @ w
            _wait(device)
            best = min(best, time.perf_counter() - started)
        return OVERHEAD * self.products * best / (_PROBE_ROWS * width * 4 * width)


def plan(config: NPTConfig, model: PreTrainedConfig, layers: Sequence[int], ranks: Sequence[int], tokens: int, rounds: int) -> Plan:
    """Of a calibration of `layers` with `ranks` on `tokens` tokens.

    Args:
        config: form of the adapters.
        model: configuration of the base.
        layers: that are converted.
        ranks: one each.
        tokens: N.
        rounds: of Gauss-Newton.
    """
    width, ffn = model.hidden_size, model.intermediate_size
    kinds = config.additive + config.multiplicative
    attention = 4 * width * width
    base = model.num_hidden_layers * (attention + 3 * width * ffn) + width * model.vocab_size
    total = 3.0 * base + (max(layers) + 1) * (attention + 3 * width * ffn)
    for rank in ranks:
        codes = kinds * rank * sum(width if target == "down" else ffn for target in config.targets)
        once = 3 * width * ffn + rank * width + codes
        linear = len(RIDGES) * (2 * once + 2 * width * ffn)
        step = once + 2 * (width * ffn + rank * width + 2 * codes)
        total += linear + sum(round_share(number, rounds) for number in range(rounds)) * (CG_STEPS + 1) * step
    grams = 8 * width * width * (3 * len(layers) + 6)
    chunk = 4 * CHUNK * (12 * ffn + 8 * width)
    return Plan(total * tokens, grams + chunk + 4 * 3 * width * ffn, 4 * tokens * width * 3)


class Display:
    """A bar on a terminal, a line per layer elsewhere."""

    def __init__(self, console: Console, steps: int):
        self.console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("calibrating"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[stage]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("calibrate", total=steps, stage="")
            self._bar.start()

    def stage(self, name: str, done: int) -> None:
        """What is done now, and how many steps of the whole are counted as done before it: rounds may end early."""
        if self._bar is not None:
            self._bar.update(self._task, stage=name, completed=done)

    def tick(self, steps: int = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, steps)

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

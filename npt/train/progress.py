"""The progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from npt.console import say


class ProgressDisplay:
    """A bar with loss, tokens/s, refusals and the time left; without a terminal, lines.

    Args:
        total_steps: of the run; None if unknown (no time left is shown then).
        console: where to.
        first: steps that were made before, by the run that is resumed.
    """

    def __init__(self, total_steps: int | None, console: Console, first: int = 0):
        self.console = console
        self._total, self._first = total_steps, first
        self._started = time.perf_counter()
        self._bar: Progress | None = None
        if console.is_terminal:
            # Narrow enough for 80 columns: a bar that does not fit loses its numbers first.
            self._bar = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=12),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=total_steps, completed=first, figures="")
            self._bar.start()

    def step(self, step: int, metrics: dict[str, Any] | None, refused: int) -> None:
        """Show an applied step; `metrics` on logged steps only."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        if metrics is None:
            return
        rate = f"{metrics['tokens_per_second']:,.0f} tokens/s  refused {refused}"
        if self._bar is not None:
            self._bar.update(self._task, figures=f"loss {metrics['loss']:.5f}  {rate}")
            return
        of = "" if self._total is None else f"/{self._total}"
        figures = f"grad {metrics['grad_norm']:.3g}  lr {metrics['lr']:.2e}  {rate}"
        line = f"step {step}{of}  loss {metrics['loss']:.5f}  {figures}{self._left(step)}"
        self.console.print(line, highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        say(self.console, line)

    def close(self) -> None:
        """Stop the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _left(self, step: int) -> str:
        if self._total is None:
            return ""
        passed = time.perf_counter() - self._started
        seconds = passed / max(1, step - self._first) * (self._total - step)
        return f"  {int(seconds) // 60}:{int(seconds) % 60:02d} left"

"""The figures of a run's steps, for `metrics.jsonl` and the console."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import add
from typing import Any

import torch
from torch import Tensor

from npt.adapters.converted import npt_layers
from npt.adapters.trained import MODULATION
from npt.distill.local import REPORTED
from npt.guard.outcome import Outcome
from npt.runs.progress import RunProgress
from npt.train.setup import RunSetup


class StepMetrics:
    """Makes the lines of `metrics.jsonl` and the progress lines of a run."""

    def __init__(self, setup: RunSetup, total_steps: int | None):
        self._setup = setup
        self._total_steps = total_steps
        self.logged_tokens = 0
        self._layers = [index for index, _ in npt_layers(setup.model)]
        self._started = self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the work within, such as saving, from the measured training time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def line(self, outcome: Outcome, progress: RunProgress) -> dict[str, Any]:
        """Return the metrics of the last step: means per valid token over the accepted
        micro-batches of all processes, except the logit loss, a mean per predicted token. Tokens
        and refusals are totals of the run, this step included.
        """
        config = self._setup.config
        # Reports arrived with the outcome; reading other tensors could wait for newer windows.
        total, nmses, modulation = self._sums(outcome.reports)
        now = time.perf_counter()
        tokens = progress.tokens
        metrics = {
            "step": progress.step,
            "loss": total["loss"] / outcome.tokens,
            "loss_reg": total["reg"] / outcome.tokens,
            "grad_norm": outcome.grad_norm,
            "lr": outcome.rate,
            "tokens": tokens,
            "tokens_per_second": (tokens - self.logged_tokens) / (now - self._since),
            **progress.refusal_counts,
        }
        self._since = now
        self.logged_tokens = tokens
        if config.logit_kl_weight:
            mean = total["logit"] / total["scored"] if total["scored"] else math.nan
            metrics[f"loss_{config.logit_loss}"] = mean
        if config.hidden_weight:  # the loss compares hidden states
            metrics["loss_nmse"] = total["nmse"] / outcome.tokens
            means = nmses / outcome.tokens
            for index, mean in zip(self._layers, means.tolist(), strict=True):
                metrics[f"layers.{index}.nmse"] = mean
        for index, (tokens_measured, *figures) in zip(self._layers, modulation, strict=True):
            if tokens_measured:
                for name, figure in zip(MODULATION, figures, strict=True):
                    metrics[f"layers.{index}.{name}"] = figure / tokens_measured
        return metrics

    def _sums(
        self, reports: Sequence[Sequence[float]]
    ) -> tuple[dict[str, float], Tensor, list[list[float]]]:
        """Return reports summed over micro-batches and processes: `REPORTED` by name, the NMSE of
        each layer, [layers] in fp32, and for each layer the tokens measured and their `MODULATION`.
        """
        named = len(REPORTED)
        plain = named + len(self._layers)
        width = 1 + len(MODULATION)
        # a row per report, so that without one the sums are zeros
        rows = torch.tensor([report[named:plain] for report in reports], dtype=torch.float32)
        nmses = rows.view(-1, len(self._layers)).sum(dim=0)
        totals = []
        for i in range(named):  # `sum` loses less than repeated addition
            totals.append(sum(report[i] for report in reports))
        measured = [0.0] * (width * len(self._layers))
        for report in reports:
            if len(report) > plain:  # of a step that was expected to be logged
                measured = list(map(add, measured, report[plain:]))
        # one exchange for all
        sums = self._setup.processes.sums([*totals, *nmses.tolist(), *measured])
        total = dict(zip(REPORTED, sums, strict=False))
        modulation = [sums[start : start + width] for start in range(plain, len(sums), width)]
        return total, torch.tensor(sums[named:plain]), modulation

    def progress(self, metrics: Mapping[str, Any]) -> str:
        """Return a logged step as a progress line, with the time left."""
        step = metrics["step"]
        total = self._total_steps
        of = left = ""
        if total is not None:
            passed = time.perf_counter() - self._started
            made = step - self._setup.origin.step
            seconds = int(passed / max(1, made) * (total - step))
            of = f"/{total}"
            left = f"  {seconds // 60}:{seconds % 60:02d} left"
        figures = f"loss {metrics['loss']:.5f}  grad {metrics['grad_norm']:.3g}"
        rates = f"lr {metrics['lr']:.2e}  {metrics['tokens_per_second']:,.0f} tokens/s"
        return f"step {step}{of}  {figures}  {rates}  refused {metrics['refused_total']}{left}"

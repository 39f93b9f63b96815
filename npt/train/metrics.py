"""The figures of a run's steps, for `metrics.jsonl` and the console."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from npt.adapters.converted import npt_layers
from npt.adapters.trained import MODULATION
from npt.distill.local import REPORTED
from npt.guard.outcome import Outcome
from npt.train.setup import RunSetup


class StepMetrics:
    """Makes the lines of `metrics.jsonl` and the progress lines of a run."""

    def __init__(self, setup: RunSetup, total_steps: int | None):
        self._setup, self._total_steps, self.logged_tokens = setup, total_steps, 0
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

    def line(
        self, outcome: Outcome, step: int, tokens: int, refused: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return a step's metrics: means per valid token over the accepted micro-batches of all
        processes, except the logit loss, a mean per predicted token. `tokens` and the counts in
        `refused` are totals of the run, this step included.
        """
        config, named = self._setup.config, len(REPORTED)
        plain = named + len(self._layers)
        # Reports arrived with the outcome; reading other tensors could wait for newer windows.
        reported = [sum(report[i] for report in outcome.reports) for i in range(named)]
        layers = torch.tensor(
            [report[named:plain] for report in outcome.reports], dtype=torch.float32
        )
        nmses = layers.sum(dim=0).tolist() if outcome.reports else [0.0] * len(self._layers)
        measured = torch.zeros(len(self._layers), 1 + len(MODULATION), dtype=torch.float64)
        for report in outcome.reports:
            if len(report) > plain:  # of a step that was expected to be logged
                measured += torch.tensor(report[plain:], dtype=torch.float64).view_as(measured)
        sums = self._setup.processes.sums([*reported, *nmses, *measured.flatten().tolist()])
        total = dict(zip(REPORTED, sums, strict=False))
        now = time.perf_counter()
        metrics = {
            "step": step,
            "loss": total["loss"] / outcome.tokens,
            "loss_reg": total["reg"] / outcome.tokens,
            "grad_norm": outcome.grad_norm,
            "lr": outcome.rate,
            "tokens": tokens,
            "tokens_per_second": (tokens - self.logged_tokens) / (now - self._since),
            **refused,
        }
        self._since, self.logged_tokens = now, tokens
        if config.logit_kl_weight:
            mean = total["logit"] / total["scored"] if total["scored"] else math.nan
            metrics[f"loss_{config.logit_loss}"] = mean
        if config.hidden_weight:  # the loss compares hidden states
            metrics["loss_nmse"] = total["nmse"] / outcome.tokens
            means = (torch.tensor(sums[named:plain]) / outcome.tokens).tolist()
            names = [f"layers.{index}.nmse" for index in self._layers]
            metrics |= dict(zip(names, means, strict=True))
        strengths = torch.tensor(sums[plain:], dtype=torch.float64).view_as(measured).tolist()
        for index, (tokens_measured, *figures) in zip(self._layers, strengths, strict=True):
            for name, figure in zip(MODULATION, figures, strict=True):
                if tokens_measured:
                    metrics[f"layers.{index}.{name}"] = figure / tokens_measured
        return metrics

    def progress(self, metrics: Mapping[str, Any]) -> str:
        """Return a logged step as a progress line, with the time left."""
        step, total, of, left = metrics["step"], self._total_steps, "", ""
        if total is not None:
            passed, made = time.perf_counter() - self._started, step - self._setup.origin.step
            seconds = int(passed / max(1, made) * (total - step))
            of, left = f"/{total}", f"  {seconds // 60}:{seconds % 60:02d} left"
        figures = f"loss {metrics['loss']:.5f}  grad {metrics['grad_norm']:.3g}"
        rates = f"lr {metrics['lr']:.2e}  {metrics['tokens_per_second']:,.0f} tokens/s"
        return f"step {step}{of}  {figures}  {rates}  refused {metrics['refused_total']}{left}"

"""What looks at a run's steps and steers nothing: metrics and recorded tensors."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from npt.adapters.converted import npt_layers
from npt.data.batch import Batch
from npt.distill.local import REPORTED
from npt.guard.outcome import Outcome
from npt.train.refusals import Refusals
from npt.train.run import Run


class StepMetrics:
    """Makes the lines of `metrics.jsonl`, and those on the console.

    Attributes:
        logged_tokens: up to the last line.
    """

    def __init__(self, run: Run):
        self._run, self.logged_tokens = run, 0
        self._layers = [index for index, _ in npt_layers(run.setup.model)]
        self._started = self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is done in this context, which is not training, out of the time between
        lines.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def line(self, result: Outcome, steps: int, tokens: int, refusals: Refusals) -> dict[str, Any]:
        """Return means per valid token over the survivors of all processes; the loss on the logits
        is a mean per predicted token. `steps` and `tokens` of the run include this step.
        """
        config, named = self._run.setup.config, len(REPORTED)
        # From the reports, which came with the record: the survivors' own tensors may wait in a
        # queue of newer windows.
        reported = [sum(report[i] for report in result.reports) for i in range(named)]
        layers = torch.tensor([report[named:] for report in result.reports], dtype=torch.float32)
        nmses = layers.sum(dim=0).tolist() if result.reports else [0.0] * len(self._layers)
        sums = self._run.setup.processes.sums([*reported, *nmses])
        total = dict(zip(REPORTED, sums, strict=False))
        now = time.perf_counter()
        metrics = {
            "step": steps,
            "loss": total["loss"] / result.tokens,
            "loss_reg": total["reg"] / result.tokens,
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "tokens": tokens,
            "tokens_per_second": (tokens - self.logged_tokens) / (now - self._since),
            "refused_total": refusals.total,
            **{f"refused.{kind}": count for kind, count in sorted(refusals.by_kind.items())},
        }
        self._since, self.logged_tokens = now, tokens
        if config.logit_kl_weight:
            mean = total["logit"] / total["scored"] if total["scored"] else math.nan
            metrics[f"loss_{config.logit_loss}"] = mean
        if config.hidden_weight:  # hidden states were compared
            metrics["loss_nmse"] = total["nmse"] / result.tokens
            means = (torch.tensor(sums[named:]) / result.tokens).tolist()
            names = [f"layers.{index}.nmse" for index in self._layers]
            metrics |= dict(zip(names, means, strict=True))
        return metrics

    def progress(self, metrics: Mapping[str, Any]) -> str:
        """Return a logged step as a line for the console, with the time that is left."""
        step, total = metrics["step"], self._run.total_steps
        first = self._run.setup.first_step
        of = left = ""
        if total is not None:
            passed = time.perf_counter() - self._started
            seconds = int(passed / max(1, step - first) * (total - step))
            of, left = f"/{total}", f"  {seconds // 60}:{seconds % 60:02d} left"
        figures = f"loss {metrics['loss']:.5f}  grad {metrics['grad_norm']:.3g}"
        rates = f"lr {metrics['lr']:.2e}  {metrics['tokens_per_second']:,.0f} tokens/s"
        return f"step {step}{of}  {figures}  {rates}  refused {metrics['refused_total']}{left}"


class StepRecording:
    """Records the first micro-batch that the main process computes of each step that
    `--trace_steps` chooses. The micro-batch is computed once in any case.
    """

    def __init__(self, run: Run, metrics: StepMetrics):
        from npt.recorder.recording import Recording

        self._model, self._metrics = run.setup.model, metrics
        steps, folder = run.setup.config.trace_steps, run.folder.path / "trace"
        assert steps is not None
        self._recording = Recording(folder, steps, run.say)
        self._step: int | None = None  # the open window's, until its first micro-batch is recorded
        self.draw = self._recording.draw  # pictures of the records
        run.say(str(self._recording))

    def open(self, step: int) -> None:
        """Begin a window that will be `step` if it is applied."""
        self._step = step if self._recording.wants(step) else None

    def observer(self, place: int) -> Callable[[Batch], Any] | None:
        """Return a context around each part of the micro-batch at this place, if any."""
        return None if self._step is None else partial(self._observe, place)

    @contextlib.contextmanager
    def _observe(self, place: int, batch: Batch) -> Iterator[None]:
        step, self._step = self._step, None
        if step is None:  # one part is recorded
            yield
            return
        valid = batch.attention_mask.bool() if batch.padded else None
        self._recording.start(self._model, step, valid)
        try:
            yield
            with self._metrics.paused():
                self._recording.finish(place)
        finally:
            self._recording.stop()

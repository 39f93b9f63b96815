"""The line of metrics that a run logs for a step."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from npt.adapters.converted import npt_layers
from npt.distill.local import REPORTED
from npt.guard.outcome import Outcome
from npt.train.refusals import Refusals
from npt.train.run_context import RunContext


class StepMetrics:
    """Makes the lines of `metrics.jsonl`.

    since: time of the last line; time that was not spent on training is added to it.
    logged_tokens: up to that line.
    """

    def __init__(self, context: RunContext):
        self._processes, self._config = context.processes, context.config
        self._layers = [index for index, _ in npt_layers(context.model)]
        self.since, self.logged_tokens = time.perf_counter(), 0

    def line(self, result: Outcome, steps: int, tokens: int, refusals: Refusals) -> dict[str, Any]:
        """Return means per valid token over the survivors of all processes.

        The loss on the logits is a mean per predicted token.

        Args:
            result: of an applied window.
            steps, tokens: of the run, including this step.
            refusals: of the run.
        """
        config, named = self._config, len(REPORTED)
        # Read from the reports, which came with the record: the survivors' own tensors may wait in
        # a queue of newer windows.
        own = [sum(report[i] for report in result.reports) for i in range(named)]
        layers = torch.tensor([report[named:] for report in result.reports], dtype=torch.float32)
        nmses = layers.sum(dim=0).tolist() if result.reports else [0.0] * len(self._layers)
        sums = self._processes.sums([*own, *nmses])
        total = dict(zip(REPORTED, sums, strict=False))
        now = time.perf_counter()
        metrics = {
            "step": steps,
            "loss": total["loss"] / result.tokens,
            **({"loss_nmse": total["nmse"] / result.tokens} if config.hidden_weight else {}),
            "loss_reg": total["reg"] / result.tokens,
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "tokens": tokens,
            "tokens_per_second": (tokens - self.logged_tokens) / (now - self.since),
            "refused_total": refusals.total,
            **{f"refused.{kind}": count for kind, count in sorted(refusals.by_kind.items())},
        }
        self.since, self.logged_tokens = now, tokens
        if config.logit_kl_weight:
            count = total["scored"]
            metrics[f"loss_{config.logit_loss}"] = total["logit"] / count if count else math.nan
        if not config.hidden_weight:  # hidden states were not compared
            return metrics
        means = (torch.tensor(sums[named:]) / result.tokens).tolist()
        return metrics | {
            f"layers.{index}.nmse": mean for index, mean in zip(self._layers, means, strict=True)
        }

"""Replay one micro-batch of a post-mortem alone: loss, layers, gradients, first bad number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from npt.adapters.converted import npt_layers
from npt.data.batch import find_fault
from npt.diagnostics.tracer.verdict import Verdict
from npt.errors import printable_lines
from npt.postmortem.bundle import read_bundle
from npt.postmortem.replay import check_index, trace_again, verdict_lines
from npt.postmortem.restore import restored


@dataclass(frozen=True)
class BatchReplay:
    """One micro-batch in the bundle's state.

    fault: found before any computation, which is then left out. loss: mean per valid token.
    layer_nmse: by layer, likewise. gradient_norms: by tensor, of the summed loss.
    """

    micro_batch: int
    sample_ids: tuple[str, ...]
    tokens: int
    fault: str | None = None
    loss: float | None = None
    layer_nmse: Mapping[int, float] | None = None
    gradient_norms: Mapping[str, float] | None = None
    verdict: Verdict | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": None if self.verdict is None else self.verdict.as_dict()}

    def __str__(self) -> str:
        samples = ", ".join(self.sample_ids)
        head = f"micro-batch {self.micro_batch} (samples {samples}), {self.tokens} valid tokens"
        if self.loss is None or self.layer_nmse is None or self.gradient_norms is None:
            return f"{head}: {self.fault}; nothing is computed on it"
        width = max(map(len, self.gradient_norms))
        lines = [head, f"loss per token {self.loss:.6g}"]
        for index, nmse in self.layer_nmse.items():
            lines.append(f"layer {index:3} NMSE {nmse:.6g}")
        for name, norm in self.gradient_norms.items():
            lines.append(f"{name:{width}} gradient norm {norm:.6g}")
        return printable_lines([*lines, *verdict_lines(self.verdict)])


def replay_batch(
    folder: str | Path,
    micro_batch: int,
    *,
    model_name: str | None = None,
    device: str | torch.device | None = None,
) -> BatchReplay:
    """Compute one micro-batch of a bundle's window alone, in the bundle's state; arguments and
    errors as in `replay`.
    """
    bundle = read_bundle(folder)
    check_index(bundle, micro_batch)
    batch = bundle.window[micro_batch]
    with restored(bundle, model_name=model_name, device=device) as state:
        fault = find_fault(batch, state.model.config.vocab_size)
        if fault is not None:
            return BatchReplay(micro_batch, batch.sample_ids, batch.tokens, fault=fault)
        sums = state.fill(batch)
        norms = {
            name: float(torch.linalg.vector_norm(p.grad))
            for name, p in state.parameters.items()
            if p.grad is not None
        }
        norm = float(torch.linalg.vector_norm(torch.tensor([*norms.values()])))
        exploded = not math.isfinite(float(sums.loss) + norm)
        layers: dict[int, float] = {}
        if bundle.train_config.hidden_weight:
            indices = [index for index, _ in npt_layers(state.model)]
            layers = dict(zip(indices, (sums.layer_nmse / sums.tokens).tolist(), strict=True))
        return BatchReplay(
            micro_batch,
            batch.sample_ids,
            batch.tokens,
            loss=float(sums.loss) / sums.tokens,
            layer_nmse=layers,
            gradient_norms=norms,
            verdict=trace_again(state, micro_batch, exploded),
        )

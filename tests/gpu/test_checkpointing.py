"""Gradient checkpointing and logging on a card: the same bits, a lower peak, and no wait that was
not there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from windows import StudentStep

import npt
from faults.runs import NoTokenizer
from npt.adapters.converted import adapter_parameters
from npt.batch import Batch, batch_from_tensors
from npt.distill.strategies import drive
from npt.doctor.measure import peak_bytes
from npt.train.metrics import StepMetrics
from random_base import random_base

pytestmark = pytest.mark.gpu

PLAIN = npt.TrainConfig(strategy="end_to_end", logit_kl_weight=0.5, regularization_lambda=0.1)
CONFIGS = (PLAIN, replace(PLAIN, gradient_checkpointing=True))


def student(layers: int = 8) -> tuple[Any, Batch]:
    """D 256, F 1024, so that layers outweigh the rest, and a micro-batch of 4 x 256 tokens."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = random_base(config, quantization="nf4", device="cuda")
    npt.attach(model, npt.NPTConfig(rank=8, layers="all", additive_scale=1.0))
    ids = torch.randint(256, (4, 256), generator=torch.Generator().manual_seed(0))
    return model, batch_from_tensors(ids, torch.ones_like(ids)).to(torch.device("cuda"))


def filled(model: Any, batch: Batch, config: npt.TrainConfig) -> dict[str, Tensor]:
    parameters = adapter_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    sums = drive(model, batch, config)
    return {"report": sums.report, **{name: p.grad.clone() for name, p in parameters.items()}}


def test_losses_and_gradients_have_the_same_bits() -> None:
    model, batch = student()
    # Attention's backward may add in another order each time; only its deterministic form can be
    # compared bit for bit.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain, checkpointed = (filled(model, batch, config) for config in CONFIGS)
    for name, value in plain.items():
        assert torch.isfinite(value).all() and torch.equal(value, checkpointed[name]), name


def test_the_peak_falls() -> None:
    model, batch = student()
    peaks = []
    for config in CONFIGS:
        filled(model, batch, config)  # kernels have their own memory from here on
        peaks.append(peak_bytes(partial(drive, model, batch, config), "cuda"))
    # on the CPU 0.38: one layer's graph of eight, the states between them, and the logits
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "checkpointed"])
def test_a_step_waits_for_nothing(config: npt.TrainConfig) -> None:
    """The states of random numbers, which a checkpoint keeps and puts back, are the host's."""
    model, batch = student()
    step = StudentStep(model, drive, config, [1e-3])
    assert step.update.late
    for watched in (False, False, True):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        try:
            step.run([batch], check=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(result.applied and len(result.reports[0]) == 5 + 8 for result in step.guard.flush())


def test_logging_a_step_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, logged = StepMetrics.line, []

    def watched(metrics: StepMetrics, *arguments: Any) -> dict[str, Any]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            logged.append(line(metrics, *arguments))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return logged[-1]

    monkeypatch.setattr(StepMetrics, "line", watched)
    model, _ = student(2)
    rows = [{"input_ids": [3 + (7 * i + j) % 200 for j in range(12)]} for i in range(24)]
    config = replace(
        PLAIN,
        max_steps=6,
        batch_size=2,
        log_steps=1,
        eval_samples=2,
        output_dir=str(tmp_path / "run"),
    )
    npt.Trainer(model, NoTokenizer(), rows, config, eval_data=rows[:2]).train()
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6]

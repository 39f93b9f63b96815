"""Training on a GPU: flags read late change no bit, runs end, bundles replay. That its numbers are
the CPU's, section 6 of gpu_check.py says.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_student import micro_batch, student
from rich.console import Console
from torch import Tensor

import npt
from npt.adapters.converted import adapter_parameters
from npt.distill.local import BatchSums
from npt.distill.strategies import STRATEGIES
from npt.errors import TooManyRefusalsError
from npt.forensics.student import replay_student as replay
from npt.guard.outcome import MicroBatch as Added
from npt.guard.update import GuardedUpdate
from npt.guard.window import GradientWindow
from npt.hooks import unfused
from npt.recorder.statistics import summarise

pytestmark = pytest.mark.gpu


def run(late: bool, fault: Callable[[int], bool]) -> tuple[dict[str, Tensor], list]:
    model, _ = student()
    parameters = adapter_parameters(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, fused=True)
    rates = [1e-2, 8e-3, 6e-3, 4e-3]
    update = GuardedUpdate(parameters, optimizer, late)
    window_of: GradientWindow = GradientWindow(update, 0.5, rates)
    results = []
    for window in range(4):
        for index in range(2):
            number = 2 * window + index

            def fill(number: int = number) -> BatchSums:
                sums = STRATEGIES["local"](
                    model, micro_batch(number).to(torch.device("cuda")), npt.TrainConfig()
                )
                if fault(number):
                    next(iter(parameters.values())).grad.view(-1)[0] = float("nan")
                return sums

            window_of.gradients.withdraw()
            sums = fill()
            window_of.gradients.collect()
            window_of.add(Added(sums.loss, sums.tokens, sums.report, (str(number),)))
        results += window_of.commit()
    return {name: p.detach().clone() for name, p in parameters.items()}, results + window_of.flush()


def test_flags_read_late_leave_the_bits_of_flags_read_at_once() -> None:
    weights, results = zip(
        *(run(late, lambda number: number in (2, 4, 5)) for late in (False, True)), strict=True
    )
    assert (
        [r.applied for r in results[1]]
        == [r.applied for r in results[0]]
        == [True, True, False, True]
    )
    assert [r.steps for r in results[1]] == [1, 2, 2, 3]
    assert [r.rate for r in results[1]] == [r.rate for r in results[0]]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("strategy", ["local", "propagated", "end_to_end"])
def test_fused_layers_are_the_plain_ones_on_a_gpu(strategy: str) -> None:
    model, _ = student()
    batch = micro_batch(0).to(torch.device("cuda"))
    results = []
    for plain in (True, False):
        for parameter in adapter_parameters(model).values():
            parameter.grad = None
        config = npt.TrainConfig(strategy=strategy, regularization_lambda=0.3)
        with unfused() if plain else contextlib.nullcontext():
            sums = STRATEGIES[strategy](model, batch, config)
        results.append([sums.loss, sums.reg, *(p.grad for p in adapter_parameters(model).values())])
    for found, expected in zip(results[1], results[0], strict=True):
        # fp32 sums of some hundred terms in other blocks, carried through eight layers
        assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_a_run_on_a_gpu_ends_below_where_it_started(tmp_path: Path) -> None:
    model, tokenizer = student()
    config = npt.TrainConfig(
        max_steps=40,
        batch_size=8,
        learning_rate=1e-2,
        log_steps=1,
        eval_samples=8,
        output_dir=str(tmp_path / "run"),
    )
    result = npt.Trainer(
        model, tokenizer, None, config, console=Console(file=io.StringIO())
    ).train()
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert result.steps == 40 and result.refused == 0
    # 0.15 of it on the CPU, from which other kernels part within some dozen steps
    assert losses[-1] < 0.5 * losses[0]


def test_a_bundle_of_a_run_on_a_gpu_replays_there(tmp_path: Path) -> None:
    model, tokenizer = student()
    rows = [tuple(3 + (7 * i + j) % 2000 for j in range(12)) for i in range(24)]
    trainer = npt.Trainer(
        model,
        tokenizer,
        [{"input_ids": row} for row in rows],
        npt.TrainConfig(
            batch_size=2, max_consecutive_bad=4, smoke_test=False, output_dir=str(tmp_path / "run")
        ),
        data_config=npt.DataConfig(max_length=16),
        eval_data=[{"input_ids": list(range(5, 15))}],
        console=Console(file=io.StringIO()),
    )
    strategy, calls = trainer.strategy, iter(range(1000))

    def poisoning(*arguments):
        if next(calls) == 3:
            model.get_parameter("model.layers.5.npt.A").data[0, 1] = float("nan")
        return strategy(*arguments)

    trainer.strategy = poisoning
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (tmp_path / "run" / "postmortem").iterdir()
    before = torch.cuda.get_rng_state()
    found = replay(bundle)
    assert found.classification == "state" and found.reproduced and found.device.startswith("cuda")
    assert "model.layers.5.npt.A[0, 1] is nan" in str(found.findings["weights"])
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]
)
def test_statistics_on_a_gpu_are_those_on_a_cpu(dtype: torch.dtype) -> None:
    values = (torch.randn(4, 8, 33, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    if dtype.is_floating_point:
        values[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    valid = torch.ones(4, 8, dtype=torch.bool)
    valid[2, 5:] = False
    # Both sum in fp32 or better, in different orders.
    for mask in (None, valid):
        torch.testing.assert_close(
            summarise(values.cuda(), mask).cpu(),
            summarise(values, mask),
            rtol=1e-5,
            atol=1e-4,
            equal_nan=True,
        )

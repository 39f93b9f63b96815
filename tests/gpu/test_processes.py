"""Processes on GPUs: over NCCL nothing hangs beyond the timeout, GPUs are told apart, a base is
shared.
"""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from several import several, values

import npt
from npt.adapters.converted import adapter_parameters
from npt.base.layers import real_layers
from npt.distill.strategies import STRATEGIES
from npt.distributed.processes import ProcessGroup
from npt.runs.checkpoint import read_checkpoint

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process starts CUDA and NCCL, and torch's watchdog takes its time to end one."""
    monkeypatch.setattr("several.DEADLINE", 240.0)


def trained(
    processes: ProcessGroup, out: str, plant: str = "", sharded: bool = False
) -> dict[str, Any]:
    """A run of 8 steps; before its fifth micro-batch process 1 does what `plant` says."""
    model, tokenizer = npt.load_base(
        "tiny", quantization="nf4", device=processes.device, layers_later=sharded
    )
    npt.attach(model, npt.NPTConfig(rank=8, additive_scale=1.0), seed=0)
    torch.cuda.reset_peak_memory_stats()
    if sharded:
        npt.shard_base(model, processes)
    trainer = npt.Trainer(
        model,
        tokenizer,
        [{"input_ids": [3 + (11 * i + 7 * j) % 2000 for j in range(24)]} for i in range(64)],
        npt.TrainConfig(
            batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=8,
            log_steps=1,
            smoke_test=False,
            output_dir=out,
        ),
        data_config=npt.DataConfig(max_length=32),
        eval_data=[{"input_ids": list(range(5, 25))}],
        console=Console(file=io.StringIO()),
        processes=processes,
    )
    calls = iter(range(10**6))

    def planting(*arguments: Any) -> Any:
        if next(calls) == 5 and processes.index == 1:
            if plant == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if plant == "raise":
                raise KeyError("a planted error")
            if plant == "sleep":
                time.sleep(30)
        return STRATEGIES["local"](*arguments)

    trainer.strategy = planting
    result = trainer.train()
    return {
        "steps": result.steps,
        "weights": {
            name: p.detach().cpu().numpy() for name, p in adapter_parameters(model).items()
        },
        "perplexity": result.fidelity.student.perplexity,
        "peak": torch.cuda.max_memory_allocated(),
    }


# --- a process that is lost
# ---------------------------------------------------------------------------------------------


@two_gpus
@pytest.mark.parametrize("plant", ["kill", "sleep"])
def test_a_lost_process_ends_the_other_and_every_checkpoint_is_whole(
    tmp_path: Path, plant: str
) -> None:
    left, lost = several(2, trained, str(tmp_path / "run"), plant=plant, timeout=10.0)
    # torch's watchdog, or an exchange of the hosts that comes to its end first
    assert left.status in (-signal.SIGABRT, 6) and lost.status != 0, left.trace
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert 0 < read_checkpoint(checkpoint).step < 8


@two_gpus
def test_an_error_on_one_process_is_the_error_of_both(tmp_path: Path) -> None:
    left, failed = several(2, trained, str(tmp_path / "run"), plant="raise", timeout=120.0)
    assert (
        failed.kind == "KeyError"
        and left.kind == "ProcessError"
        and "KeyError: 'a planted error'" in str(left.error)
    )


# --- who computes where
# ----------------------------------------------------------------------------------------------


def nothing(processes: ProcessGroup) -> str:
    return str(processes.device)


@two_gpus
def test_every_process_has_a_gpu_of_its_own() -> None:
    assert values(several(2, nothing)) == ["cuda:0", "cuda:1"]


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="takes exactly one GPU")
def test_two_processes_on_the_only_gpu_are_refused_by_name() -> None:
    for ended in several(2, nothing):
        assert ended.kind == "ConfigError" and "the processes use the GPUs" in str(ended.error), (
            ended.trace
        )


# --- a base that is shared
# --------------------------------------------------------------------


def test_layers_that_are_read_in_turn_are_those_of_the_whole_base() -> None:
    expected, _ = npt.load_base("tiny", quantization="nf4", device="cuda")
    later, _ = npt.load_base("tiny", quantization="nf4", device="cuda", layers_later=True)
    assert all(layer.mlp.up_proj.weight.is_cuda for _, layer in real_layers(later, later.device))
    assert npt.base_hash(later) == npt.base_hash(expected)


@two_gpus
def test_a_run_on_a_base_shared_by_two_gpus_is_that_on_a_whole_one(tmp_path: Path) -> None:
    whole, sharded = (
        values(several(2, trained, str(tmp_path / name), sharded=name == "sharded"))
        for name in ("whole", "sharded")
    )
    for one, other in zip(whole, sharded, strict=True):
        assert one["steps"] == other["steps"] == 8
        # The same kernels on the same codes; what a kernel sums in no fixed order may differ in the
        # last bits.
        assert one["perplexity"] == pytest.approx(other["perplexity"], rel=1e-4)
    for name, value in sharded[0]["weights"].items():
        assert value.tobytes() == sharded[1]["weights"][name].tobytes(), name

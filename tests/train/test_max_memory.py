"""`max_memory`: what is computed at once fits, and what is computed is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import Runs, events, lines, records, strict
from torch import nn

import npt
from npt.data.batch import Batch
from npt.errors import ConfigError
from npt.evaluation import evaluate as evaluation
from npt.planning import memory
from npt.planning.memory import PHASES, Workload
from npt.train import trainer as trainer_module


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> nn.Module:
    return npt.load_base(str(tiny_folder), quantization="nf4", device="cpu")[0]


@pytest.fixture
def runs(base: nn.Module, tmp_path: Path) -> Runs:
    """22 records over two epochs in micro-batches of four, three a window: the last one of an epoch
    has two.
    """
    settings = {
        "batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_epochs": 2,
        "scheduler_type": "constant",
        "save_steps": 1,
    }
    return Runs(base, tmp_path, data=lambda: records(22), settings=settings)


@pytest.fixture
def limit(runs: Runs) -> Callable[[int], str]:
    """`limit(n)`: a size that n samples at once fit into, and no more."""
    workloads: list[Workload] = []

    class Kept(Workload):
        def fitting(self, limit: int) -> Any:
            workloads.append(self)
            return super().fitting(limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "Workload", Kept)
        runs.trainer(None, max_memory="1GiB")
    (planned,) = workloads[-1:]
    return lambda samples: str(planned.plan(samples).peak)


def test_a_memory_limit_changes_neither_windows_nor_learning(runs: Runs, limit: Any) -> None:
    seen: dict[str, list[Any]] = {}
    sizes: dict[str, list[int]] = {}
    for name, more in (("free", {}), ("limited", {"max_memory": limit(2)})):
        seen[name], sizes[name] = [], []

        def act(number: int, batch: Batch, name: str = name) -> None:
            seen[name] += batch.sample_ids
            sizes[name].append(len(batch.sample_ids))

        runs.run(name, act, **more)
    assert seen["free"] == seen["limited"]
    assert sizes["free"] == [4, 4, 4, 4, 4, 2] * 2 and sizes["limited"] == [2] * 22
    free, limited = runs.outcome("free"), runs.outcome("limited")
    for key in ("step", "tokens", "micro_batches", "position", "counted_from"):
        assert free.state[key] == limited.state[key], key
    for name, tensor in free.tensors.items():
        if tensor.dtype == torch.float32:
            # Sums of fp32 in another order; where a gradient is nearly 0 Adam turns that into part
            # of a step of 1e-2.
            assert (tensor - limited.tensors[name]).abs().max() < 4e-3, name


def test_the_plan_is_on_record(runs: Runs, limit: Any) -> None:
    size = limit(2)
    runs.run("run", max_memory=size)
    recorded = strict(runs.place / "run" / "run.json")
    (event,) = events(runs.place / "run", "memory")
    assert recorded["settings"]["max_memory"] == event["max_memory"] == size
    assert recorded["memory"]["samples_at_once"] == event["samples_at_once"] == 2
    assert recorded["memory"]["peak_bytes"] <= int(size)
    assert set(recorded["memory"]["phases"]) == set(PHASES)
    assert f"--max_memory {size}: 2 of 4 samples at once, predicted peak" in runs.said.getvalue()
    assert events(runs.place / "run", "out_of_memory") == []


def test_a_run_resumed_under_another_limit_keeps_its_data(runs: Runs, limit: Any) -> None:
    seen: list[str] = []
    runs.run("free", lambda number, batch: seen.extend(batch.sample_ids))
    again: list[str] = []
    runs.run(
        "run",
        lambda number, batch: again.extend(batch.sample_ids),
        max_memory=limit(1),
        max_steps=1,
    )
    runs.run(
        "run",
        lambda number, batch: again.extend(batch.sample_ids),
        max_memory=limit(3),
        max_steps=2,
        resume="auto",
    )
    runs.run("run", lambda number, batch: again.extend(batch.sample_ids), resume="auto")
    assert again == seen
    # three at once would be in two parts as well
    assert [e["samples_at_once"] for e in events(runs.place / "run", "memory")] == [1, 2]
    assert [line["tokens"] for line in lines(runs.place / "run", "metrics")] == [
        e["tokens"] for e in lines(runs.place / "free", "metrics")
    ]


def test_lack_of_memory_is_remembered_under_the_same_limit_only(runs: Runs, limit: Any) -> None:
    size = limit(4)

    def act(number: int, batch: Batch) -> None:
        if len(batch.sample_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for folder, now, expected in (("same", size, {1}), ("other", limit(3), {2})):
        runs.run(folder, act, max_memory=size, max_steps=1)
        sizes: list[int] = []
        runs.run(
            folder,
            lambda number, batch, sizes=sizes: sizes.append(len(batch.sample_ids)),
            max_memory=now,
            resume="auto",
        )
        assert set(sizes) == expected


def test_one_sample_that_does_not_fit_is_refused_in_one_line(runs: Runs) -> None:
    with pytest.raises(
        ConfigError, match=r"--max_memory is 100KiB, but one sample of 12 tokens .*most of it"
    ) as caught:
        runs.trainer("run", max_memory="100KiB")
    assert "\n" not in str(caught.value) and not (runs.place / "run").exists()


def test_the_smoke_test_and_evaluations_keep_to_the_limit(
    runs: Runs, limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, smoke_test, sizes = evaluation.evaluate, trainer_module.smoke_test, []
    monkeypatch.setattr(
        evaluation,
        "evaluate",
        lambda *a, batch_size, **k: (
            sizes.append(batch_size) or evaluate(*a, batch_size=batch_size, **k)
        ),
    )
    monkeypatch.setattr(
        trainer_module,
        "smoke_test",
        lambda model, batch, *a: sizes.append(len(batch.input_ids)) or smoke_test(model, batch, *a),
    )
    runs.run("run", max_memory=limit(2), smoke_test=True, max_steps=2, eval_steps=1)
    assert len(sizes) == 4 and max(sizes) <= 2

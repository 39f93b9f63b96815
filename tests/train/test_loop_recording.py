"""Chosen steps of a run are recorded: what is written and said, and that the run is the same."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from resumed_runs import without_report
from rich.console import Console
from torch import Tensor, nn

import npt
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.data.batch import Batch
from npt.diagnostics.recorder.record import Record
from npt.diagnostics.recorder.recorder import Recorder
from npt.distill.local import MicroBatch
from npt.distill.strategies import STRATEGIES
from npt.errors import TooManyRefusalsError
from npt.step import train_step as step_module
from npt.step.train_step import TrainStep
from npt.train import observers
from npt.train import trainer as trainer_module
from npt.train.trainer import Trainer


def texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    source = random.Random(seed)
    return [
        {"text": "".join(source.choices("abcdefgh", k=source.randint(5, 9))), "id": f"text-{i}"}
        for i in range(count)
    ]


@pytest.fixture
def build(
    load_model: Callable[..., nn.Module], tokenizer: Any, tmp_path: Path
) -> Callable[..., Trainer]:
    """A trainer on a fresh student: 6 steps of one micro-batch, or fewer of more."""

    def make(data: list[Any] | None = None, folder: str = "run", **config: Any) -> Trainer:
        model = load_model()
        npt.attach(model, NPTConfig(rank=4, layers="1,3"))
        settings = {
            "batch_size": 2,
            "log_steps": 1,
            "learning_rate": 1e-2,
            "smoke_test": False,
            "output_dir": str(tmp_path / folder),
        }
        trainer = Trainer(
            model,
            tokenizer,
            texts(12) if data is None else data,
            TrainConfig(**{**settings, **config}),
            data_config=DataConfig(max_length=12),
            eval_data=texts(2, seed=9),
            console=Console(file=io.StringIO(), width=300),
        )
        return without_report(trainer)

    return make


@pytest.fixture(autouse=True)
def drawn(monkeypatch) -> list[list[int]]:
    """The steps that are handed to the part that draws, which is replaced."""
    calls: list[list[int]] = []
    picture = ModuleType("npt.diagnostics.recorder.picture")

    def write_pictures(records: list[Record], folder: Path) -> list[Path]:
        calls.append([record.step for record in records])
        (folder / "trace.html").write_text("drawn")
        return [folder / "trace.html"]

    picture.write_pictures = write_pictures
    monkeypatch.setitem(sys.modules, "npt.diagnostics.recorder.picture", picture)
    monkeypatch.setattr(sys.modules["npt.diagnostics.recorder"], "picture", picture, raising=False)
    return calls


def act_before(
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[int, nn.Module, Batch], None],
    after: bool = False,
) -> None:
    """The local strategy, with `act(number of the call, model, batch)` before or after it."""
    original = STRATEGIES["local"]
    calls = iter(range(10**6))

    def strategy(
        model: nn.Module, batch: Batch, config: TrainConfig, teacher: Any = None
    ) -> MicroBatch:
        number = next(calls)
        if not after:
            act(number, model, batch)
        sums = original(model, batch, config, teacher)
        if after:
            act(number, model, batch)
        return sums

    monkeypatch.setitem(STRATEGIES, "local", strategy)


def said(trainer: Trainer) -> list[str]:
    return trainer.setup.console.file.getvalue().splitlines()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def records(folder: Path) -> dict[int, Record]:
    files = sorted((folder / "trace").glob("step-*.json"))
    found = {int(path.stem[5:]): Record.from_dict(json.loads(path.read_text())) for path in files}
    assert all(record.step == step for step, record in found.items())
    return found


def weights(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in adapter_parameters(trainer.setup.model).values()]


def poison(layer: int = 1) -> Callable[[nn.Module], Any]:
    """A hook that makes the input of a layer's attention NaN, once."""

    def plant(model: nn.Module) -> None:
        def once(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            handle.remove()
            return torch.full_like(output, float("nan"))

        handle = model.model.layers[layer].input_layernorm.register_forward_hook(once, prepend=True)

    return plant


# --- what is written and said
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_chosen_steps_are_files_events_lines_and_pictures(build, drawn, strategy) -> None:
    trainer = build(trace_steps="1,3-4", trace_every=6, strategy=strategy)
    result = trainer.train()
    assert result.steps == 6
    trace = result.folder / "trace"
    files = [f"step-0000000{step}.json" for step in (1, 3, 4, 6)]
    assert sorted(path.name for path in trace.iterdir()) == [*files, "trace.html"]
    found = records(result.folder)
    assert all(record.micro_batch == 0 and len(record.rows) > 100 for record in found.values())
    assert all(row.finite for record in found.values() for row in record.rows)
    noted = events(result.folder, "trace")
    assert [(e["step"], e["micro_batch"], e["rank"], e["file"]) for e in noted] == [
        (step, 0, 0, f"trace/step-0000000{step}.json") for step in (1, 3, 4, 6)
    ]
    assert all(e["rows"] == len(found[e["step"]].rows) and e["skipped"] == [] for e in noted)
    lines = said(trainer)
    assert (
        "recording steps 1,3-4 and every 6th step, of each the first micro-batch on process 0 only,"
        f" into {trace}" in lines
    )
    for event in noted:
        assert event["message"] in lines
        where = (
            f"recorded step {event['step']} (micro-batch 0, process 0) in"
            f" {result.folder / event['file']}"
        )
        assert event["message"].startswith(f"{where}: all {event['rows']} tensors finite")
    assert drawn == [[1, 3, 4, 6]]
    assert events(result.folder, "pictures")[0]["files"] == ["trace/trace.html"]
    assert lines.index(f"pictures of the recorded steps: {trace / 'trace.html'}") > lines.index(
        noted[-1]["message"]
    )


def test_padding_is_left_out(build) -> None:
    batches: list[Batch] = []
    trainer = build(trace_every=1)
    original = trainer.setup.strategy
    trainer.setup.strategy = lambda model, batch, config: (
        batches.append(batch) or original(model, batch, config)
    )
    trainer.train()
    number, batch = next((number, batch) for number, batch in enumerate(batches) if batch.padded)
    record = list(records(trainer.folder_path).values())[number]
    row = next(row for row in record.rows if row.name == "model.layers.1.input_layernorm out")
    assert row.shape[:2] == batch.input_ids.shape and row.count == batch.tokens * 64


def test_of_a_window_only_the_first_micro_batch_is_watched(build, monkeypatch) -> None:
    watched: list[bool] = []
    act_before(
        monkeypatch,
        lambda number, model, batch: watched.append(
            npt_layers(model)[0][1].npt.observer is not None
        ),
    )
    build(trace_steps="2", gradient_accumulation_steps=3).train()
    assert watched == [False, False, False, True, False, False]


def test_if_the_first_micro_batch_fails_the_second_is_recorded(build, monkeypatch) -> None:
    numbers = iter(range(100))
    monkeypatch.setattr(
        step_module,
        "find_fault",
        lambda batch, vocabulary: "token id out of range" if next(numbers) == 2 else None,
    )
    trainer = build(trace_steps="1,2", gradient_accumulation_steps=2)
    result = trainer.train()
    assert result.refused == 1 and result.steps == 3
    assert {step: record.micro_batch for step, record in records(result.folder).items()} == {
        1: 0,
        2: 1,
    }
    assert [(event["step"], event["micro_batch"]) for event in events(result.folder, "trace")] == [
        (1, 0),
        (2, 1),
    ]


def test_a_refused_micro_batch_is_recorded_with_what_was_wrong(build, monkeypatch) -> None:
    plant = poison()
    act_before(monkeypatch, lambda number, model, batch: plant(model) if number == 2 else None)
    trainer = build(trace_steps="3")
    result = trainer.train()
    assert result.refused == 1 and result.steps == 5
    (record,) = records(result.folder).values()
    first = next(row for row in record.rows if not row.finite)
    assert first.name == "model.layers.1.input_layernorm out" and first.rms is None
    # the window that became step 3 in the end is not recorded as well
    (event,) = events(result.folder, "trace")
    assert (
        "tensors are not finite, the first: model.layers.1.input_layernorm out" in event["message"]
    )


def test_steps_that_the_run_does_not_reach_are_said(build) -> None:
    trainer = build(trace_steps="2,9", max_steps=3)
    trainer.train()
    assert any(
        "--trace_steps names step 9, but the run has 3 steps" in line for line in said(trainer)
    )
    assert list(records(trainer.folder_path)) == [2]


# --- the run is the same
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "late"), [("local", True), ("end_to_end", False)])
def test_weights_and_metrics_are_bit_equal_with_and_without_recording(
    build, monkeypatch, strategy, late
) -> None:
    monkeypatch.setattr(trainer_module, "TrainStep", functools.partial(TrainStep, late=late))
    settings = {
        "strategy": strategy,
        "regularization_lambda": 0.1,
        "gradient_accumulation_steps": 2,
    }
    plain, traced = (
        build(folder="plain", **settings),
        build(folder="traced", trace_every=1, **settings),
    )
    plain.train()
    traced.train()
    assert list(records(traced.folder_path)) == [1, 2, 3]
    assert all(
        torch.equal(one, other) for one, other in zip(weights(plain), weights(traced), strict=True)
    )

    def metrics(trainer: Trainer) -> list[dict[str, Any]]:
        lines = (trainer.folder_path / "metrics.jsonl").read_text().splitlines()
        return [
            {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"}
            for line in lines
        ]

    assert metrics(plain) == metrics(traced)


def test_with_late_results_a_record_bears_its_windows_step(build, monkeypatch) -> None:
    monkeypatch.setattr(trainer_module, "TrainStep", functools.partial(TrainStep, late=True))
    seen: list[tuple[str, ...]] = []
    act_before(
        monkeypatch,
        lambda number, model, batch: seen.append(batch.sample_ids) if _observed(model) else None,
    )
    trainer = build(trace_steps="2,5")
    used: list[tuple[str, ...]] = []
    original = trainer.setup.strategy
    trainer.setup.strategy = lambda model, batch, config: (
        used.append(batch.sample_ids) or original(model, batch, config)
    )
    trainer.train()
    assert seen == [used[1], used[4]] and list(records(trainer.folder_path)) == [2, 5]


def _observed(model: nn.Module) -> bool:
    return npt_layers(model)[0][1].npt.observer is not None


def test_without_chosen_steps_nothing_is_recorded_or_written(build, monkeypatch, drawn) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a recorder was made")

    monkeypatch.setattr(observers, "Recorder", refuse)
    trainer = build()
    result = trainer.train()
    assert not (result.folder / "trace").exists() and drawn == []
    assert not any("record" in line for line in said(trainer))


# --- an observer ends nothing
# ----------------------------------------------------------------------------------------


def test_a_recorder_that_fails_is_an_event_and_the_run_is_the_same(build, monkeypatch) -> None:
    plain = build(folder="plain", max_steps=4)
    plain.train()

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    for failing in ("__enter__", "record"):
        with monkeypatch.context() as patched:
            patched.setattr(Recorder, failing, broken)
            trainer = build(folder=failing, trace_steps="2-3", max_steps=4)
            result = trainer.train()
        assert result.steps == 4 and not _observed(trainer.setup.model)
        messages = [event["message"] for event in events(result.folder, "trace")]
        assert messages == [
            f"step {step} could not be recorded: OSError: no space left on device"
            for step in (2, 3)
        ]
        assert set(messages) <= set(said(trainer))
        assert all(
            torch.equal(one, other)
            for one, other in zip(weights(plain), weights(trainer), strict=True)
        )


def test_pictures_that_cannot_be_drawn_end_nothing(build, monkeypatch) -> None:
    def broken(*_: Any) -> None:
        raise ImportError("no module named matplotlib")

    monkeypatch.setattr(sys.modules["npt.diagnostics.recorder.picture"], "write_pictures", broken)
    trainer = build(trace_steps="1")
    result = trainer.train()
    assert result.steps == 6 and list(records(result.folder)) == [1]
    (event,) = events(result.folder, "pictures")
    assert event["files"] == [] and event["message"].endswith(
        "could not be drawn: ImportError: no module named matplotlib"
    )


def test_a_strategy_that_fails_under_the_recorder_leaves_no_hook(build, monkeypatch, drawn) -> None:
    def fail(number: int, model: nn.Module, batch: Batch) -> None:
        if number == 3:
            raise ZeroDivisionError

    act_before(monkeypatch, fail, after=True)
    trainer = build(trace_every=1)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not _observed(trainer.setup.model)
    assert (
        sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in trainer.setup.model.modules()
        )
        == 0
    )
    assert drawn == [[1, 2, 3]]


def test_a_run_that_gives_up_has_its_pictures(build, monkeypatch, drawn) -> None:
    plant = poison()
    act_before(monkeypatch, lambda number, model, batch: plant(model) if number >= 2 else None)
    trainer = build(trace_steps="2-4", max_consecutive_bad=2)
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    assert drawn == [[2, 3]] and (trainer.folder_path / "trace" / "trace.html").exists()


def test_a_run_that_a_signal_ends_has_its_pictures(build, monkeypatch, drawn) -> None:
    def interrupt(number: int, model: nn.Module, batch: Batch) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    act_before(monkeypatch, interrupt)
    trainer = build(trace_every=1)
    assert trainer.train().signal == signal.SIGTERM
    assert drawn[0][:3] == [1, 2, 3] and len(drawn) == 1


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)

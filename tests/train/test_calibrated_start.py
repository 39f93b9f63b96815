"""Runs with a calibrated start: solved once, on training data alone, before the first
evaluation.
"""

import io
import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import Stream, acting, at, events, without_report
from rich.console import Console

import npt
from npt.adapters.converted import adapter_parameters, attached_config
from npt.batch import Sample
from npt.calibration import calibrate as starting
from npt.cli.main import main
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.errors import ConfigError
from npt.train.trainer import Trainer


def texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    source = random.Random(seed)
    return [
        {"text": "".join(source.choices("abcdefgh", k=20)), "id": f"text-{i}"} for i in range(count)
    ]


@pytest.fixture
def build(load_model: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Callable[..., Trainer]:
    """A trainer of layers 1 and 3 with a calibrated start, if nothing else is said."""
    usual = {"rank": 4, "layers": "1,3", "init": "calibrated", "additive_scale": 1.0}
    quick = {"batch_size": 2, "log_steps": 1, "learning_rate": 1e-4, "max_steps": 2}
    quick |= {"calibration_tokens": 200, "smoke_test": False, "eval_samples": 2}

    def make(
        data: Any = None,
        *,
        model: Any = None,
        form: dict[str, Any] | None = None,
        eval_data: Any = None,
        **config: Any,
    ) -> Trainer:
        if model is None:
            model = load_model()
            npt.attach(model, NPTConfig(**{**usual, **(form or {})}))
        trainer = Trainer(
            model,
            tokenizer,
            texts(60) if data is None else data,
            TrainConfig(**{"output_dir": str(tmp_path / "run"), **quick, **config}),
            data_config=DataConfig(max_length=24, streaming=isinstance(data, Iterator)),
            eval_data=eval_data,
            console=Console(file=io.StringIO(), width=200),
        )
        return without_report(trainer)

    return make


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in adapter_parameters(trainer.setup.model).items()}


def assert_same_weights(one: Trainer, other: Trainer) -> None:
    expected = weights(other)
    assert all(torch.equal(value, expected[name]) for name, value in weights(one).items())


def order_of(trainer: Trainer, epoch: int = 0) -> list[str]:
    return [sample.id for sample in trainer.data.loader.samples.epoch(epoch)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[Sample]]:
    """The samples that each calibration was given."""
    found: list[list[Sample]] = []
    original = starting.calibrate

    def calibrate(model: Any, tokenizer: Any, data: Any, *arguments: Any, **options: Any) -> Any:
        found.append(list(data))
        return original(model, tokenizer, found[-1], *arguments, **options)

    monkeypatch.setattr(starting, "calibrate", calibrate)
    return found


def test_a_calibration_out_of_memory_begins_again_in_smaller_batches(build, monkeypatch) -> None:
    trainer = build(batch_size=4, max_steps=1)
    trainer.setup.splitter.samples = 2
    before, sizes, original = weights(trainer), list[int](), starting.calibrate

    def calibrate(model: Any, *arguments: Any, batch_size: int, **options: Any) -> Any:
        sizes.append(batch_size)
        assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
        if batch_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(model, *arguments, batch_size=batch_size, **options)

    monkeypatch.setattr(starting, "calibrate", calibrate)
    trainer.train()
    assert sizes == [2, 1]
    assert trainer.calibration is not None and trainer.setup.splitter.samples == 2
    assert "the calibration: out of memory with 2 samples" in trainer.setup.console.file.getvalue()


def test_the_calibrated_student_is_what_a_run_calls_initial(build) -> None:
    trainer = build()
    result = trainer.train()
    assert result.fidelity.initial.kl < 0.7 * result.fidelity.floor.kl
    record = json.loads((result.folder / "run.json").read_text())["calibration"]
    assert record["tokens"] in (199, 200) and set(record["layers"]) == {"1", "3"}
    (event,) = events(result.folder, "calibration")
    assert event["layers"] == record["layers"]
    assert "Attention cut to R directions" in trainer.setup.console.file.getvalue()


def test_held_out_samples_are_never_calibrated_on(build, calls) -> None:
    build(max_steps=1, calibration_tokens=1000).train()
    (given,) = calls
    assert len(given) > 40 and not any(sample.heldout for sample in given)


def seen_by(trainer: Trainer) -> list[str]:
    """The samples that training computes, in order."""
    found: list[str] = []
    strategy = trainer.strategy

    def watching(model: Any, batch: Any, config: TrainConfig) -> Any:
        found.extend(batch.sample_ids)
        return strategy(model, batch, config)

    trainer.strategy = watching
    trainer.train()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_training_begins_after_the_samples_of_the_start(build, calls, stream) -> None:
    more = {"eval_data": texts(2, seed=1), "data": Stream(texts(60))} if stream else {}
    trainer = build(**more)
    solved_on, seen = calls, seen_by(trainer)
    (given,) = ([sample.id for sample in samples] for samples in solved_on)
    assert [*given, *seen] == order_of(trainer)[: len(given) + 4]  # two steps of two
    said = trainer.setup.console.file.getvalue()
    begins = f"training skips the {len(given)} samples that calibration used"
    assert said.count(begins) == 1
    assert events(trainer.setup.origin.folder, "calibration")[0]["passed_over"] == len(given)


def test_a_sample_outside_the_vocabulary_is_skipped(build, calls) -> None:
    data = [
        {"input_ids": [3 + (7 * i + j) % 100 for j in range(20)], "id": f"r{i}"} for i in range(60)
    ]
    order = order_of(build(data, eval_data=texts(2)))
    bad = next(record for record in data if order[2].startswith(f"{record['id']}@"))
    bad["input_ids"][3] = 10**6
    seen = seen_by(build(data, eval_data=texts(2)))
    given = [sample.id for sample in calls[0]]
    assert given == [id for id in order[: len(given) + 1] if id != order[2]]
    assert seen == order[len(given) + 1 :][:4]


@pytest.mark.parametrize("stream", [False, True])
def test_data_too_short_to_leave_out_are_trained_on_from_the_start(build, calls, stream) -> None:
    """A list keeps nine tenths of its steps at least; a stream must only continue after them."""
    few = texts(14)
    settings = {"eval_data": texts(2, seed=1), "max_steps": None, "calibration_tokens": 2000}
    trainer = build(Stream(few) if stream else few, **settings)
    seen = seen_by(trainer)
    assert seen == order_of(trainer) and trainer.data.total_steps in (7, None)
    said = trainer.setup.console.file.getvalue()
    assert "begins after" not in said
    assert said.count("the first losses are on them") == 1


def test_only_the_first_epoch_leaves_calibration_samples_out(build, calls) -> None:
    settings = {"eval_data": texts(2, seed=1), "num_epochs": 2, "batch_size": 8}
    trainer = build(texts(80), max_steps=None, **settings)
    first, second = order_of(trainer), order_of(trainer, 1)
    seen = seen_by(trainer)
    (given,) = calls
    assert 5 < len(given) < 20 and seen == [*first[len(given) :], *second]
    metrics = (trainer.setup.origin.folder / "metrics.jsonl").read_text().splitlines()
    assert trainer.data.total_steps == len(metrics)


def test_a_run_that_is_taken_up_counts_what_was_left_out(build, calls, tmp_path) -> None:
    """Neither are those trained on then, nor is the run longer."""
    settings = {"num_epochs": 2, "eval_data": texts(2, seed=1), "save_steps": 3, "batch_size": 4}
    settings |= {"calibration_tokens": 110, "max_steps": None}
    whole = build(texts(32), output_dir=str(tmp_path / "whole"), **settings)
    seen = seen_by(whole)
    assert len(seen) < 2 * 32
    part = acting(build(texts(32), **settings), at(4))
    assert part.train().signal == signal.SIGTERM
    again = build(texts(32), resume="auto", **settings)
    assert again.data.total_steps == whole.data.total_steps
    rest = seen_by(again)
    assert seen[-len(rest) :] == rest
    assert_same_weights(again, whole)


def test_calibrated_or_loaded_adapters_are_trained_as_they_are(
    build, load_model, calls, tokenizer, tmp_path
) -> None:
    solved, loaded = load_model(), load_model()
    npt.attach(solved, NPTConfig(rank=4, layers="1,3", init="calibrated"))
    npt.calibrate(solved, tokenizer, texts(20), 200, batch_size=2)
    npt.save_adapter(solved, tmp_path / "adapter")
    npt.load_adapter(loaded, tmp_path / "adapter")
    calls.clear()
    for name, model in (("solved", solved), ("loaded", loaded)):
        assert attached_config(model).init == "calibrated"
        build(model=model, output_dir=str(tmp_path / name), max_steps=1).train()
    assert not calls


@pytest.mark.parametrize("form", [{}, {"rank": 8, "active": 3, "token_rank": 4}], ids=str)
def test_a_resumed_run_is_not_calibrated_again(build, calls, tmp_path, form) -> None:
    """Two runs of the same seed that are each solved for themselves, one of them in two parts."""
    settings = {"save_steps": 1, "scheduler_type": "constant", "form": form}
    whole = build(max_steps=2, output_dir=str(tmp_path / "whole"), **settings)
    whole.train()
    record = build(max_steps=1, **settings).train().folder / "run.json"
    solved = json.loads(record.read_text())["calibration"]
    assert len(calls) == 2 and solved["layers"]
    again = build(max_steps=2, resume="auto", **settings)
    result = again.train()
    assert json.loads(record.read_text())["calibration"] == solved
    assert len(calls) == 2 and result.fidelity.initial.kl < 0.7 * result.fidelity.floor.kl
    assert_same_weights(again, whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": iter(()), "eval_data": texts(2)}, "can be read only once; .*--init random"),
        ({"form": {"residual": "keep"}}, "residual keep"),
    ],
)
def test_what_no_start_can_be_fitted_to_is_refused(build, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**settings)


SMALL = (
    "pretrain --use_quantization --init calibrated --calibration_tokens 200 --max_length 32"
    " --layers 6-7 --adapter_rank 8 --batch_size 2 --eval_samples 2 --no_smoke_test --log_steps 1"
    " --save_steps 1 --safe_mode"
)


@pytest.mark.usefixtures("short_library")
def test_ranks_are_given_out_by_the_command_line_and_held_to_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    arguments = [*SMALL.split(), "--output_dir", str(folder)]
    assert main([*arguments, "--max_steps", "1"]) == 0
    said = capsys.readouterr().out
    assert said.index("Attention cut to R directions") < said.index("evaluating on")
    settings = json.loads((folder / "run.json").read_text())["settings"]
    assert sum(settings["ranks"]) == 16 and settings["modulation"] == "additive"
    assert main([*arguments, "--max_steps", "2", "--resume", "auto"]) == 0
    assert "Attention cut to R directions" not in capsys.readouterr().out
    adapter = folder / "checkpoints" / "step-00000002" / "adapter"
    model = npt.load_base("tiny", quantization="nf4", device="cpu")[0]
    ranks = npt.load_adapter(model, adapter).ranks
    assert ranks == tuple(settings["ranks"]) == attached_config(model).ranks

"""The trainer: a run's files, its results, the faults that it survives and those that stop it."""

import functools
import io
import json
import math
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import Stream, checkpoint_names, events, lines, strict
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import Batch, Sample, collate
from npt.config import LOGIT_LOSSES, DataConfig, NPTConfig, TrainConfig
from npt.data.samples import Window
from npt.distill import logit_losses
from npt.distill.local import BatchSums
from npt.distill.step import student_guard
from npt.distill.strategies import STRATEGIES
from npt.errors import (
    ConfigError,
    DataError,
    NPTError,
    NumericalError,
    SmokeTestError,
    TooManyRefusalsError,
)
from npt.train import trainer as trainer_module
from npt.train.data import RunData
from npt.train.trainer import Trainer

MAX_LENGTH = 12


def texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Texts of 5 to 9 letters; with the start and end tokens 7 to 11 tokens, each one sample."""
    source = random.Random(seed)
    return [
        {"text": "".join(source.choices("abcdefgh", k=source.randint(5, 9))), "id": f"text-{i}"}
        for i in range(count)
    ]


EVAL = texts(2, seed=9)


def record(name: str, ids: list[int]) -> dict[str, Any]:
    return {"id": name, "input_ids": ids}


@pytest.fixture
def build(
    load_model: Callable[..., nn.Module], tokenizer: Any, tmp_path: Path
) -> Callable[..., Trainer]:
    """A trainer on a fresh student; what is not given is small, quiet and quick."""
    usual = {"batch_size": 2, "log_steps": 1, "learning_rate": 1e-2, "smoke_test": False}

    def make(
        data: Any = None,
        *,
        model: nn.Module | None = None,
        folder: str = "run",
        eval_data: Any = EVAL,
        replay_data: Any = None,
        data_options: dict[str, Any] | None = None,
        **config: Any,
    ) -> Trainer:
        if model is None:
            model = load_model()
            npt.attach(model, NPTConfig(rank=4, layers="1,3"))
        of_data = {
            name: config.pop(name) for name in ("streaming", "num_samples") if name in config
        }
        of_data |= {"max_length": MAX_LENGTH, **(data_options or {})}
        if replay_data is not None:
            file = tmp_path / "replay.jsonl"
            file.write_text("".join(json.dumps(record) + "\n" for record in replay_data))
            of_data["replay_dataset"] = str(file)
        return Trainer(
            model,
            tokenizer,
            texts(12) if data is None else data,
            TrainConfig(**{**usual, "output_dir": str(tmp_path / folder), **config}),
            data_config=DataConfig(**of_data),
            eval_data=eval_data,
            console=Console(file=io.StringIO(), width=200),
        )

    return make


def said(trainer: Trainer) -> str:
    return trainer.setup.console.file.getvalue()


def timeless(metrics: list[dict[str, Any]], *more: str) -> list[dict[str, Any]]:
    """Without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if k not in ("tokens_per_second", *more)} for line in metrics
    ]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in adapter_parameters(trainer.setup.model).items()}


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    path = folder / "checkpoints" / f"step-{step:08d}" / "adapter" / "adapter_model.safetensors"
    prefix = "base_model.model."
    return {name.removeprefix(prefix): value for name, value in load_file(path).items()}


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def sample_ids(trainer: Trainer) -> list[str]:
    windows = trainer.data.windows()
    return [name for window in windows for batch in window.batches for name in batch.sample_ids]


def replace_strategy(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Batch], None]) -> None:
    """The local strategy, with `act(number of the call, batch)` done before it."""
    original, calls = STRATEGIES["local"], iter(range(10**6))

    def strategy(model: nn.Module, batch: Batch, *more: Any) -> BatchSums:
        act(next(calls), batch)
        return original(model, batch, *more)

    monkeypatch.setitem(STRATEGIES, "local", strategy)


# --- the run folder


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_a_run_leaves_the_files_and_keys_that_are_promised(build, strategy) -> None:
    kl = {"logit_kl_weight": 0.5} if strategy == "end_to_end" else {}
    saving = {"save_steps": 2, "save_total_limit": 2}
    trainer = build(texts(6), strategy=strategy, regularization_lambda=0.1, **saving, **kl)
    result = trainer.train()
    folder = result.folder

    def names(path: Path) -> set[str]:
        return {p.name for p in path.iterdir()}

    assert names(folder) == {
        *("run.json", "metrics.jsonl", "events.jsonl", "fidelity.json"),
        *("report.html", "checkpoints", "adapter"),
    }
    metrics = lines(folder, "metrics")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    promised = {"step", "loss", "loss_nmse", "loss_reg", "grad_norm", "lr", "tokens"}
    promised |= {"tokens_per_second", "refused_total", "layers.1.nmse", "layers.3.nmse"}
    for line in metrics:
        assert promised <= line.keys() and ("loss_kl" in line) == bool(kl)
        # fp32 sums
        mean = (line["layers.1.nmse"] + line["layers.3.nmse"]) / 2
        assert line["loss_nmse"] == pytest.approx(mean, rel=1e-5)
        if not kl:
            expected = line["loss_nmse"] + 0.1 * line["loss_reg"]
            assert line["loss"] == pytest.approx(expected, rel=1e-5)
        assert line["tokens_per_second"] > 0
    assert checkpoint_names(folder) == ["step-00000002", "step-00000003"]
    checkpoint = folder / "checkpoints" / "step-00000003"
    assert names(checkpoint) == {"adapter", "state.safetensors", "state.json", "manifest.json"}
    of_adapter = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert names(checkpoint / "adapter") == of_adapter
    assert_same_weights(saved(folder, 3), weights(trainer))
    fidelity = strict(folder / "fidelity.json")
    for name in ("teacher", "floor", "initial", "student"):
        for key in ("perplexity", "perplexity_ratio", "kl", "top1"):
            assert {key, f"{key}_se"} <= fidelity[name].keys()
        assert fidelity[name]["tokens"] == fidelity["teacher"]["tokens"] > 0
    assert fidelity["layers"].keys() == {"1", "3"}
    kinds = [e["event"] for e in lines(folder, "events")]
    assert kinds == ["start", "save", "save", "data", "done"]
    assert events(folder, "start")[0]["total_steps"] == 3


def test_run_json_holds_settings_versions_seed_hash_and_precision(build) -> None:
    trainer = build(seed=3, max_steps=1)
    base_hash = npt.base_hash(trainer.setup.model)
    run = strict(trainer.train().folder / "run.json")
    assert run["seed"] == 3 and run["base_hash"] == base_hash and run["heldout"] is True
    expected = {"rank": 4, "max_length": MAX_LENGTH, "learning_rate": 1e-2}
    assert expected.items() <= run["settings"].items()
    precision = run["precision"]
    assert precision["quantization"] == "nf4"
    assert precision["compute_dtype"].keys() == precision["adapter_dtype"].keys() == {"float32"}
    assert run["layers"] == [1, 3]
    assert {"python", "torch", "bitsandbytes"} <= run["versions"].keys()
    trained = adapter_parameters(trainer.setup.model).values()
    assert run["trainable_parameters"] == sum(p.numel() for p in trained)


def test_what_is_logged_saved_and_evaluated_at_which_step(build) -> None:
    """The first, every nth and the last step are logged; what is due at the last step is saved once
    and evaluated once.
    """
    every = {"log_steps": 3, "save_steps": 7, "eval_steps": 3}
    trainer = build(texts(7), batch_size=1, save_total_limit=1, **every)
    result = trainer.train()
    assert [line["step"] for line in lines(result.folder, "metrics")] == [1, 3, 6, 7]
    assert [e["step"] for e in events(result.folder, "save")] == [7]
    found = events(result.folder, "evaluation")
    assert [e["step"] for e in found] == [3, 6]
    assert all(math.isfinite(e["student"]["kl"]) for e in found)
    assert said(trainer).count("held-out perplexity ratio") == 2
    every = {"save_steps": 2, "eval_steps": 2}
    result = build(texts(4), batch_size=1, save_total_limit=1, folder="two", **every).train()
    assert [e["step"] for e in events(result.folder, "save")] == [2, 4]
    assert checkpoint_names(result.folder) == ["step-00000004"]
    assert [e["step"] for e in events(result.folder, "evaluation")] == [2]


def test_the_result_sums_up_the_run_without_a_warning(build, tokenizer) -> None:
    """And its evaluations are of the model before and after."""
    data, config = texts(6), DataConfig(max_length=MAX_LENGTH)
    trainer = build(data)
    before = weights(trainer)
    initial = npt.evaluate(trainer.setup.model, tokenizer, EVAL, data_config=config)
    result = trainer.train()
    assert (result.steps, result.refused, result.signal, result.exit_status) == (3, 0, None, 0)
    # each text with its start and end token
    assert result.tokens == sum(len(r["text"]) + 2 for r in data)
    assert result.tokens == lines(result.folder, "metrics")[-1]["tokens"]
    assert result.seconds > 0
    written = strict(result.folder / "fidelity.json")
    assert result.fidelity.as_dict()["student"] == written["student"]
    assert result.fidelity.initial == initial.student
    after = npt.evaluate(trainer.setup.model, tokenizer, EVAL, data_config=config)
    assert result.fidelity.student == after.student
    assert result.fidelity.layers[3]["nmse_initial"] == initial.layers[3]["nmse_student"]
    assert str(result.folder) in said(trainer)
    assert events(result.folder, "warning") == []
    assert events(result.folder, "data")[0]["skipped"] == {}
    for name, value in weights(trainer).items():
        assert not torch.equal(value, before[name]), name
    with pytest.raises(ConfigError, match="has already trained"):
        trainer.train()


def test_watching_does_not_steer(build) -> None:
    plain = build(texts(6), folder="plain", smoke_test=True)
    watched = build(texts(6), folder="watched", eval_steps=1, save_steps=1, use_tensorboard=True)
    results = [trainer.train() for trainer in (plain, watched)]
    logged = [timeless(lines(result.folder, "metrics")) for result in results]
    assert logged[0] == logged[1]
    assert_same_weights(weights(plain), weights(watched))
    assert list(results[1].folder.rglob("events.out.tfevents.*"))


@pytest.mark.parametrize(("limit", "sampled"), [(math.inf, True), (0.0, False)])
def test_a_student_that_starts_close_learns_from_sampled_words(
    build, monkeypatch, limit, sampled
) -> None:
    monkeypatch.setattr(logit_losses, "SPARSE", 1)  # or the vocabulary would be too small
    monkeypatch.setattr("npt.train.trainer.SAMPLED_BELOW", limit)
    calls = []
    estimate = logit_losses.sampled_forward_kl
    monkeypatch.setattr(
        logit_losses, "sampled_forward_kl", lambda *given: calls.append(1) or estimate(*given)
    )
    settings = {"strategy": "end_to_end", "logit_kl_weight": 1.0, "num_epochs": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(texts(4), **settings).train()
    assert bool(calls) == sampled


# --- what it computes


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_training_lowers_the_loss_and_leaves_the_base_bit_equal(
    build, load_model, strategy
) -> None:
    trainer = build(texts(8), num_epochs=6, batch_size=4, strategy=strategy)
    result = trainer.train()
    loss = [line["loss"] for line in lines(result.folder, "metrics")]
    assert sum(loss[-2:]) < 0.9 * sum(loss[:2])
    assert result.fidelity.layers[3]["nmse_student"] < result.fidelity.layers[3]["nmse_initial"]
    state = trainer.setup.model.state_dict()
    # packed bytes and quantisation statistics included
    for key, value in load_model().state_dict().items():
        assert torch.equal(state[key], value), key


def test_the_loss_is_a_mean_per_token_whatever_the_accumulation(build) -> None:
    data = texts(8)
    shapes = [{"batch_size": 4}, {"batch_size": 1, "gradient_accumulation_steps": 4}]
    trainers = [build(data, folder=f"run-{i}", **shape) for i, shape in enumerate(shapes)]
    runs = [lines(trainer.train().folder, "metrics") for trainer in trainers]
    for run in runs[1:]:
        assert [line["tokens"] for line in run] == [line["tokens"] for line in runs[0]]
        for line, expected in zip(run, runs[0], strict=True):
            for key in ("loss", "loss_nmse", "grad_norm", "layers.1.nmse", "layers.3.nmse"):
                # fp32 sums in another order, then one Adam step
                assert line[key] == pytest.approx(expected[key], rel=1e-4), key


@pytest.mark.parametrize(
    "config",
    [
        {"loss": "nmse_update"},
        {"loss": "direction"},
        *[
            {
                "loss": "direction",
                "strategy": "end_to_end",
                "logit_kl_weight": 0.5,
                "logit_loss": loss,
            }
            for loss in LOGIT_LOSSES
        ],
    ],
    ids=lambda config: ",".join(map(str, config.values())),
)
def test_every_kind_of_loss_trains_and_is_logged_beside_its_figures(build, config) -> None:
    trainer = build(texts(2), num_epochs=4, **config)
    metrics = lines(trainer.train().folder, "metrics")
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    for line in metrics:
        nmse = (line["layers.1.nmse"] + line["layers.3.nmse"]) / 2
        assert line["loss_nmse"] == pytest.approx(nmse, rel=1e-5)  # fp32 sums
        logit = {key for key in line if key.startswith("loss_")} - {"loss_nmse", "loss_reg"}
        assert logit == ({f"loss_{config['logit_loss']}"} if "logit_loss" in config else set())


def test_the_logit_loss_is_logged_per_predicted_token(build) -> None:
    """Every token but a text's first is predicted; the loss itself divides by all valid tokens."""
    data = texts(4)
    shapes = [{"batch_size": 4}, {"batch_size": 1, "gradient_accumulation_steps": 4}]
    found = []
    kl = {"strategy": "end_to_end", "logit_kl_weight": 0.5}
    for i, shape in enumerate(shapes):
        trainer = build(data, folder=f"run-{i}", **kl, **shape)
        (line,) = lines(trainer.train().folder, "metrics")
        predicted = line["tokens"] - len(data)
        expected = line["loss_nmse"] + 0.5 * line["loss_kl"] * predicted / line["tokens"]
        assert line["loss"] == pytest.approx(expected, rel=1e-5)  # fp32 sums
        found.append(line)
    for line in found[1:]:
        for key in ("loss", "loss_kl", "grad_norm"):
            # fp32 sums in another order
            assert line[key] == pytest.approx(found[0][key], rel=1e-4), key


def test_a_window_that_predicts_nothing_has_no_mean_of_it(build, monkeypatch) -> None:
    original = STRATEGIES["end_to_end"]

    def unlabelled(model: nn.Module, batch: Batch, *more: Any) -> BatchSums:
        return original(model, replace(batch, labels=torch.full_like(batch.labels, -100)), *more)

    monkeypatch.setitem(STRATEGIES, "end_to_end", unlabelled)
    result = build(texts(2), strategy="end_to_end", logit_kl_weight=0.5).train()
    for line in lines(result.folder, "metrics"):
        assert line["loss_kl"] is None and line["loss"] == pytest.approx(line["loss_nmse"])


# --- how long it runs


@pytest.mark.parametrize(
    ("config", "steps", "windows"),
    [
        ({"batch_size": 1, "gradient_accumulation_steps": 4}, 3, [4, 4, 2]),
        ({"batch_size": 4, "gradient_accumulation_steps": 2}, 2, [2, 1]),
        # on into the next epoch
        ({"batch_size": 4, "gradient_accumulation_steps": 2, "num_epochs": 2}, 3, [2, 2, 2]),
        ({"batch_size": 5, "max_steps": 3}, 3, [1] * 3),
        ({"batch_size": 5, "max_steps": 3, "num_epochs": 9}, 3, [1] * 3),
    ],
)
def test_epochs_and_max_steps_end_the_run(build, monkeypatch, config, steps, windows) -> None:
    trainer = build(texts(10), **config)
    assert trainer.data.total_steps == steps
    seen: list[int] = []
    original = RunData.windows

    def counted(self: RunData) -> Iterator[Window]:
        for window in original(self):
            seen.append(len(window.batches))
            yield window

    monkeypatch.setattr(RunData, "windows", counted)
    result = trainer.train()
    assert result.steps == steps
    assert seen == windows


# --- refusals


def test_ids_outside_the_vocabulary_cost_their_micro_batch(build) -> None:
    data = [*texts(5), record("broken", [5, 999, 7])]
    trainer = build(data, batch_size=1)
    result = trainer.train()
    (refusal,) = events(result.folder, "refusal")
    assert refusal["kind"] == "data" and refusal["sample_ids"] == ["broken@0"]
    assert "999" in refusal["detail"]
    assert refusal["micro_batch"] == 0 and refusal["rank"] == 0
    assert (result.steps, result.refused, result.exit_status) == (5, 1, 0)
    assert lines(result.folder, "metrics")[-1]["refused_total"] == 1
    assert "broken@0" in said(trainer)
    assert events(result.folder, "done")[0]["refused"] == 1


def windows_of(seed: int, bad: str | None) -> list[Window]:
    """Four windows of two to three micro-batches; `bad` joins the second and third, and makes a
    window of its own.
    """
    source = random.Random(seed)
    ids = {"ids": (5, 999, 4), "nan": (3, 7, 3)}.get(bad or "")
    broken = [] if ids is None else [collate([Sample("broken", ids)], 2)]

    def row() -> Sample:
        tokens = source.choices(range(4, 128), k=source.randint(2, 8))
        return Sample(str(source.random()), tuple(tokens))

    def batch() -> Batch:
        return collate([row(), row()], 2)

    made = [[batch(), batch()] for _ in range(4)]
    made[1] = [*broken, *made[1]]
    made[2] = [made[2][0], *broken, made[2][1]]
    return [Window(batches) for batches in (*made[:3], *([broken] if broken else []), made[3])]


@pytest.mark.parametrize(("bad", "strategy"), [("ids", "end_to_end"), ("nan", "local")])
def test_a_run_equals_the_one_that_never_saw_its_bad_micro_batches(
    build, monkeypatch, strategy, bad
) -> None:
    random_states, trainers, results = [], [], []
    held_out = [record("e", [9, 8, 7]), record("f", [6, 5])]
    for present in (True, False):
        windows = windows_of(4, bad if present else None)
        monkeypatch.setattr(RunData, "windows", lambda self, windows=windows: (w for w in windows))
        trainer = build(folder=f"run-{present}", strategy=strategy, eval_data=held_out)
        if bad == "nan":  # a base that breaks after its check
            monkeypatch.setattr(trainer_module, "base_fault", lambda model: None)
            trainer.setup.model.model.embed_tokens.weight.data[3] = math.nan
        torch.manual_seed(0)
        results.append(trainer.train())
        trainers.append(trainer)
        random_states.append(torch.get_rng_state())
    assert [result.refused for result in results] == [3, 0]
    assert results[0].steps == results[1].steps == 4 and results[0].tokens == results[1].tokens
    counts = ("refused_total", "refused.data", "refused.loss", "refused_in_epoch")
    metrics = [timeless(lines(result.folder, "metrics"), *counts) for result in results]
    assert metrics[0] == metrics[1]  # learning rates among them
    assert_same_weights(weights(trainers[0]), weights(trainers[1]))
    assert torch.equal(*random_states)
    kinds = {e["kind"] for e in events(results[0].folder, "refusal")}
    assert kinds == {"data" if bad == "ids" else "loss"}


def test_too_many_refusals_in_a_row_stop_the_run_with_a_post_mortem(build) -> None:
    data = [record(f"broken-{i}", [5, 999, 7]) for i in range(9)]
    trainer = build(data, batch_size=1, max_consecutive_bad=4)
    before, folder = weights(trainer), trainer.setup.origin.folder
    with pytest.raises(TooManyRefusalsError, match="4 refusals in a row") as caught:
        trainer.train()
    assert caught.value.exit_status == 3 and len(events(folder, "refusal")) == 4
    (stopped,) = events(folder, "stopped")
    bundle = folder / "postmortem" / "step-00000000"
    assert stopped["step"] == 0 and bundle == folder / stopped["postmortem"]
    assert str(bundle) in str(caught.value)
    refusals = strict(bundle / "postmortem.json")["refusals"]
    assert refusals[0]["kind"] == "data" and (bundle / "window.safetensors").is_file()
    assert_same_weights(weights(trainer), before)
    assert not (folder / "fidelity.json").exists()


@pytest.mark.parametrize(
    ("windows", "stops"),
    [
        ([[1, 0], [0, 1], [1, 0, 0]], False),
        # the row reaches over a window's start and ends inside it
        ([[0], [1, 0, 0], [0, 1]], True),
    ],
)
def test_three_refusals_in_a_row_stop_the_run_and_fewer_do_not(
    build, monkeypatch, windows, stops
) -> None:
    """1 is a micro-batch that counts, 0 one that is refused; a row is a row wherever windows
    begin.
    """
    rows = [collate([Sample("broken", (5, 999))], 2), collate([Sample("good", (5, 6, 7))], 2)]
    made = [Window([rows[i] for i in window]) for window in windows]
    monkeypatch.setattr(RunData, "windows", lambda self: (window for window in made))
    trainer = build(max_consecutive_bad=3)
    if stops:
        with pytest.raises(TooManyRefusalsError, match="refusals in a row"):
            trainer.train()
    else:
        assert trainer.train().steps > 0


# --- settings and data that are refused, and data that is unusual


def unreadable() -> Iterator[Any]:
    raise AssertionError("the data was read")
    yield


def test_a_folder_in_use_is_refused_before_the_data_is_read(build, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="a run already"):
        build(unreadable())
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.json"]


def test_data_may_be_a_path_and_eval_data_a_function(build, tmp_path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in texts(12)))
    from_path = build(path, eval_data=lambda: iter(EVAL))
    assert from_path.setup.data_config.dataset_name == str(path)
    from_list = build(texts(12), folder="other")
    assert from_path.data.eval_samples == from_list.data.eval_samples
    assert from_path.data.total_steps == from_list.data.total_steps == 6


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "more steps than a run may have": (
        lambda: texts(2000),
        {"num_epochs": 2_000_000_000, "batch_size": 1},
        "--num_epochs 2000000000 makes 10000000 steps",
    ),
    "no record": (list, {}, "no sample to train on"),
    "an empty text": (lambda: [{"text": ""}], {}, "no sample to train on"),
    "one token": (lambda: [record("short", [5])], {}, "no sample to train on"),
    "a mapping of splits": (
        lambda: {"train": texts(3), "test": texts(3)},
        {},
        "dict with train, test; pass one of its entries",
    ),
    "a mapping to evaluate on": (
        lambda: texts(6),
        {"eval_data": {"test": texts(3)}},
        "eval_data is a dict with test; pass one of its entries",
    ),
    "a number to evaluate on": (lambda: texts(6), {"eval_data": 5}, "eval_data is an int; pass"),
    "a generator to evaluate on": (
        lambda: iter(texts(8)),
        {"streaming": True, "eval_data": None},
        "eval_data",
    ),
    "a generator twice": (
        lambda: iter(texts(6)),
        {"streaming": True, "num_epochs": 2},
        "a streamed generator can be read only once; pass a list",
    ),
    "replay data without a sample": (
        lambda: texts(12),
        {"replay_data": [{"text": ""}]},
        "replay data: no sample to train on in 1 records",
    ),
    "replay data with a broken record": (
        lambda: texts(12),
        {"replay_data": [{"text": "whole"}, {"text": 1}]},
        "replay data: record .*replay.jsonl:2 has an int as 'text'",
    ),
}


@pytest.mark.parametrize(("data", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused_and_nothing_written(
    build, tmp_path, data, settings, message
) -> None:
    before = set(tmp_path.rglob("*"))
    with pytest.raises((ConfigError, DataError), match=message):
        build(data(), **settings)
    build()  # nor is anything by a trainer that is made
    assert {path for path in tmp_path.rglob("*") if path.name != "replay.jsonl"} == before


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"residual": "keep"}, r"--residual keep .* --teacher_precision bf16"),
        (None, r"npt\.attach"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_the_data_is_read(
    build, load_model, form, message
) -> None:
    model = load_model()
    if form is not None:
        npt.attach(model, NPTConfig(rank=2, **form))
    with pytest.raises(NPTError, match=message):
        build(unreadable(), model=model)


@pytest.mark.parametrize("smoke_test", [True, False])
def test_a_streamed_generator_loses_no_record(build, smoke_test) -> None:
    data = texts(50)
    trainer = build((r for r in data), streaming=True, smoke_test=smoke_test, batch_size=25)
    result = trainer.train()
    # each text with its start and end token
    assert result.tokens == sum(len(r["text"]) + 2 for r in data)


@pytest.mark.parametrize(
    ("data", "config", "total", "rates", "message"),
    [
        (
            lambda: Stream(texts(8)),
            {"warmup_steps": 2},
            None,
            [5e-4, 1e-3, 1e-3, 1e-3],
            "warning: the length of the stream is unknown, so the learning rate stays constant",
        ),
        (
            lambda: Stream(texts(20)),
            {"max_steps": 3, "scheduler_type": "linear"},
            3,
            [1e-3, 2e-3 / 3, 1e-3 / 3],
            None,
        ),
        (
            lambda: Stream(texts(4)),
            {"max_steps": 9, "scheduler_type": "constant"},
            9,
            [1e-3] * 9,
            "data: read again from the start (restarts: 4)",
        ),
        (
            lambda: iter(texts(6)),
            {"max_steps": 9, "scheduler_type": "constant"},
            9,
            [1e-3] * 3,
            "warning: the data ended after 3 of --max_steps 9 steps and cannot be read again; pass"
            " a list",
        ),
    ],
    ids=["unknown length", "max_steps", "begins again", "ends before"],
)
def test_a_stream_lasts_as_long_as_it_can_and_says_how_it_ends(
    build, data, config, total, rates, message
) -> None:
    trainer = build(data(), streaming=True, learning_rate=1e-3, **config)
    assert trainer.data.total_steps == total
    result = trainer.train()
    assert result.steps == len(rates) and result.fidelity is not None
    assert [line["lr"] for line in lines(result.folder, "metrics")] == pytest.approx(rates)
    warned = message is not None and message.startswith("warning")
    assert len(events(result.folder, "warning")) == warned
    assert message is None or message in said(trainer)


def test_the_learning_rate_follows_the_schedule_from_its_first_step(build) -> None:
    schedule = {"warmup_steps": 2, "scheduler_type": "linear", "learning_rate": 1e-3}
    result = build(texts(10), batch_size=1, **schedule).train()
    rates = [line["lr"] for line in lines(result.folder, "metrics")]
    expected = [0.5, 1.0, 1.0, *(1 - i / 8 for i in range(1, 8))]
    assert rates == pytest.approx([1e-3 * scale for scale in expected])


def test_a_list_and_a_stream_of_it_hold_out_the_same_samples(build) -> None:
    for data, streaming in ((texts(80), False), (Stream(texts(80)), True)):
        trainer = build(data, streaming=streaming, eval_data=None, folder=f"run-{streaming}")
        held_out = {sample.id for sample in trainer.data.eval_samples}
        trained = set(sample_ids(trainer))
        assert trainer.data.heldout and held_out
        assert not held_out & trained
        assert held_out | trained == {f"text-{i}@0" for i in range(80)}


def test_too_little_data_to_hold_any_out_is_said_and_recorded(build) -> None:
    data = [record("a", [5, 6, 7, 8]), record("b", [9, 10, 11])]
    trainer = build(data, eval_data=None)
    assert not trainer.data.heldout
    result = trainer.train()
    assert "TRAINING" in said(trainer)
    assert strict(result.folder / "run.json")["heldout"] is False
    assert strict(result.folder / "fidelity.json")["heldout"] is False
    assert result.tokens == 7  # nothing was taken away from training either


# --- what the data are made into


def prompts(count: int) -> list[dict[str, str]]:
    """Every third one has no answer, every fourth a prompt that is too long."""
    return [
        {
            "id": f"q{i}",
            "prompt": "abc" * (1 + 4 * (i % 4 == 3)),
            "completion": "" if i % 3 == 2 else f"answer {i}"[:4],
        }
        for i in range(count)
    ]


def test_lost_records_are_reported_and_recorded(build) -> None:
    trainer = build(prompts(12))
    result = trainer.train()
    (event,) = events(result.folder, "data")
    expected = {"source": "data", "records": 12, "samples": 8, "tokens": result.tokens}
    expected |= {"skipped": {"empty completion": 4}, "cut_prompts": 2, "cut_completions": 0}
    assert expected.items() <= event.items()
    line = "data: of 12 records read, 2 prompts cut to --max_length, 4 skipped (empty completion)"
    assert line in events(result.folder, "warning")[-1]["message"]
    assert f"warning: {line}" in said(trainer)


@pytest.mark.parametrize("smoke_test", [True, False])
def test_a_stream_from_which_nothing_comes_says_what_became_of_it(build, smoke_test) -> None:
    data = [{"prompt": "a", "completion": ""}] * 3
    trainer = build(iter(data), streaming=True, smoke_test=smoke_test)
    message = r"no sample to train on in 3 records: 3 skipped \(empty completion\);"
    with pytest.raises(DataError, match=message):
        trainer.train()


def test_a_run_on_the_logits_alone_reports_no_hidden_states(build) -> None:
    trainer = build(
        strategy="end_to_end", logit_kl_weight=1.0, hidden_weight=0.0, max_steps=2, smoke_test=True
    )
    result = trainer.train()
    assert "smoke test passed" in said(trainer) and result.steps == 2
    for line in lines(result.folder, "metrics"):
        assert "loss_nmse" not in line and not any(key.endswith(".nmse") for key in line)
        assert 0 < line["loss"] < line["loss_kl"]  # per valid token, and per predicted one
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert "Each layer on held-out text" in page and "Worst and best layer" not in page


def test_a_packed_run_trains_on_the_same_tokens_in_fewer_rows(build) -> None:
    results = {}
    for packing in (False, True):
        options = {"packing": packing, "max_length": 40}
        settings = {"folder": f"run-{packing}", "batch_size": 4, "smoke_test": packing}
        trainer = build(texts(24), data_options=options, **settings)
        results[packing] = trainer.train()
        assert ("smoke test passed" in said(trainer)) == packing
        assert results[packing].steps == trainer.data.total_steps
        assert math.isfinite(lines(results[packing].folder, "metrics")[-1]["loss"])
    assert results[True].tokens == results[False].tokens
    assert results[True].steps < results[False].steps


def test_replayed_samples_of_another_form_are_mixed_in_and_counted(build) -> None:
    questions = [{"q": f"abc{i}", "a": f"x{i}"} for i in range(60)]
    options = {"prompt_column": "q", "completion_column": "a", "replay_ratio": 0.5}
    settings = {"data_options": options, "eval_data": questions[:2], "batch_size": 16}
    names = sample_ids(build(questions, replay_data=texts(9), **settings))
    replayed = sum(name.startswith("text-") for name in names)
    assert replayed > 9  # round and round
    assert abs(replayed / len(names) - 0.5) < 4 * math.sqrt(0.25 / len(names))
    assert len(names) - replayed == 60
    trainer = build(questions, replay_data=texts(9), **settings)
    result = trainer.train()
    data, replay = events(result.folder, "data")
    assert (data["source"], replay["source"]) == ("data", "replay data")
    assert data["records"] == 60 and replay["samples"] > 0
    assert result.steps == trainer.data.total_steps == math.ceil(len(names) / 16)


def test_a_fifth_is_replayed_unless_told(build) -> None:
    names = sample_ids(build(texts(400), replay_data=texts(9), batch_size=8))
    assert abs(1 - 400 / len(names) - 0.2) < 4 * math.sqrt(0.2 * 0.8 / len(names))


# --- the thread that prepares them


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "npt-data"]


def broken_behind(count: int) -> Iterator[dict[str, str]]:
    yield from texts(count)
    raise DataError("the next line is broken")


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("max_steps", None),
        ("a signal", None),
        ("data that break", DataError),
        ("refusals", TooManyRefusalsError),
        ("an interrupt", KeyboardInterrupt),
        ("the smoke test", SmokeTestError),
    ],
)
def test_no_thread_is_left_however_a_run_ends(build, monkeypatch, how, error) -> None:
    monkeypatch.setattr("npt.data.samples.SHUFFLE_BLOCK", 32)
    broken = [record(f"broken-{i}", [5, 999, 7 + i % 9]) for i in range(100)]
    # two whole blocks, more than the thread prepares before the first batch is taken
    data = {"data that break": broken_behind(80), "refusals": broken, "the smoke test": broken}
    settings = {"streaming": how == "data that break", "smoke_test": how == "the smoke test"}
    settings |= {"max_steps": 3} if how == "max_steps" else {}

    def act(call: int, batch: Batch) -> None:
        assert call or workers() == ["npt-data"]  # there is one at the start
        if call == 3 and how == "a signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif call == 3 and how == "an interrupt":
            raise KeyboardInterrupt

    replace_strategy(monkeypatch, act)
    trainer = build(data.get(how, texts(100)), batch_size=4, **settings)
    assert workers() == []
    # the traceback, kept, keeps the run's frames alive: what is not closed stays open
    with nullcontext() if error is None else pytest.raises(error) as kept:
        trainer.train()
    assert workers() == [] and (error is None or kept.value is not None)


def test_a_warm_up_that_outlasts_the_run_is_warned_of(build) -> None:
    (warning,) = events(build(texts(6), warmup_steps=50).train().folder, "warning")
    assert "--warmup_steps 50 is more than the run's 3 steps" in warning["message"]


@pytest.mark.parametrize(
    ("where", "name"),
    [("base", r"layers\.2\.mlp\.up_proj"), ("adapter", r"layers\.3\.npt\.A\[0, 1\] is nan")],
)
def test_a_nonfinite_number_is_named_before_anything_is_written(build, where, name) -> None:
    trainer = build()
    layers = trainer.setup.model.model.layers
    if where == "base":
        layers[2].mlp.up_proj.weight.quant_state.state2.absmax[0] = math.inf
    else:
        layers[3].npt.A.data[0, 1] = math.nan
    with pytest.raises(NumericalError, match=name):
        trainer.train()
    assert not trainer.setup.origin.folder.exists()


@pytest.mark.parametrize("late", [False, True])
def test_data_that_break_mid_run_leave_a_checkpoint_of_that_step(build, monkeypatch, late) -> None:
    """Four good windows, then an error: what is saved are the weights of step 4, however late its
    result is known.
    """
    monkeypatch.setattr(
        "npt.train.trainer.student_guard", functools.partial(student_guard, late=late)
    )
    rows = [collate([Sample(str(i), (5 + i, 6, 7 + i))], 2) for i in range(4)]

    def breaking(self: RunData) -> Iterator[Window]:
        yield from (Window([row]) for row in rows)
        raise DataError("line 5 is broken")

    monkeypatch.setattr(RunData, "windows", breaking)
    trainer = build()
    with pytest.raises(DataError, match="line 5 is broken"):
        trainer.train()
    assert events(trainer.setup.origin.folder, "save")[-1]["step"] == 4
    assert_same_weights(saved(trainer.setup.origin.folder, 4), weights(trainer))


@pytest.mark.parametrize(
    ("how", "late"),
    [("weight decay", True), ("smoke test", False), ("resumed", True), ("resumed", False)],
)
def test_a_frozen_adapter_is_refused_and_not_moved(build, load_model, tmp_path, how, late) -> None:
    """An optimizer moves what it is given by weight decay alone, and a resumed run puts back what
    the checkpoint has.
    """
    options: dict[str, Any] = {"smoke_test": how == "smoke test", "weight_decay": 0.1}
    if how == "resumed":
        options = {"resume": str(build(max_steps=1, save_steps=1).train().folder), "max_steps": 2}
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    before = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    frozen = model.model.layers[3].npt.B["up"]
    frozen.requires_grad_(late)
    message = r"model\.layers\.3\.npt\.B\.up is frozen .*1 of 16.*requires_grad_\(True\)"
    with pytest.raises(ConfigError, match=message):
        trainer = build(model=model, folder="refused", **options)
        frozen.requires_grad_(False)
        trainer.train()
    assert_same_weights({n: p.detach() for n, p in adapter_parameters(model).items()}, before)
    assert not (tmp_path / "refused").exists()


def test_a_run_trains_whatever_gradients_its_caller_has_switched_off(build, load_model) -> None:
    runs = [build(max_steps=2, folder="on").train()]
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            model = load_model()
            npt.attach(model, NPTConfig(rank=4, layers="1,3"))
            runs.append(build(model=model, max_steps=2, folder=off.__name__).train())
    losses = [[line["loss"] for line in lines(run.folder, "metrics")] for run in runs]
    assert losses[0] == losses[1] == losses[2]

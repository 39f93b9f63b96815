"""Weights & Biases: what a run there is opened with, and through the library itself, offline, what
it is told.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from forked import Program
from rich.console import Console
from wandb_records import told

import npt
from npt.adapters.converted import adapter_parameters
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.errors import TooManyRefusalsError
from npt.files import write_json
from npt.runs import wandb_run
from npt.runs.trackers import Trackers
from npt.train.trainer import Trainer


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


WANDB = TrainConfig(use_wandb=True)
NAMED = TrainConfig(
    report_to="wandb",
    run_name="trial",
    project="mine",
    wandb_entity="team",
    wandb_group="one",
    wandb_tags="a,b",
)


def opened(config: TrainConfig, run: str | None = "a1b2c3d4") -> tuple[str | None, dict[str, Any]]:
    return wandb_run.project_of(config), wandb_run.options_of(config, Path("runs/first"), run)


def test_a_run_has_a_name_an_id_and_a_place_of_its_own() -> None:
    assert opened(WANDB) == (
        "npt",
        {"dir": "runs/first", "name": "first", "resume": "allow", "id": "a1b2c3d4"},
    )
    names = [opened(WANDB, None)[1]["id"] for _ in range(2)]
    assert names[0] != names[1] and len(names[0]) == 8


def test_flags_come_before_the_environment_and_our_own_choices(monkeypatch) -> None:
    said = {
        "dir": "runs/first",
        "name": "trial",
        "group": "one",
        "tags": ["a", "b"],
        "entity": "team",
        "resume": "allow",
    }
    assert opened(NAMED) == ("mine", {**said, "id": "a1b2c3d4"})
    for name in ("PROJECT", "ENTITY", "NAME", "RUN_ID", "RUN_GROUP", "TAGS", "RESUME"):
        monkeypatch.setenv(f"WANDB_{name}", "from-the-environment")
    assert opened(WANDB) == (None, {"dir": "runs/first"})  # the library reads it
    project, options = opened(NAMED)
    assert project == "mine" and options == {
        name: said[name] for name in ("dir", "name", "group", "tags", "entity")
    }


def test_in_an_agents_run_project_entity_and_id_are_the_agents(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-agent")
    assert opened(WANDB) == (None, {"dir": "runs/first"})
    assert opened(NAMED) == (
        None,
        {"dir": "runs/first", "name": "trial", "group": "one", "tags": ["a", "b"]},
    )


class Config(dict):
    """A config that notes what is written over."""

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        assert allow_val_change and not (
            self.keys() & values.keys() and "WANDB_SWEEP_ID" in os.environ
        )
        super().update(values)


def test_what_a_sweep_has_chosen_is_not_written_over(monkeypatch) -> None:
    settings = {"learning_rate": 1e-3, "rank": 4}
    run = SimpleNamespace(config=Config(learning_rate=0.5))
    wandb_run.store_settings(run, settings)
    assert run.config == settings
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    run = SimpleNamespace(config=Config(learning_rate=0.5))
    wandb_run.store_settings(run, settings)
    assert run.config == {"learning_rate": 0.5, "rank": 4}


@pytest.mark.parametrize(
    ("best", "last", "expected"),
    [
        (None, None, []),
        (None, 3, [("adapter", ["best", "last"])]),
        (2, None, [("best/adapter", ["best"])]),
        (2, 3, [("best/adapter", ["best"]), ("adapter", ["last"])]),
        (3, 3, [("adapter", ["best", "last"])]),
    ],
)
def test_the_last_adapter_is_the_best_one_where_no_other_is(tmp_path, best, last, expected) -> None:
    if best is not None:
        (tmp_path / "best" / "adapter").mkdir(parents=True)
        write_json(
            tmp_path / "best" / "fidelity.json",
            {"step": best, "student": {"kl": best}, "layers": {}},
        )
    if last is not None:
        (tmp_path / "adapter").mkdir()
        write_json(tmp_path / "fidelity.json", {"student": {"kl": last}})
    found = wandb_run._adapters(tmp_path)
    assert [(str(path.relative_to(tmp_path)), aliases) for path, _, aliases in found] == expected
    assert wandb_run.best_of(tmp_path) is None  # figures of no shape that was ever written


@pytest.mark.parametrize(
    ("known", "found"),
    [("a1b2c3d4", True), ("my-run_2", True), ("a b", False), ("../x", False), (7, False)],
)
def test_an_id_is_read_from_run_json_if_it_can_be_one(tmp_path, known, found) -> None:
    assert wandb_run.known_run(tmp_path) is None
    write_json(tmp_path / "run.json", {"wandb_run": known})
    assert wandb_run.known_run(tmp_path) == (known if found else None)


TEXTS = [{"text": "abcdefgh"[: 5 + i % 4], "id": f"text-{i}"} for i in range(12)]


@pytest.fixture
def trained(load_model: Any, tokenizer: Any) -> Callable[..., tuple[Trainer, Any]]:
    """A small run in a folder, with a tokenizer whose texts can be read."""
    tokenizer.decode = lambda ids, **_: "".join(chr(97 + i % 26) for i in ids)

    def train(folder: Path, data: Any = TEXTS, **settings: Any) -> tuple[Trainer, Any]:
        model = load_model("nf4")
        npt.attach(model, NPTConfig(rank=4, layers="1,3"))
        config = TrainConfig(
            **{
                "batch_size": 2,
                "log_steps": 1,
                "learning_rate": 1e-2,
                "output_dir": str(folder),
                **settings,
            }
        )
        console, data_config = Console(file=io.StringIO(), width=300), DataConfig(max_length=12)
        trainer = Trainer(
            model,
            tokenizer,
            data,
            config,
            data_config=data_config,
            eval_data=TEXTS[:6],
            console=console,
        )
        return trainer, trainer.train()

    return train


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    import wandb

    assert wandb.run is None  # each run has ended


class Drawing:
    """A tracker that draws random numbers whatever it is asked, and remembers what that was."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    @property
    def tracker(self) -> Drawing:
        return self

    def __getattr__(self, name: str) -> Any:
        def act(*_: Any, **__: Any) -> Any:
            self.asked[name] += 1
            random.random()
            return torch.rand(3).tolist(), numpy.random.rand()

        return act


def test_a_tracked_run_is_the_run_without_trackers_bit_for_bit(
    trained, tmp_path, monkeypatch
) -> None:
    """With texts and histograms every other step."""
    monkeypatch.setattr("npt.train.tracker_samples.NEW_TOKENS", 3)
    monkeypatch.setattr("npt.train.tracker_samples.PROMPTS", 1)
    tracker = Drawing()
    with mock.patch("npt.runs.trackers._started", lambda *_: tracker):
        watched, _ = trained(tmp_path / "watched", report_to="tensorboard", sample_steps=2)
    plain, _ = trained(tmp_path / "plain", smoke_test=False)
    one, other = (adapter_parameters(trainer.setup.model) for trainer in (watched, plain))
    assert all(torch.equal(one[name], other[name]) for name in other)
    # steps, layers, targets
    assert tracker.asked["add_text"] == 3 and tracker.asked["add_histogram_raw"] == 3 * 2 * 3
    said = watched.setup.console.file.getvalue()
    assert "no texts" not in said and "failed" not in said


def test_wandb_is_told_everything_of_a_run_and_its_resumption(
    trained, tmp_path, offline, monkeypatch
) -> None:
    monkeypatch.setattr("npt.train.tracker_samples.NEW_TOKENS", 3)
    folder = tmp_path / "run"
    asked = {
        "report_to": "wandb,tensorboard",
        "wandb_tags": "a,b",
        "wandb_group": "study",
        "sample_steps": 2,
        "eval_steps": 2,
    }
    _, result = trained(folder, **asked, trace_steps="2")
    found = told(folder)
    assert (
        found.run.project,
        found.run.display_name,
        found.run.run_group,
        list(found.run.tags),
    ) == ("npt", "run", "study", ["a", "b"])
    assert found.run.run_id == json.loads((folder / "run.json").read_text())["wandb_run"]
    config, base = found.config, json.loads((folder / "run.json").read_text())["base_hash"]
    assert (
        config["learning_rate"] == 1e-2
        and config["targets"] == ["stream", "gate", "up", "down"]
        and config["base_hash"] == base
    )
    assert (
        config["base_loading"]["quantization"] == "nf4"
        and config["base_loading"]["double_quant"] is True
    )
    assert {"npt", "torch", "transformers", "bitsandbytes", "accelerate"} <= config[
        "versions"
    ].keys()
    fidelity = result.fidelity
    for name, figures in (
        ("floor", fidelity.floor),
        ("teacher", fidelity.teacher),
        ("initial", fidelity.initial),
        ("final", fidelity.student),
    ):
        for key in ("perplexity_ratio", "kl", "top1"):
            assert found.summary[f"{name}/{key}"] == getattr(figures, key), (name, key)
    assert {"best/kl", "best_step"} <= found.summary.keys()
    by_step = {line["_step"]: line for line in found.history}
    assert by_step[1]["loss"] > 0 and by_step[2]["eval/kl"] > 0 and "eval/kl" not in by_step[1]
    assert (
        sum(by_step[2]["modulation/layers.3.gate/values"]) > 0
        and by_step[2]["modulation/layers.3.gate.saturated"] == 0
    )
    assert len(by_step[2]["modulation/layers.3.gate/bins"]) == 1 + len(
        by_step[2]["modulation/layers.3.gate/values"]
    )
    table, *_ = sorted((folder / "wandb").rglob("samples*.table.json"))
    shown = json.loads(table.read_text())
    assert (
        shown["columns"] == ["step", "prompt", "student", "teacher"]
        and len(shown["data"]) == 4
        and all(all(row[1:]) for row in shown["data"])
    )
    kinds = {
        name.split("-")[1]: (kind, files)
        for (name, kind, _, _), files in zip(found.artifacts, found.files, strict=True)
    }
    assert kinds["report"] == ("report", ["health.html", "health.png", "report.html"])
    adapters = [one for one in found.artifacts if one[1] == "model"]
    assert {alias for one in adapters for alias in one[2]} == {"latest", "best", "last"}
    assert (
        adapters[-1][3]["settings"]["rank"] == 4
        and adapters[-1][3]["fidelity"]["student"]["kl"] == fidelity.student.kl
    )
    assert found.exit == 0 and not found.alerts

    again = tmp_path / "first"
    (folder / "wandb").rename(again)
    trained(folder, report_to="wandb", resume="auto", num_epochs=2)
    assert told(folder).run.run_id == found.run.run_id


def test_wandb_is_alerted_when_a_run_gives_up(trained, tmp_path, offline) -> None:
    broken = [{"id": f"bad-{i}", "input_ids": [3, 999]} for i in range(8)]
    data = [{"id": "good", "input_ids": [3, 4, 5]}, *broken]
    with pytest.raises(TooManyRefusalsError):
        trained(
            tmp_path / "run",
            data,
            use_wandb=True,
            max_consecutive_bad=2,
            batch_size=1,
            smoke_test=False,
        )
    found = told(tmp_path / "run")
    ((title, text),) = found.alerts
    assert (
        title == "npt gave up: TooManyRefusalsError"
        and "2 refusals in a row" in text
        and "npt replay" in text
    )
    assert found.exit == 3 and [one[1] for one in found.artifacts] == ["report"]


def test_a_run_of_wandb_agent_has_the_agents_name_and_settings(tmp_path, monkeypatch) -> None:
    """In a process of its own, as an agent starts one: the sweep's parameters are flags and a file,
    its run is in the environment.
    """
    (tmp_path / "sweep.yaml").write_text(
        "wandb_version: 1\nlearning_rate: {desc: null, value: 0.25}\n"
    )
    (tmp_path / "own.txt").write_text(
        "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(60)),
        encoding="utf-8",
    )
    agents = {
        "SWEEP_ID": "s1",
        "RUN_ID": "of-agent",
        "PROJECT": "theirs",
        "SWEEP_PARAM_PATH": str(tmp_path / "sweep.yaml"),
    }
    for name, value in {**agents, "MODE": "offline"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    flags = [
        "--learning_rate=0.25",
        "--use_wandb=True",
        "--project=mine",
        f"--output_dir={tmp_path / 'run'}",
    ]
    small = [
        f"--dataset_name={tmp_path / 'own.txt'}",
        "--no_smoke_test",
        "--init=random",
        "--layers=7",
        "--adapter_rank=2",
    ]
    small += ["--max_length=32", "--max_steps=1", "--batch_size=2", "--eval_samples=2"]
    program = Program(["pretrain", *small, *flags], tmp_path / "errors")
    assert program.wait() == 0, program.errors.read_text()
    found = told(tmp_path / "run")
    assert (found.run.run_id, found.run.project, found.run.sweep_id) == ("of-agent", "theirs", "s1")
    assert found.config["learning_rate"] == 0.25 and found.config["rank"] == 2
    said = program.errors.read_text()
    assert "locked" not in said and "Ignor" not in said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["wandb_run"] == "of-agent"


def test_wandb_without_a_login_is_refused_before_the_base_is_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(npt, "load_base", lambda *_, **__: pytest.fail("the base was loaded"))
    program = Program(
        ["pretrain", "--report_to", "wandb", "--output_dir", str(tmp_path / "run")],
        tmp_path / "errors",
    )
    status, said = program.wait(), program.errors.read_text()
    assert status == 2 and not (tmp_path / "run").exists(), said
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert line.startswith("npt: error: wandb cannot be started: ") and "API key" in line
    assert line.endswith(
        "log in first (wandb login), set WANDB_MODE=offline, or leave it out (--report_to none)"
    )


def test_only_wandb_is_asked_for_alerts_and_files(tmp_path) -> None:
    trackers = Trackers(TrainConfig(), tmp_path)
    asked: list[str] = []
    trackers.warn = asked.append
    trackers._trackers = {"mlflow": SimpleNamespace()}  # whatever is asked of it fails
    trackers.alert("title", "text")
    trackers.files({})
    assert asked == []

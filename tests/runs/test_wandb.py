"""Weights & Biases: what a run there is opened with, and through the library itself, offline, what
it is told.
"""

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Program
from rich.console import Console
from wandb_records import told

import npt
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.errors import ConfigError, TooManyRefusalsError
from npt.files import write_json
from npt.runs.trackers import Trackers, check_trackers, known_run
from npt.train.trainer import Trainer


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def opened(monkeypatch: pytest.MonkeyPatch, run: str | None = None, **more: Any) -> dict[str, Any]:
    """Return what Weights & Biases is opened with."""
    from accelerate.tracking import WandBTracker

    found: dict[str, Any] = {}
    monkeypatch.setattr("wandb.login", lambda **_: True)  # asked if nothing else was offline before
    monkeypatch.setattr(
        WandBTracker, "start", lambda self: found.update(self.init_kwargs, project=self.run_name)
    )
    Trackers(TrainConfig(use_wandb=True, **more), Path("runs/first"), run=run)
    return {name: value for name, value in found.items() if value is not None}


def test_flags_come_before_the_environment_and_our_own_choices(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    ours = {"dir": "runs/first"}
    named = {**ours, "project": "npt", "name": "first"}
    assert opened(monkeypatch) == named
    assert opened(monkeypatch, "a1b2c3d4") == {**named, "id": "a1b2c3d4", "resume": "allow"}
    for name in ("PROJECT", "NAME", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "from-the-environment")
    assert opened(monkeypatch, "a1b2c3d4") == {**ours, "name": "from-the-environment"}
    assert opened(monkeypatch, run_name="trial") == {**ours, "name": "trial"}


def test_the_environment_may_name_the_folder(monkeypatch, tmp_path) -> None:
    place = tmp_path / "missing" / "wandb files"
    monkeypatch.setenv("WANDB_DIR", str(place))
    assert opened(monkeypatch)["dir"] == str(place)
    assert place.is_dir()  # without it wandb would take a temporary folder
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MODE", "ofline", "WANDB_MODE is 'ofline': Input should be 'online', 'offline', "),
        ("PROJECT", "a/b", "WANDB_PROJECT is 'a/b': Invalid project name 'a/b': cannot contain "),
        ("RUN_ID", "a/b", "WANDB_RUN_ID is 'a/b': Run ID cannot contain the characters: "),
        ("BASE_URL", "nowhere", "WANDB_BASE_URL is 'nowhere': Input should be a valid URL"),
        ("INIT_TIMEOUT", "soon", "WANDB_INIT_TIMEOUT is 'soon': Input should be a valid number"),
    ],
)
def test_a_variable_that_wandb_refuses_is_named(monkeypatch, name, value, said) -> None:
    monkeypatch.setenv(f"WANDB_{name}", value)
    with pytest.raises(ConfigError) as error:
        check_trackers(TrainConfig(use_wandb=True))
    line = str(error.value)
    assert line.startswith(said) and line.endswith("; correct or unset it")
    assert "\n" not in line


def test_a_key_that_wandb_refuses_is_not_shown(monkeypatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", "two words")
    wandb.teardown()
    try:
        with pytest.raises(ConfigError, match=r"^cannot start wandb: WANDB_API_KEY") as error:
            check_trackers(TrainConfig(use_wandb=True))
    finally:
        wandb.teardown()  # it remembers the key
    assert "two words" not in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "file"))
    said = r"^WANDB_DIR is '.*/file', which cannot be written: .*; name another folder or unset it$"
    with pytest.raises(ConfigError, match=said):
        check_trackers(TrainConfig(use_wandb=True))


def test_without_wandb_its_environment_does_not_matter(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    assert check_trackers(TrainConfig()) == []


@pytest.mark.parametrize(
    ("known", "found"),
    [("a1b2c3d4", True), ("my-run_2", True), ("a b", False), ("../x", False), (7, False)],
)
def test_an_id_is_read_from_run_json_if_it_can_be_one(tmp_path, known, found) -> None:
    assert known_run(tmp_path) is None
    write_json(tmp_path / "run.json", {"wandb_run": known})
    assert known_run(tmp_path) == (known if found else None)


TEXTS = [{"text": "abcdefgh"[: 5 + i % 4], "id": f"text-{i}"} for i in range(12)]


@pytest.fixture
def trained(load_model: Any, tokenizer: Any) -> Callable[..., tuple[Trainer, Any]]:
    """A small run in a folder, with a tokenizer whose texts can be read."""
    tokenizer.decode = lambda ids, **_: "".join(chr(97 + i % 26) for i in ids)

    def train(folder: Path, data: Any = TEXTS, **settings: Any) -> tuple[Trainer, Any]:
        model = load_model("nf4")
        npt.attach(model, NPTConfig(rank=4, layers="1,3"))
        usual = {"batch_size": 2, "log_steps": 1, "learning_rate": 1e-2, "output_dir": str(folder)}
        config, console = (
            TrainConfig(**{**usual, **settings}),
            Console(file=io.StringIO(), width=300),
        )
        of_data = {"data_config": DataConfig(max_length=12), "eval_data": TEXTS[:6]}
        trainer = Trainer(model, tokenizer, data, config, console=console, **of_data)
        return trainer, trainer.train()

    return train


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # it reads the environment once a process, perhaps for another test
    yield
    assert wandb.run is None  # each run has ended


def test_wandb_is_told_everything_of_a_run_and_its_resumption(
    trained, tmp_path, offline, monkeypatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv("WANDB_TAGS", "a,b")
    drawn = lambda self, stream, **how: stream.write(b"drawn")  # noqa: E731
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", drawn)
    asked = {"use_wandb": True, "use_tensorboard": True, "eval_steps": 2}
    _, result = trained(folder, **asked, trace_steps="2")
    found = told(folder)
    assert (found.run.project, found.run.display_name) == ("npt", "run")
    assert list(found.run.tags) == ["a", "b"]
    assert found.run.run_id == json.loads((folder / "run.json").read_text())["wandb_run"]
    config, written = found.config, json.loads((folder / "run.json").read_text())
    base = written["base_hash"]
    said = {name: config[name] for name in written if name not in ("settings", "wandb_run")}
    assert said == {name: written[name] for name in said}  # not the settings they come from
    assert (config["layers"], config["deterministic"]) == ([1, 3], True)
    assert config["learning_rate"] == 1e-2
    assert config["targets"] == ["stream", "gate", "up", "down"]
    assert config["base_hash"] == base
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
    by_step = {line["_step"]: line for line in found.history}
    assert by_step[1]["loss"] > 0 and by_step[2]["eval/kl"] > 0 and "eval/kl" not in by_step[1]
    kinds = {
        name.split("-")[1]: (kind, files)
        for (name, kind, _, _), files in zip(found.artifacts, found.files, strict=True)
    }
    assert kinds["report"] == ("report", ["health.html", "health.png", "report.html"])
    adapters = [one for one in found.artifacts if one[1] == "model"]
    assert {alias for one in adapters for alias in one[2]} == {"latest", "best", "last"}
    assert adapters[-1][3]["rank"] == 4
    assert found.exit == 0 and not found.alerts

    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("WANDB_DIR", str(elsewhere))
    trained(folder, use_wandb=True, resume="auto", num_epochs=2)
    assert told(elsewhere).run.run_id == found.run.run_id


def test_wandb_is_alerted_when_a_run_gives_up(trained, tmp_path, offline) -> None:
    broken = [{"id": f"bad-{i}", "input_ids": [3, 999]} for i in range(8)]
    data = [{"id": "good", "input_ids": [3, 4, 5]}, *broken]
    with pytest.raises(TooManyRefusalsError):
        quick = {"max_consecutive_bad": 2, "batch_size": 1, "smoke_test": False}
        trained(tmp_path / "run", data, use_wandb=True, **quick)
    found = told(tmp_path / "run")
    ((title, text),) = found.alerts
    assert title == "npt failed: TooManyRefusalsError"
    assert "2 refusals in a row" in text
    assert "npt replay" in text
    assert found.exit == 3 and [one[1] for one in found.artifacts] == ["report"]


def test_a_run_of_wandb_agent_has_the_agents_name_and_settings(tmp_path, monkeypatch) -> None:
    """In a process of its own, as an agent starts one: the sweep's parameters are flags and a file,
    its run is in the environment.
    """
    sweep = "wandb_version: 1\nlearning_rate: {desc: null, value: 0.25}\n"
    (tmp_path / "sweep.yaml").write_text(sweep)
    text = "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(60))
    (tmp_path / "own.txt").write_text(text)
    agents = {"SWEEP_ID": "s1", "RUN_ID": "of-agent", "PROJECT": "theirs"}
    agents["SWEEP_PARAM_PATH"] = str(tmp_path / "sweep.yaml")
    for name, value in {**agents, "MODE": "offline"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    flags = ["--learning_rate=0.25", "--use_wandb=True", f"--output_dir={tmp_path / 'run'}"]
    small = (
        "--no_smoke_test --init=random --layers=7 --adapter_rank=2 --max_length=32 --max_steps=1"
    )
    small = [*small.split(), "--batch_size=2", "--eval_samples=2"]
    small += [f"--dataset_name={tmp_path / 'own.txt'}"]
    program = Program(["pretrain", *small, *flags], tmp_path / "errors")
    assert program.wait() == 0, program.errors.read_text()
    found = told(tmp_path / "run")
    assert (found.run.run_id, found.run.project, found.run.sweep_id) == ("of-agent", "theirs", "s1")
    assert found.config["learning_rate"] == 0.25 and found.config["rank"] == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["wandb_run"] == "of-agent"


def test_wandb_without_a_login_is_refused_before_the_base_is_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(npt, "load_base", lambda *_, **__: pytest.fail("the base was loaded"))
    program = Program(
        ["pretrain", "--use_wandb", "--output_dir", str(tmp_path / "run")], tmp_path / "errors"
    )
    status, said = program.wait(), program.errors.read_text()
    assert status == 2, said
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert line.startswith("npt: error: cannot start wandb: ") and "API key" in line
    assert line.endswith("run wandb login, set WANDB_MODE=offline or remove --use_wandb")

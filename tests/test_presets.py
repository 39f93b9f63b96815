"""Presets: settings by name that ship with the package, sound, and told apart from files."""

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

from npt.cli.main import main
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.doctor.plan import shown
from npt.doctor.shape import SHAPES
from npt.errors import ConfigError
from npt.flags import build, read_yaml, with_safe_mode
from npt.presets import presets, settings_file


def about(path: Path) -> str:
    """Return the comment at the head of a file of settings, as one line."""
    head = takewhile(
        lambda line: line.startswith("#"), path.read_text(encoding="utf-8").split("\n")
    )
    return " ".join(line.removeprefix("#").strip() for line in head)


CLASSES = (BaseConfig, NPTConfig, DataConfig, TrainConfig)


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_settings_that_work_together_and_says_what_it_is(name):
    given = with_safe_mode(read_yaml(name, CLASSES, {"safe_mode": bool}))
    for cls in CLASSES:
        build(cls, given)
    assert len(about(presets()[name])) > 80


def test_a_file_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings_file("tiny") == presets()["tiny"]
    (tmp_path / "tiny").write_text("adapter_rank: 3\n")
    assert read_yaml("tiny", CLASSES) == {"adapter_rank": 3}


def test_what_is_neither_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigError, match=r"--config tinny is neither a file nor a preset: .*tiny"):
        read_yaml("tinny", CLASSES)


@pytest.mark.slow
def test_the_preset_of_completions_learns_them(tmp_path, capsys):
    rows = (
        {"prompt": f"# item {i}\n", "completion": f"answer = {{{i % 4}: 'done'}}"}
        for i in range(300)
    )
    data, run = tmp_path / "pairs.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--dataset_name", str(data), "--max_steps", "16", "--output_dir", str(run)]
    flags += ["--eval_samples", "16", "--max_length", "32", "--calibration_tokens", "1024"]
    assert main(["pretrain", "--config", "completions", *flags]) == 0
    assert "diverged" not in capsys.readouterr().out
    found = json.loads((run / "fidelity.json").read_text(encoding="utf-8"))
    assert found["student"]["perplexity"] < 0.2 * found["teacher"]["perplexity"]
    assert found["initial"]["perplexity"] > 0.8 * found["teacher"]["perplexity"]


LARGE = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-8b", "mistral-7b", "smollm2-135m")
"""Presets of models that are not at hand: planned, and never run."""

PLANNED = re.compile(
    r"Predicted memory ([\d.]+) GiB, by npt (doctor .*) On a GPU the states of three steps in"
    r" flight add (.*)\.$"
)


@pytest.mark.parametrize("name", LARGE)
def test_a_large_models_preset_names_base_and_shape_and_no_training(name):
    given = read_yaml(name, CLASSES)
    training, shape = build(TrainConfig, given), SHAPES[name]
    assert given["model_name"].rpartition("/")[2].lower().startswith(name)
    assert (
        training.learning_rate <= 5e-5 * 576 / shape.hidden * 1.001
        and given["init"] == "calibrated"
    )
    assert training.save_steps <= training.max_steps and given["streaming"]
    head = about(presets()[name])
    assert f"rank {given['adapter_rank']} (D/{shape.hidden // given['adapter_rank']})" in head
    assert "This preset has not been run" in head
    found = PLANNED.search(head)
    assert found is not None
    assert found[2] == f"doctor --plan --device cpu --config {name} --shape {name}"


@pytest.mark.parametrize("name", LARGE)
def test_the_command_in_a_comment_says_the_memory_next_to_it(name, monkeypatch, capsys):
    found = PLANNED.search(about(presets()[name]))
    assert found is not None
    # room enough, whatever is free here
    monkeypatch.setattr("npt.doctor.plan.available", lambda device: 40 * 2**30)
    status = main([*found[2].split(), "--json"])
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert status == 0 and plan["fits"] and plan["name"] == name
    memory = plan["memory"]
    assert memory["peak_bytes"] / 2**30 == pytest.approx(float(found[1]), abs=0.0051), name
    adapters = next(term["bytes"] for term in memory["terms"] if term["name"] == "adapters")
    assert shown(9 * adapters) == found[3]  # parameters and two moments, of three steps


def test_a_presets_base_yields_to_a_shape_and_a_preset_to_flags(capsys):
    flags = ["--device", "cpu", "--config", "tiny", "--shape", "embedded", "--batch_size", "2"]
    assert main(["doctor", "--plan", *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["name"], plan["tokens_per_step"], plan["ranks"]) == ("embedded", 2 * 256, [96] * 4)
    assert main(["doctor", "--data", "--config", "tiny", "--max_records", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["records"] == 3
    assert main(["doctor", "--plan", "--config", "none.yaml"]) == 2
    assert "--config none.yaml is neither a file nor a preset" in capsys.readouterr().err

"""The run folder: complete lines, no NaN, checkpoints that rotate only once the new one stands, and folders in use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import npt
from npt.config import NPTConfig
from npt.distill.run_folder import RunFolder, check_free, default_folder, versions
from npt.errors import AdapterFileError, ConfigError


def strict(text: str) -> object:
    """JSON as its standard has it: NaN and Infinity are refused."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))


def lines(path: Path) -> list[object]:
    return [strict(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "outputs" / "run")
    yield made
    made.close()


def student(load_model: Callable[..., nn.Module]) -> nn.Module:
    model = load_model()
    npt.attach(model, NPTConfig(rank=2, layers="3"))
    return model


def test_non_finite_values_are_written_as_null_at_any_depth(folder) -> None:
    folder.metrics({"step": 1, "loss": math.nan, "deep": {"list": [1.0, math.inf, -math.inf]}})
    folder.event("refusal", value=math.nan)
    folder.write("fidelity.json", {"student": {"kl": math.inf}})
    assert lines(folder.path / "metrics.jsonl") == [{"step": 1, "loss": None, "deep": {"list": [1.0, None, None]}}]
    assert lines(folder.path / "events.jsonl")[0]["value"] is None
    assert strict((folder.path / "fidelity.json").read_text()) == {"student": {"kl": None}}


def test_every_line_is_on_disk_before_the_folder_is_closed(folder) -> None:
    for step in range(3):
        folder.metrics({"step": step})
        folder.event("save", step=step)
        assert len(lines(folder.path / "metrics.jsonl")) == len(lines(folder.path / "events.jsonl")) == step + 1


def test_an_event_says_what_and_when(folder) -> None:
    folder.event("signal", number=15)
    (event,) = lines(folder.path / "events.jsonl")
    assert event["event"] == "signal" and event["number"] == 15
    assert event["time"] > 1.7e9  # seconds since 1970, not since the start of the process


@pytest.mark.parametrize(("name", "what"), [("run.json", "another run"), ("notes.txt", "other files")])
def test_a_folder_in_use_is_refused_and_left_alone(tmp_path, name, what) -> None:
    (tmp_path / name).write_text("{}")
    for refuse in (check_free, RunFolder):
        with pytest.raises(ConfigError, match=what):
            refuse(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_free(tmp_path / "run")


def test_a_folder_below_a_file_cannot_be_written_and_that_is_said(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder(tmp_path / "file" / "run")


def test_an_empty_or_missing_folder_is_free(tmp_path) -> None:
    check_free(tmp_path)
    check_free(tmp_path / "missing" / "run")
    assert not (tmp_path / "missing").exists()  # asking makes nothing


@pytest.mark.parametrize(("keep", "expected"), [(None, [1, 2, 3, 10]), (1, [10]), (2, [3, 10]), (9, [1, 2, 3, 10])])
def test_the_newest_checkpoints_are_kept(folder, load_model, keep, expected) -> None:
    model = student(load_model)
    for step in (1, 2, 3, 10):
        path = folder.save_checkpoint(model, step, "hash", keep)
        assert (path / "adapter" / "adapter_model.safetensors").is_file()
    assert [p.name for p in folder.checkpoints()] == [f"step-{step:08d}" for step in expected]
    assert sorted(p.name for p in (folder.path / "checkpoints").iterdir()) == [f"step-{step:08d}" for step in expected]


def test_a_checkpoint_loads_bit_for_bit_and_names_its_base(folder, load_model) -> None:
    model = student(load_model)
    with torch.no_grad():
        model.model.layers[3].npt.M["up"].normal_(generator=torch.Generator().manual_seed(0))
    path = folder.save_checkpoint(model, 5, npt.base_hash(model), None)
    assert path == folder.path / "checkpoints" / "step-00000005"
    assert {p.name for p in (path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    other = load_model()
    npt.load_adapter(other, path / "adapter", base_hash=npt.base_hash(other))
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_a_poisoned_adapter_costs_no_older_checkpoint(folder, load_model) -> None:
    model = student(load_model)
    folder.save_checkpoint(model, 1, "hash", 1)
    with torch.no_grad():
        model.model.layers[3].npt.A[0, 0] = math.nan
    with pytest.raises(AdapterFileError, match="not finite"):
        folder.save_checkpoint(model, 2, "hash", 1)
    assert [p.name for p in folder.checkpoints()] == ["step-00000001"]
    assert (folder.checkpoints()[0] / "adapter" / "adapter_model.safetensors").is_file()


def test_only_checkpoint_folders_count_as_checkpoints(folder, load_model) -> None:
    kept = folder.path / "checkpoints" / "step-mine"
    kept.mkdir(parents=True)
    folder.save_checkpoint(student(load_model), 1, "hash", 1)
    assert [p.name for p in folder.checkpoints()] == ["step-00000001"]
    assert kept.is_dir()


def test_versions_name_what_the_numerics_depend_on() -> None:
    found = versions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "npt", "transformers", "bitsandbytes"} <= found.keys()


def test_the_default_folder_is_below_outputs() -> None:
    assert default_folder().parts[0] == "outputs"

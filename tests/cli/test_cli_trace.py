"""`npt trace`: exit status, one line on standard error, and the text and JSON output."""

import json
import math
from pathlib import Path

import pytest
import torch
from cli_words import flags, saved_adapter

import npt
from npt.cli.main import main

pytestmark = pytest.mark.usefixtures("short_library")


def run(line: str, *more: object) -> int:
    return main(flags(f"trace --max_length 16 --batch_size 2 {line}", *more))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A fresh adapter of the embedded model's upper half, in NF4."""
    return saved_adapter(tmp_path_factory.mktemp("adapter") / "sound", rank=4)


@pytest.fixture(scope="module")
def huge_adapter(adapter, tmp_path_factory) -> Path:
    """One whose numbers are finite, so that it loads, and too large to train with."""
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.load_adapter(model, adapter)
    with torch.no_grad():
        model.get_parameter("model.layers.6.npt.A")[1, 2] = 3e38
    return npt.save_adapter(model, tmp_path_factory.mktemp("adapter") / "huge")


@pytest.fixture
def broken_base(monkeypatch) -> None:
    """A base in which a weight is NaN."""
    load = npt.load_base

    def loaded(*arguments: object, **settings: object) -> tuple:
        model, tokenizer = load(*arguments, **settings)
        with torch.no_grad():
            model.get_parameter("model.layers.3.post_attention_layernorm.weight")[9] = math.nan
        return model, tokenizer

    monkeypatch.setattr(npt, "load_base", loaded)


def test_a_sound_base_ends_0(capsys) -> None:
    assert run("--batches 2 --use_quantization") == 0
    out = capsys.readouterr().out
    assert "NF4" in out and "no fault in 2 batches (forward pass of the base)" in out
    assert run("--json") == 0
    expected = {"fault": None, "batches": 1, "traced": "forward pass of the base"}
    assert json.loads(capsys.readouterr().out) == expected


def test_a_fault_ends_1_with_its_verdict(broken_base, capsys) -> None:
    assert run("--use_quantization --batches 3") == 1
    out = capsys.readouterr().out
    for words in (
        "batch 0 (forward pass of the base):",
        "corrupt weight: model.layers.3.post_attention_layernorm.weight held nan",
        "remedy: ",
    ):
        assert words in out
    assert run("--use_quantization --json") == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"fault", "batches", "traced"} and found["batches"] == 1
    fault = found["fault"]
    expected = {"cause": "corrupt weight", "layer": 3, "index": [9], "value": "nan", "row": 0}
    assert expected.items() <= fault.items() and fault["sample"]


@pytest.mark.parametrize("strategy", [None, "end_to_end"])
def test_an_adapters_training_step_is_traced(adapter, strategy, capsys) -> None:
    extra = "" if strategy is None else f"--strategy {strategy}"
    assert run(f"--use_quantization {extra} --adapter", adapter) == 0
    words = f"no fault in 1 batch (training step, {strategy or 'end_to_end'})"
    assert words in capsys.readouterr().out


def test_an_adapter_that_training_overflows_with_is_found(huge_adapter, capsys) -> None:
    assert run("--use_quantization --json --adapter", huge_adapter) == 1
    fault = json.loads(capsys.readouterr().out)["fault"]
    assert (fault["cause"], fault["layer"]) == ("corrupt weight", 6)
    assert "model.layers.6.npt.A" in fault["explanation"]


def test_a_limit_is_handed_on(capsys) -> None:
    assert run("--limit 50 --json") == 1
    fault = json.loads(capsys.readouterr().out)["fault"]
    assert (fault["cause"], fault["reached"]) == ("beyond the limit", "a value above 50")
    assert abs(fault["value"]) > 50
    assert run("--limit 1e12") == 0


def test_another_batch_is_looked_at_until_one_is_bad(tmp_path, capsys) -> None:
    file = tmp_path / "ids.jsonl"
    rows = [*[[5, 6, 7]] * 20, [5, 99_999, 7]]
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    line = f"--streaming --batch_size 1 --json --dataset_name {file} --batches"
    assert run(line, 99) == 1
    found = json.loads(capsys.readouterr().out)
    before = found["batches"] - 1  # where the shuffle has put it
    assert 0 < before < 21
    assert {"cause": "token id", "token": 1, "value": 99_999}.items() <= found["fault"].items()
    assert run(line, before) == 0


@pytest.mark.parametrize("streaming", ["", "--streaming"])
def test_data_without_a_sample_are_refused(tmp_path, streaming, capsys) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"input_ids": [5]}) + "\n", encoding="utf-8")
    assert run(f"{streaming} --dataset_name", file) == 2
    assert "no sample to train on" in capsys.readouterr().err


def test_a_pass_is_compared_with_a_file_and_with_another_device(
    tmp_path, capsys, monkeypatch
) -> None:
    file = tmp_path / "before.safetensors"
    assert run("--use_quantization --against", file) == 0 and file.is_file()
    assert "after a change, rerun the command" in capsys.readouterr().out
    assert run("--use_quantization --attn_implementation eager --against", file) == 0
    words = f"no difference beyond rounding (forward pass of the base compared with {file})"
    assert words in capsys.readouterr().out
    assert run("--use_quantization --against cpu") == 0
    assert "pass of the base compared with cpu" in capsys.readouterr().out
    assert run("--against cpu --batches 2") == 2
    assert "remove --batches and --limit" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert run("--against cuda") == 2
    assert "there is no device cuda (torch sees 0 GPUs)" in capsys.readouterr().err


def test_a_parting_ends_1(request, tmp_path, capsys) -> None:
    file = tmp_path / "before.safetensors"
    assert run("--use_quantization --against", file) == 0
    request.getfixturevalue("broken_base")
    capsys.readouterr()
    assert run("--use_quantization --json --against", file) == 1
    fault = json.loads(capsys.readouterr().out)["fault"]
    assert (fault["cause"], fault["layer"]) == ("beyond rounding", 3)
    assert fault["module"] == "model.layers.3.post_attention_layernorm"


def test_an_adapters_training_step_is_compared(adapter, capsys) -> None:
    assert run("--use_quantization --against cpu --adapter", adapter) == 0
    assert "(training step, end_to_end compared with cpu)" in capsys.readouterr().out

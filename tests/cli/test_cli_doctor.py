"""`npt doctor` as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_words import flags

import npt
from npt.base.load import load_base
from npt.cli.main import main


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch) -> None:
    """A look at the data loads no base."""
    monkeypatch.setattr(npt, "load_base", None)


@pytest.fixture
def sound(tmp_path) -> Path:
    path = tmp_path / "sound.jsonl"
    lines = [json.dumps({"prompt": f"x_{i} =", "completion": f" {i * i}"}) for i in range(60)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def broken(tmp_path) -> Path:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n{"text" "x"}\n{"text": "fine"}\n{"text": 3}\n')
    return path


def test_sound_data_end_0_with_counts_and_samples(sound: Path, capsys) -> None:
    assert main(["doctor", "--data", str(sound)]) == 0
    out, err = capsys.readouterr()
    for words in ("records", "60", "0 outside", "⟦<s>x_", "no problem found"):
        assert words in out
    assert out.count(" tokens: ⟦") == 3 and err == ""


def test_broken_data_end_2_with_every_line_column_and_problem(broken: Path, capsys) -> None:
    assert main(["doctor", "--data", str(broken)]) == 2
    out = capsys.readouterr().out
    assert f"{broken}, line 2, column 9: not JSON (Expecting ':' delimiter)" in out
    assert f"{broken}: record broken.jsonl:4 has an int as 'text'" in out
    assert "error: faults in the data: 2" in out
    assert main(["doctor", "--data", str(broken), "--json"]) == 2
    values = json.loads(capsys.readouterr().out)["data"]
    assert len(values["broken"]) == 2
    assert (values["samples"], values["trainable"]) == (2, False)


def test_chats_train_on_the_embedded_model_which_is_named(tmp_path, capsys) -> None:
    path = tmp_path / "chat.jsonl"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert main(["doctor", "--data", str(path)]) == 0
    out = capsys.readouterr().out
    assert "of the embedded model; choose yours with --model_name" in out
    assert "⟦<s>Be brief.\\n1 + 1?\\n2</s>2 + 2?⟧\\n4</s>" in out
    assert main(["doctor", "--data", str(path), "--model_name", "tiny"]) == 0
    assert "tokenizer          tiny\n" in capsys.readouterr().out


def test_data_may_be_named_as_in_training_and_the_flags_of_training_hold(sound, capsys) -> None:
    printed = []
    for line in ("--data", "--data --dataset_name", "--dataset_name"):
        more = ["--data"] if line == "--dataset_name" else []
        assert main(flags(f"doctor {line}", sound, *more)) == 0
        printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1
    line = "doctor --max_length 4 --packing --max_records 10 --json --data"
    assert main(flags(line, sound)) == 0
    values = json.loads(capsys.readouterr().out)["data"]
    assert (values["records"], values["longest"]) == (10, 4)


def test_replayed_data_are_looked_at_as_well(sound: Path, broken: Path, capsys) -> None:
    assert main(["doctor", "--data", str(sound), "--replay_dataset", str(broken), "--json"]) == 2
    values = json.loads(capsys.readouterr().out)
    assert (values["data"]["trainable"], values["replay"]["trainable"]) == (True, False)


# --- plans
# --------------------------------------------------------------------------------------------------


MODEL = flags("doctor --plan --measure --max_length 32 --use_quantization --layers 4,5")
PLAN = flags("doctor --plan --shape embedded --max_length 32 --use_quantization")


def plan_of(capsys, *arguments: str) -> dict:
    assert main([*PLAN, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["plan"]


def test_a_plan_shows_all_memory_in_80_columns(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    logits = ["--strategy", "end_to_end", "--logit_kl_weight", "0.5"]
    assert main([*PLAN, *logits, "--layers", "1,3"]) == 0
    out, err = capsys.readouterr()
    for words in (
        "base, NF4",
        "AdamW's two moments",
        "state before the step",
        "logits",
        "activations kept",
        "; it fits in the",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80 and err == ""


def test_a_plan_as_json_holds_the_terms_that_add_up_to_the_peak(capsys) -> None:
    plan = plan_of(capsys, "--gradient_accumulation_steps", "3")
    memory = plan["memory"]
    for phase, size in memory["phases"].items():
        assert sum(term["bytes"] for term in memory["terms"] if phase in term["phases"]) == size
    assert memory["peak_bytes"] == max(memory["phases"].values()) and plan["fits"]
    assert plan["tokens_per_step"] == 3 * 4 * 32


def test_a_plan_for_70b_on_1_2_and_8_cards(capsys) -> None:
    plans = [
        plan_of(capsys, "--shape", "llama-3.1-70b", "--device", "cuda", "--shard_base", *more)
        for more in (["--processes", "1"], ["--processes", "2"], ["--processes", "8"])
    ]
    alone, two, eight = ({t["name"]: t["bytes"] for t in p["memory"]["terms"]} for p in plans)
    codes = 80 * (2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672) / 2
    for terms, count in ((two, 2), (eight, 8)):
        saved = alone["base, NF4"] - terms[f"base, NF4, 1/{count} of layers"]
        assert saved == pytest.approx(codes * (1 - 1 / count), rel=1e-3)
        assert terms["layers that are gathered"] == pytest.approx(3 * codes / 80, rel=0.05)
        assert terms["adapters"] == alone["adapters"]
    assert [p["tokens_per_step"] // plans[0]["tokens_per_step"] for p in plans] == [1, 2, 8]


def test_a_run_that_does_not_fit_ends_2(capsys, monkeypatch) -> None:
    monkeypatch.setattr("npt.doctor.plan.available", lambda device: 1000)
    assert main(PLAN) == 2
    assert "; it does not fit in the 1000 bytes free" in capsys.readouterr().out


def test_windows_of_rising_size_are_measured_until_one_does_not_fit(capsys, monkeypatch) -> None:
    monkeypatch.setattr(npt, "load_base", load_base)
    line = [*MODEL, "--batch_size", "3", "--json"]
    assert main(line) == 0
    windows = json.loads(capsys.readouterr().out)["plan"]["measured"]
    assert [window["samples"] for window in windows] == [1, 2, 3]
    for window in windows:
        assert window["predicted"] == pytest.approx(window["peak"], rel=0.15)
        assert window["seconds"] > 0
    # which two samples fit into, and three do not
    room = (windows[1]["predicted"] + windows[2]["predicted"]) // 2
    monkeypatch.setattr("npt.doctor.plan.available", lambda device: room)
    assert main(line[:-1]) == 2
    out = capsys.readouterr().out
    assert "predicted" in out and out.count("does not fit") == 2

    def window(model: Any, config: Any, samples: int, *_: Any) -> tuple[int, float]:
        if samples > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return 1000, 0.5

    monkeypatch.undo()
    monkeypatch.setattr("npt.doctor.measure.measure_window", window)
    assert main(line) == 0
    windows = json.loads(capsys.readouterr().out)["plan"]["measured"]
    assert [window["peak"] is None for window in windows] == [False, True]


def test_a_model_and_a_gpu_that_is_not_here_are_planned(capsys) -> None:
    assert main(flags("doctor --plan --max_length 32 --layers 7 --json")) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["name"] == "tiny"
    plan = plan_of(capsys, "--device", "cuda")
    assert plan["device"] == "cuda" and plan["limit_bytes"] is None and plan["fits"]


def test_data_and_plan_may_be_asked_for_together(sound: Path, capsys) -> None:
    assert main(["doctor", "--data", str(sound), "--plan", "--max_length", "32", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"data", "plan"}

"""`npt doctor` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import npt
from npt.cli.main import main


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the data loads no base."""
    monkeypatch.setattr(npt, "load_base", None)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.jsonl"
    lines = [json.dumps({"prompt": f"x_{i} =", "completion": f" {i * i}"}) for i in range(60)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n{"text" "x"}\n{"text": "fine"}\n{"text": 3}\n')
    return path


def test_sound_data_end_0_with_counts_and_samples(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data", str(sound)]) == 0
    out, err = capsys.readouterr()
    for words in ("records", "60", "padding, batches of 4", "0 outside", "⟦<s>x_", "no problem found"):
        assert words in out
    assert out.count(" tokens: ⟦") == 3 and err == ""


def test_broken_data_end_2_with_every_line_column_and_problem(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data", str(broken)]) == 2
    out = capsys.readouterr().out
    assert f"{broken}, line 2, column 9: not JSON (Expecting ':' delimiter)" in out
    assert f"{broken}, line 4, column 2: record broken.jsonl:4 has a int as 'text'" in out
    assert "error: 2 broken places" in out


def test_json_is_all_of_standard_output(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data", str(broken), "--json"]) == 2
    values = json.loads(capsys.readouterr().out)["data"]
    assert [(b["line"], b["column"]) for b in values["broken"]] == [(2, 9), (4, 2)]
    assert (values["samples"], values["trainable"]) == (2, False)


def test_ids_outside_the_vocabulary_end_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"input_ids": [5, 99999]}\n')
    assert main(["doctor", "--data", str(path)]) == 2
    assert "1 ids outside the vocabulary [0, 2048), the first in sample ids.jsonl:1@0" in capsys.readouterr().out


@pytest.mark.parametrize("before", [True, False])
def test_data_may_be_named_as_in_training(sound: Path, before: bool, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--dataset_name", str(sound)]
    assert main(["doctor", *(["--data", *named] if not before else [*named, "--data"])]) == 0
    one = capsys.readouterr().out
    assert main(["doctor", "--data", str(sound)]) == 0
    assert capsys.readouterr().out == one


def test_the_flags_of_training_hold(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max_length", "4", "--packing", "--batch_size", "3", "--max_records", "10", "--json"]
    assert main(["doctor", "--data", str(sound), *arguments]) == 0
    values = json.loads(capsys.readouterr().out)["data"]
    assert (values["records"], values["longest"], values["packing"], values["batch_size"]) == (10, 4, True, 3)


def test_the_seed_chooses_the_samples(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("0", "0", "1"):
        assert main(["doctor", "--data", str(sound), "--seed", seed, "--json"]) == 0
        shown.append([s["id"] for s in json.loads(capsys.readouterr().out)["data"]["shown"]])
    assert shown[0] == shown[1] != shown[2]


def test_replayed_data_are_looked_at_as_well(sound: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data", str(sound), "--replay_dataset", str(broken), "--json"]) == 2
    values = json.loads(capsys.readouterr().out)
    assert (values["data"]["trainable"], values["replay"]["trainable"]) == (True, False)


BAD = {
    "nothing asked for": ([], ["--data [NAME]"]),
    "data without being asked for": (["--dataset_name", "builtin"], ["--data [NAME]"]),
    "two names": (["--data", "a.txt", "--dataset_name", "b.txt"], ["a.txt", "b.txt"]),
    "missing file": (["--data", "none.jsonl"], ["none.jsonl", "dataset_name"]),
    "samples longer than the model": (["--data", "--max_length", "2000"], ["2000", "1024"]),
    "no such model": (["--data", "--model_name", "./none"], ["./none"]),
    "seed beyond 31 bits": (["--data", "--seed", "99999999999"], ["seed", "99999999999"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, named = BAD[case]
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert [word for word in named if word not in err] == []


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--batch_size", "0"], ["--max_records", "0"], ["--num_samples", "3"]])
def test_flags_that_cannot_be_are_refused_by_the_parser(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--data", *arguments])
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_the_verb_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "doctor" in capsys.readouterr().out

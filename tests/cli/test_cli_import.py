"""`npt import`, and a GGUF file as --model_name."""

from __future__ import annotations

import json

import pytest
from cli_words import flags
from gguf_files import Type, write_gguf

from npt.cli.main import main

RUN = (
    "--init random --no_smoke_test --layers 1 --adapter_rank 2 --max_length 32 --max_steps 1"
    " --batch_size 2 --eval_samples 2 --use_quantization"
)


@pytest.fixture(autouse=True)
def file(tmp_path):
    return write_gguf(tmp_path / "a.gguf", kind=Type.Q8_0)


def test_the_verb_says_what_it_wrote(file, tmp_path, capsys) -> None:
    folder = tmp_path / "out"
    assert main(["import", str(file), str(folder)]) == 0
    wrote, origin = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote {folder}: 192,832 parameters in fp16, 0.4 MB")
    assert origin == (f"{file} was quantised to Q8_0: what was written is that, not the original")
    assert main(["import", str(file), str(folder)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_the_verb_prints_json(file, tmp_path, capsys) -> None:
    assert main(["import", "--json", str(file), str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["quantization"], found["dtype"], found["size"]) == ("Q8_0", "fp16", 385664)
    assert found["parameters"] == 192832


def test_a_wrong_file_is_one_line(tmp_path, capsys) -> None:
    (tmp_path / "b.gguf").write_text("no")
    assert main(["import", str(tmp_path / "b.gguf"), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is no GGUF file" in line and not (tmp_path / "out").exists()


def test_a_run_on_a_file_records_its_origin_and_resumes(file, tmp_path, capsys) -> None:
    (tmp_path / "lines.txt").write_text("The quick brown fox jumps over the lazy dog. \n" * 40)
    run = ["pretrain", "--model_name", str(file), "--dataset_name", str(tmp_path / "lines.txt")]
    run += [*RUN.split(), "--output_dir", str(tmp_path / "run")]
    assert main(run) == 0
    said = capsys.readouterr().out
    assert "a.gguf was quantised to Q8_0: that is loaded, not the original" in said
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["base_origin"]["quantization"] == "Q8_0"
    assert main([*run, "--resume", str(tmp_path / "run"), "--max_steps", "2"]) == 0


def test_a_plan_takes_a_file(file, tmp_path, capsys) -> None:
    plan = ["doctor", "--plan", "--json", "--model_name", str(file), "--layers", "1"]
    assert main([*plan, *flags("--max_length 32 --adapter_rank 2 --init random")]) == 0
    assert json.loads(capsys.readouterr().out)
